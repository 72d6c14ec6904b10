"""Reads LFM2's calls, which look like Python, and emits their arguments as JSON.

    <|tool_call_start|>[name(key='text', other=3, deep={'a': [True, None]}), second()]<|tool_call_end|>

Its template writes a text between quotes as it is. So a quote ends a text only before a sign that may follow a value.
"""

from __future__ import annotations

import json
from enum import Enum, auto

from parkd.answers.readers.json_calls import Closing
from parkd.answers.readers.json_calls import Sequence as ReaderSequence
from parkd.answers.readers.json_machine import DEPTH_LIMIT, LITERAL, WHITESPACE, escaped
from parkd.answers.readers.signals import CallArguments, CallOpened, Malformed, Names, Signal
from parkd.answers.readers.xml_calls import Arguments, ToolSchemas

CALLS_START, CALLS_END = "<|tool_call_start|>", "<|tool_call_end|>"
TOOLS_START = "<|tool_list_start|>"
"""Around the tools in a prompt. Some templates of the family write it and no calls."""
BARE_LIMIT = 4096
"""The most characters in a number or a word."""
_ENDINGS = frozenset(",)]}:")
"""What may follow a value."""
_WORDS = {"True": "true", "False": "false", "None": "null"}
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"'}


class _Place(Enum):
    OPEN = auto()
    NAME = auto()
    KEY = auto()
    VALUE = auto()
    BARE = auto()
    STRING = auto()
    ESCAPE = auto()
    QUOTE = auto()
    """Behind a quote that may be the text's end."""
    NEXT = auto()
    BETWEEN = auto()
    """Behind a call."""


class PythonCalls:
    """Reads the list of calls, from its opening to its closing bracket."""

    def __init__(self, schemas: ToolSchemas) -> None:
        self.done = False
        self._schemas = schemas
        self._names = Names(schemas)
        self._place = _Place.OPEN
        self._stack: list[str] = []
        """Open lists and objects within one argument."""
        self._wants_key = False
        """In the innermost object, a key comes next."""
        self._held = ""
        self._quote = ""
        self._arguments = Arguments({})

    def feed(self, ch: str) -> list[Signal]:
        match self._place:
            case _Place.OPEN | _Place.BETWEEN:
                return self._outside(ch)
            case _Place.NAME:
                return self._name(ch)
            case _Place.KEY:
                return self._key(ch)
            case _Place.VALUE:
                return _pieces(self._value(ch))
            case _Place.BARE:
                return self._bare(ch)
            case _Place.STRING | _Place.ESCAPE:
                return _pieces(self._string(ch))
            case _Place.QUOTE:
                return self._behind_quote(ch)
        return self._next(ch)

    def _outside(self, ch: str) -> list[Signal]:
        if ch in WHITESPACE:
            return []
        if self._place is _Place.BETWEEN and ch == "]":
            self.done = True
        elif ch == ("[" if self._place is _Place.OPEN else ","):
            self._place = _Place.NAME
        else:
            raise Malformed
        return []

    def _name(self, ch: str) -> list[Signal]:
        if ch != "(" or self._names.goes_on(self._held + ch):
            self._held += ch
            if len(self._held) > self._names.limit + len(WHITESPACE):
                raise Malformed
            return []
        name, self._held = self._names.read(self._held), ""
        self._arguments, self._place = Arguments(self._schemas.get(name, {})), _Place.KEY
        return [CallOpened(name)]

    def _key(self, ch: str) -> list[Signal]:
        names = self._arguments.names
        if ch == "=" and not names.goes_on(self._held + ch):
            signal, _ = self._arguments.key(self._held)
            self._held, self._place = "", _Place.VALUE
            return [signal]
        if ch == ")" and not self._held.strip():
            self._held = ""
            return self._closed()
        self._held += ch
        if len(self._held) > names.limit + len(WHITESPACE):
            raise Malformed
        return []

    def _closed(self) -> list[Signal]:
        self._place = _Place.BETWEEN
        return self._arguments.end()

    def _value(self, ch: str) -> str:
        if ch in WHITESPACE:
            return ""
        if ch in "'\"":
            self._quote, self._place = ch, _Place.STRING
            return '"'
        if self._stack and ch == ("}" if self._stack[-1] == "{" else "]"):
            return self._popped()
        if self._wants_key:
            raise Malformed
        if ch in "[{":
            if len(self._stack) >= DEPTH_LIMIT:
                raise Malformed
            self._stack.append(ch)
            self._wants_key = ch == "{"
            return ch
        if ch in _ENDINGS:
            raise Malformed
        self._held, self._place = ch, _Place.BARE
        return ""

    def _popped(self) -> str:
        opened = self._stack.pop()
        self._wants_key, self._place = False, _Place.NEXT
        return "}" if opened == "{" else "]"

    def _bare(self, ch: str) -> list[Signal]:
        if ch not in _ENDINGS:
            self._held += ch
            if len(self._held) > BARE_LIMIT:
                raise Malformed
            return []
        word, self._held = self._held.strip(), ""
        text = _WORDS.get(word, word)
        piece = text if LITERAL.fullmatch(text) else json.dumps(word, ensure_ascii=False)
        return [CallArguments(piece), *self._next(ch)]

    def _string(self, ch: str) -> str:
        if self._place is _Place.ESCAPE:
            self._place = _Place.STRING
            return escaped(_ESCAPED.get(ch, f"\\{ch}"))
        if ch == "\\":
            self._place = _Place.ESCAPE
            return ""
        if ch == self._quote:
            self._place = _Place.QUOTE
            return ""
        return escaped(ch)

    def _behind_quote(self, ch: str) -> list[Signal]:
        if ch in _ENDINGS:
            return [CallArguments('"'), *self._next(ch)]
        quote = self._quote
        if ch == quote:
            return _pieces(escaped(quote))  # The first of two is text, and this one may be the end.
        self._place = _Place.STRING
        return _pieces(escaped(quote) + self._string(ch))

    def _next(self, ch: str) -> list[Signal]:
        if ch in WHITESPACE:
            self._place = _Place.NEXT
            return []
        inner = self._stack[-1] if self._stack else ""
        if ch == ":" and inner == "{" and self._wants_key:
            self._wants_key, self._place = False, _Place.VALUE
            return [CallArguments(": ")]
        if self._wants_key:
            raise Malformed
        if ch == "," and inner:
            self._wants_key, self._place = inner == "{", _Place.VALUE
            return [CallArguments(", ")]
        if inner and ch == ("}" if inner == "{" else "]"):
            return _pieces(self._popped())
        if not inner and ch == ",":
            self._place = _Place.KEY
            return []
        if not inner and ch == ")":
            return self._closed()
        raise Malformed


def _pieces(text: str) -> list[Signal]:
    return [CallArguments(text)] if text else []


def python_section(schemas: ToolSchemas) -> ReaderSequence:
    """Reads what follows `CALLS_START`, to `CALLS_END`."""
    return ReaderSequence(PythonCalls(schemas), Closing(CALLS_END))
