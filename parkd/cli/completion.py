"""`parkd completion`: prints a script with which a shell completes commands and flags."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from parkd.cli.arguments import COMMANDS, OTHER_COMMANDS
from parkd.config import SETTINGS
from parkd.errors import ConfigError

SHELLS = ("bash", "zsh", "tcsh")


def run(words: Sequence[str]) -> int:
    """Returns the exit code. Raises ConfigError for a shell that is not known."""
    if len(words) != 1 or words[0] not in SHELLS:
        raise ConfigError(
            f"parkd completion takes a shell: {', '.join(SHELLS)}. In bash: source <(parkd completion bash)"
        )
    import shtab

    parser = argparse.ArgumentParser(prog="parkd")
    parser.add_argument("command", nargs="?", choices=[*COMMANDS, *OTHER_COMMANDS])
    kinds = {"FILE": shtab.FILE, "PATH|ID": shtab.FILE, "[NAME=]FILE": shtab.FILE, "DIR": shtab.DIRECTORY}
    flags: list[tuple[str, tuple[str, ...], str, str]] = [("--config", (), "FILE", "a TOML file of settings")]
    flags += [(f"--{setting.name}", setting.short, setting.metavar, setting.help) for setting in SETTINGS]
    for name, short, metavar, text in flags:
        value = {"metavar": metavar} if metavar else {"action": "store_true"}
        made = parser.add_argument(*short, name, help=text, **value)  # type: ignore[arg-type]
        if metavar in kinds:
            made.complete = kinds[metavar]  # type: ignore[attr-defined]
    print(shtab.complete(parser, words[0]))
    return 0
