"""Signals from the readers of tool-call formats to the parser. Internal to `parkd.answers`."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
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


class Names:
    """Recognises names of tools, or keys of one: those that the client has declared, whatever is in them, and others
    that look like a name."""

    def __init__(self, declared: Iterable[str] = ()) -> None:
        self._declared = {name: name for name in declared}
        self._stripped = {name.strip(): name for name in self._declared}
        self.limit = max((NAME_LIMIT, *map(len, self._declared)))
        """The most characters in a name."""

    def accepts(self, text: str) -> bool:
        return text in self._declared or is_name(text)

    def read(self, raw: str) -> str:
        """The name in a text that may have white space or quotes around it. Raises Malformed."""
        declared = self._declared.get(raw) or self._stripped.get(raw.strip())
        if declared is not None:
            return declared
        name = raw.strip().strip('"')
        if not is_name(name):
            raise Malformed
        return name

    def goes_on(self, raw: str) -> bool:
        """Whether a text that ends with a sign of the format is only the beginning of a declared name: what precedes
        the sign is no declared name itself."""
        begun = raw.lstrip()
        if not begun or raw[:-1] in self._declared or begun[:-1].rstrip() in self._stripped:
            return False
        return any(name.startswith(raw) or name.lstrip().startswith(begun) for name in self._declared)


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
