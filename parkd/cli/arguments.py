"""The command line: from words to a command and its flags. `parkd/config` interprets the flags."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from parkd import __version__
from parkd.cli.foreign_words import FOREIGN_COMMANDS, FOREIGN_FLAGS
from parkd.config import SETTINGS, nearest
from parkd.errors import ConfigError

_EPILOG = """\
Every flag is also a variable (--ctx-size is PARKD_CTX_SIZE) and a key of the TOML file named by --config
(ctx-size = 8192). A flag overrides a variable, a variable overrides the file. Defaults are in brackets.

`parkd` means `parkd serve`. `parkd demo` starts a server, parks and restores a conversation, and prints a table.
`parkd plan` prints how much of a model's state the parking budget holds, without loading the weights. `parkd canary`
tries whether a model's state comes back as it left. All three take the flags above. `parkd replay` runs a recorded
trace through the store without a model, `parkd export` and `parkd import` move a conversation in a file. A running
server is asked by `parkd ps`, `parkd show`, `parkd why`, `parkd bill` and `parkd top`, and steered by `parkd pin`,
`parkd unpin`, `parkd keep` and `parkd forget`. They have their own flags: `parkd replay --help`, `parkd ps --help`.
`parkd completion bash` (or zsh, tcsh) prints a script with which the shell completes all this.
`parkd tier config` prints what vLLM is told to keep its state by parkd-tier, where that is installed.
"""

_GROUPS_OF_A_MODEL = {"model", "llama.cpp", "parking"}
_HELP = {
    "serve": (
        "parkd [serve | plan | demo | canary] [flags], or parkd COMMAND --help",
        "Serves one model to many conversations, and restores the state of each when it returns.",
        _EPILOG,
    ),
    "plan": (
        "parkd plan [flags]",
        "Prints how much of a model's state the parking budget holds and what it would refuse, without the weights.",
        "A server's other flags are taken too, and change nothing here.",
    ),
    "demo": (
        "parkd demo [flags]",
        "Starts a server, sends turns of conversations A, A, B, A, and prints what was reused and how long it took.",
        "Without --model, it runs the demo model. A server's other flags are taken too and given to the server.",
    ),
    "canary": (
        "parkd canary [--json] [flags]",
        "Reads, parks, overwrites and restores two short conversations, and compares state and answers bit for bit.",
        "With --json it prints one JSON object. Exit code 1: something differed. A server's other flags are taken.",
    ),
}
"""Usage, description and last lines of each command's help."""

COMMANDS = ("serve", "demo", "plan", "canary")
"""Commands that take the settings."""
REMOTE_COMMANDS = ("ps", "show", "why", "pin", "unpin", "keep", "forget", "bill", "top")
"""Commands that speak to a running server."""
OTHER_COMMANDS = (*REMOTE_COMMANDS, "export", "import", "replay", "completion")
"""Commands with flags of their own."""

_SHORT_FLAG = re.compile(r"-[A-Za-z]")


@dataclass(frozen=True)
class Invocation:
    """A parsed command line."""

    command: str
    """One of COMMANDS."""
    flags: dict[str, str]
    """The text typed for each setting name, and for `config`."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (parkd --help lists the flags)")


def parse(arguments: Sequence[str]) -> Invocation:
    """Parses the command line. Raises ConfigError; exits for `--help` and `--version`."""
    words = list(arguments)
    command = words.pop(0) if words and not words[0].startswith("-") else "serve"
    if command in FOREIGN_COMMANDS:
        raise ConfigError(f"there is no command {command!r}: {FOREIGN_COMMANDS[command]}")
    if command.lower().endswith(".gguf") or "/" in command:
        raise ConfigError(f"a model is named with --model: parkd --model {command}")
    if command not in COMMANDS:
        others = [*COMMANDS, *OTHER_COMMANDS]
        raise ConfigError(f"unknown command {command!r}{nearest(command, others)} (there are {', '.join(others)})")
    _check_short(words)
    parsed, rest = _parser(command).parse_known_args(words)
    if rest:
        raise _unknown(rest[0])
    given = {
        name.replace("_", "-"): ",".join(value) if isinstance(value, list) else value
        for name, value in vars(parsed).items()
        if value is not None
    }
    return Invocation(command, given)


def _check_short(words: Sequence[str]) -> None:
    """Raises ConfigError for a short flag that is not known. argparse would take `-n` for the beginning of `-ngl`, and
    `-md x` for `-m d x`."""
    known = {"-h", *(short for setting in SETTINGS for short in setting.short)}
    for word in words:
        if _SHORT_FLAG.match(word) and word.partition("=")[0] not in known:
            raise _unknown(word)


def _unknown(word: str) -> ConfigError:
    """The error for a word that is neither a flag of parkd nor the value of one."""
    flag = word.partition("=")[0]
    if flag in FOREIGN_FLAGS:
        return ConfigError(f"there is no flag {flag} here: {FOREIGN_FLAGS[flag]}")
    if not flag.startswith("-"):
        return ConfigError(f"{flag!r} belongs to no flag; a model is named with --model")
    known = [f"--{setting.name}" for setting in SETTINGS] + ["--config", "--help", "--version"]
    return ConfigError(f"unknown flag {word}{nearest(flag, known)}")


def _parser(command: str) -> argparse.ArgumentParser:
    """The parser of a command. All take every setting, so that a server's flags can be planned with as they are; the
    help shows those that the command reads."""
    usage, description, epilog = _HELP[command]
    shown_groups = {setting.group for setting in SETTINGS} if command == "serve" else _GROUPS_OF_A_MODEL
    parser = _Parser(
        prog="parkd",
        usage=usage,
        description=description,
        epilog=epilog,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=34, width=118),
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"parkd {__version__}")
    parser.add_argument("--config", metavar="FILE", help="read settings from this TOML file")
    groups: dict[str, argparse._ArgumentGroup] = {}
    for setting in SETTINGS:
        shown = setting.group in shown_groups
        if shown and setting.group not in groups:
            groups[setting.group] = parser.add_argument_group(setting.group)
        group = groups[setting.group] if shown else parser
        text = setting.help if shown else argparse.SUPPRESS
        dest = setting.name.replace("-", "_")
        if setting.words > 1:
            names = tuple(setting.metavar.split())
            group.add_argument(
                *setting.short, f"--{setting.name}", dest=dest, metavar=names, nargs=setting.words, help=text
            )
        elif setting.metavar:
            action = "append" if setting.many else "store"
            group.add_argument(
                *setting.short,
                f"--{setting.name}",
                dest=dest,
                metavar=setting.metavar,
                action=action,
                help=text,
            )
        else:
            group.add_argument(
                *setting.short, f"--{setting.name}", dest=dest, action="store_const", const="true", help=text
            )
    return parser
