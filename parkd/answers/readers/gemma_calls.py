"""Reads Gemma's calls, `call:name{key:<|"|>text<|"|>,list:[1,2],inner:{flag:true}}`, and emits them as JSON."""

from __future__ import annotations

import json
from enum import Enum, auto

from parkd.answers.readers.json_calls import Closing
from parkd.answers.readers.json_calls import Sequence as ReaderSequence
from parkd.answers.readers.json_machine import DEPTH_LIMIT, ESCAPES, LITERAL, WHITESPACE, escaped
from parkd.answers.readers.signals import CallArguments, CallClosed, CallOpened, Malformed, Names, Signal
from parkd.answers.readers.xml_calls import ToolSchemas
from parkd.answers.scan import held_tail

HEAD = "call:"
BARE_LIMIT = 4096
"""The most characters in a key, a number or an unquoted word."""


class _Place(Enum):
    HEAD = auto()
    KEY = auto()
    KEY_OR_END = auto()
    VALUE = auto()
    VALUE_OR_END = auto()
    BARE = auto()
    QUOTED = auto()
    """Between two of the format's own quotes, where nothing is escaped."""
    STRING = auto()
    """Between ordinary double quotes, which some models write instead."""
    ESCAPE = auto()
    NEXT = auto()


class GemmaCall:
    """One call; `quote` is the text that opens and closes a string."""

    def __init__(self, quote: str, schemas: ToolSchemas) -> None:
        self.done = False
        self._schemas = schemas
        self._names = Names(schemas)
        self._keys = Names()
        """Of the call's own arguments, not of objects inside them."""
        self._quote = quote
        self._place = _Place.HEAD
        self._stack: list[str] = []
        self._held = ""

    def feed(self, ch: str) -> list[Signal]:
        match self._place:
            case _Place.HEAD:
                return self._head(ch)
            case _Place.KEY | _Place.KEY_OR_END:
                piece = self._key(ch)
            case _Place.VALUE | _Place.VALUE_OR_END:
                piece = self._value(ch)
            case _Place.BARE:
                piece = self._bare(ch)
            case _Place.QUOTED:
                piece = self._quoted(ch)
            case _Place.STRING | _Place.ESCAPE:
                piece = self._string(ch)
            case _Place.NEXT:
                piece = self._next(ch)
        signals: list[Signal] = [CallArguments(piece)] if piece else []
        if not self._stack:
            self.done = True
            signals.append(CallClosed())
        return signals

    def _head(self, ch: str) -> list[Signal]:
        if not self._held and ch in WHITESPACE:
            return []
        raw = self._held.removeprefix(HEAD)
        if ch != "{" or self._names.goes_on(raw + ch):
            self._held += ch
            is_head = HEAD.startswith(self._held) or self._held.startswith(HEAD)
            if not is_head or len(self._held) > self._names.limit + len(HEAD):
                raise Malformed
            return []
        if not self._held.startswith(HEAD):
            raise Malformed
        name = self._names.read(raw)
        self._keys = Names(self._schemas.get(name, ()))
        self._held = ""
        return [CallOpened(name), CallArguments(self._push("{"))]

    def _push(self, bracket: str) -> str:
        if len(self._stack) >= DEPTH_LIMIT:
            raise Malformed
        self._stack.append(bracket)
        self._place = _Place.KEY_OR_END if bracket == "{" else _Place.VALUE_OR_END
        return bracket

    def _pop(self, bracket: str) -> str:
        if (self._stack.pop() == "{") != (bracket == "}"):
            raise Malformed
        self._place = _Place.NEXT
        return bracket

    def _key(self, ch: str) -> str:
        if ch in ":{}[]," and len(self._stack) == 1 and self._keys.goes_on(self._held + ch):
            self._held += ch
            return ""
        if ch == "}" and self._place is _Place.KEY_OR_END and not self._held.strip():
            self._held = ""
            return self._pop(ch)
        if ch == ":":
            key = self._held
            if len(self._stack) > 1 or not self._keys.accepts(key):
                key = key.strip().removeprefix(self._quote).removesuffix(self._quote).strip('"')
            self._held = ""
            if not key:
                raise Malformed
            self._place = _Place.VALUE
            return json.dumps(key, ensure_ascii=False) + ":"
        if ch in "{}[]," or len(self._held) > BARE_LIMIT:
            raise Malformed
        self._held += ch
        return ""

    def _value(self, ch: str) -> str:
        self._held += ch
        if self._held.strip() == "":
            self._held = ""
            return ""
        if self._quote.startswith(self._held):
            if self._held != self._quote:
                return ""
            self._held, self._place = "", _Place.QUOTED
            return '"'
        if len(self._held) > 1:
            raise Malformed
        self._held = ""
        if ch in "{[":
            return self._push(ch)
        if ch == "]" and self._place is _Place.VALUE_OR_END:
            return self._pop(ch)
        if ch == '"':
            self._place = _Place.STRING
            return ch
        if ch in "]},:":
            raise Malformed
        self._held, self._place = ch, _Place.BARE
        return ""

    def _bare(self, ch: str) -> str:
        if ch not in ",]}":
            self._held += ch
            if len(self._held) > BARE_LIMIT:
                raise Malformed
            return ""
        word, self._held = self._held.strip(), ""
        # A word without quotes is taken as a string: small models forget the quotes that the template uses.
        text = word if LITERAL.fullmatch(word) else json.dumps(word, ensure_ascii=False)
        return text + self._next(ch)

    def _quoted(self, ch: str) -> str:
        self._held += ch
        if self._held.endswith(self._quote):
            text, self._held = self._held.removesuffix(self._quote), ""
            self._place = _Place.NEXT
            return escaped(text) + '"'
        shown = len(self._held) - held_tail(self._held, (self._quote,))
        ready, self._held = self._held[:shown], self._held[shown:]
        return escaped(ready)

    def _string(self, ch: str) -> str:
        if self._place is _Place.ESCAPE:
            # `\u` is not supported: its four digits would have to be checked, and no model writes it here.
            if ch not in ESCAPES or ch == "u":
                raise Malformed
            self._place = _Place.STRING
            return "\\" + ch
        if ch == "\\":
            self._place = _Place.ESCAPE
            return ""
        if ch == '"':
            self._place = _Place.NEXT
            return ch
        return escaped(ch)

    def _next(self, ch: str) -> str:
        if ch in WHITESPACE:
            return ""
        if ch == ",":
            self._place = _Place.KEY if self._stack[-1] == "{" else _Place.VALUE
            return ch
        if ch in "]}":
            return self._pop(ch)
        raise Malformed


def gemma_section(quote: str, close: str, schemas: ToolSchemas) -> ReaderSequence:
    """Reads from after the marker of a call to `close`."""
    return ReaderSequence(GemmaCall(quote, schemas), Closing(close))
