"""`parkd completion`: prints a script with which a shell completes commands and their flags."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from parkd.cli.arguments import COMMANDS, OTHER_COMMANDS, REMOTE_COMMANDS
from parkd.config import SETTINGS
from parkd.errors import ConfigError

SHELLS = ("bash", "zsh", "tcsh")
FILES = ("FILE", "PATH|ID", "[NAME=]FILE", "SVG", "TRACE", "trace")
"""Names of values that are files."""
DIRECTORIES = ("DIR",)


def run(words: Sequence[str]) -> int:
    """Returns the exit code. Raises ConfigError for a shell that is not known."""
    if len(words) != 1 or words[0] not in SHELLS:
        raise ConfigError(
            f"parkd completion takes a shell: {', '.join(SHELLS)}. In bash: source <(parkd completion bash)"
        )
    import shtab

    print(shtab.complete(_all_commands(), words[0]))
    return 0


def _all_commands() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="parkd", parents=[_settings()], add_help=False)
    commands = parser.add_subparsers(dest="command")
    for name in (*COMMANDS, *OTHER_COMMANDS):
        # shtab leaves out commands without a help. "resolve": both ways to forget have --help.
        parents = _parsers(name)
        taken = commands.add_parser(
            name, help=parents[-1].description or name, parents=parents, add_help=False, conflict_handler="resolve"
        )
        _complete_paths(taken)
    _complete_paths(parser)
    return parser


def _parsers(command: str) -> list[argparse.ArgumentParser]:
    """Whose flags and arguments a command takes together."""
    from parkd.cli import forget, portable
    from parkd.cli.remote import command as remote
    from parkd.replay import command as replay

    own = argparse.ArgumentParser(add_help=False)
    if command == "canary":
        own.add_argument("--json", action="store_true", help="print JSON")
    if command == "completion":
        own.add_argument("shell", choices=SHELLS)
    parsers = [own]
    if command in COMMANDS:
        parsers.append(_settings())
    if command in REMOTE_COMMANDS:
        parsers.append(remote.parser_of(command))
    if command == "forget":
        parsers.append(forget.make_parser())
    if command in ("export", "import"):
        parsers.append(portable.parser_of(command))
    if command == "replay":
        parsers.append(replay.make_parser())
    return parsers


def _settings() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    flags: list[tuple[str, tuple[str, ...], str, str]] = [("--config", (), "FILE", "a TOML file of settings")]
    flags += [(f"--{setting.name}", setting.short, setting.metavar, setting.help) for setting in SETTINGS]
    for name, short, metavar, text in flags:
        value = {"metavar": metavar} if metavar else {"action": "store_true"}
        parser.add_argument(*short, name, help=text, **value)  # type: ignore[arg-type]
    return parser


def _complete_paths(parser: argparse.ArgumentParser) -> None:
    import shtab

    for action in parser._actions:
        if (action.metavar or action.dest) in FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.metavar in DIRECTORIES:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
