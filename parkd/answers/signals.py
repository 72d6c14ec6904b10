"""Signals from the readers of tool-call formats to the parser. Internal to this folder."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import Protocol

NAME_LIMIT = 256
"""The most characters in a tool's name."""

_NAME_SIGNS = frozenset("_.:/-")
_NAME_CATEGORIES = frozenset("LMN")
"""Unicode's letters, the marks that belong to them, and numbers."""


def is_name(text: str) -> bool:
    """Whether this can be a tool's name, in any script. With spaces, quotes or brackets, it is a sentence, or a call
    that went wrong."""
    return 0 < len(text) <= NAME_LIMIT and all(
        ch in _NAME_SIGNS or unicodedata.category(ch)[0] in _NAME_CATEGORIES for ch in text
    )


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
