"""What the readers of tool-call formats tell the parser. Internal to this folder."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

NAME_LIMIT = 256
"""Characters in a tool's name."""

_NAME = re.compile(r"[A-Za-z0-9_.:/-]+")


def is_name(text: str) -> bool:
    """Whether this can be a tool's name. Clients allow less; what has other characters is surely no name."""
    return len(text) <= NAME_LIMIT and _NAME.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class CallOpened:
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the arguments, as JSON text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallClosed:
    """The call opened last is complete and its arguments are a JSON object."""


Signal = CallOpened | CallArguments | CallClosed


class Malformed(Exception):
    """The character just fed does not fit the format. It has not been consumed."""


class CallReader(Protocol):
    """Reads the characters behind a marker that announces tool calls."""

    done: bool
    """True once the last character of the section has been fed."""

    def feed(self, ch: str) -> list[Signal]:
        """Takes one character. Raises Malformed; then the reader is not used again."""
