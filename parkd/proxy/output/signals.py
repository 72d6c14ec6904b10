"""Signals from the readers of tool-call formats to the parser. Internal to this folder."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

NAME_LIMIT = 256
"""The most characters in a tool's name."""

_NAME = re.compile(r"[A-Za-z0-9_.:/-]+")


def is_name(text: str) -> bool:
    """Whether this can be a tool's name. Clients allow fewer characters; text with others is certainly not a name."""
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
    """The last opened call is complete, and its arguments are a JSON object."""


Signal = CallOpened | CallArguments | CallClosed


class Malformed(Exception):
    """The last character does not fit the format. It was not consumed."""


class CallReader(Protocol):
    """Reads the characters after a marker of tool calls."""

    done: bool
    """True once the last character of the section was fed."""

    def feed(self, ch: str) -> list[Signal]:
        """Consumes one character. Raises Malformed, after which the reader must not be used again."""
