"""`parkd tier ...`: the words go to parkd-tier, a distribution of its own, if it is installed here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import entry_points

from parkd.errors import ConfigError

GROUP = "parkd.commands"
"""Entry points of distributions that add a command: functions from words to an exit code."""
NAME = "tier"


def run(words: Sequence[str]) -> int:
    """Returns the exit code. Raises ConfigError if parkd-tier is not installed here."""
    for entry in entry_points(group=GROUP, name=NAME):
        main: Callable[[Sequence[str]], int] = entry.load()
        return main(words)
    raise ConfigError(
        "parkd tier is the command of parkd-tier, which is not installed here: pip install parkd-tier in the "
        "environment of vLLM, and run parkd-tier there"
    )
