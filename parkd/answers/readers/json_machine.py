"""A strict JSON reader for one character at a time, and a reader for a call written as one JSON object."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

from parkd.answers.readers.signals import CallArguments, CallClosed, CallOpened, Malformed, Signal

DEPTH_LIMIT = 128
"""The deepest nesting that is accepted. It bounds the stack."""

LITERAL_LIMIT = 512
"""The most characters in a number or a word."""

WHITESPACE = " \t\n\r"
LITERAL = re.compile(r"true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
ESCAPES = '"\\/bfnrtu'


def escaped(text: str) -> str:
    """`text` escaped for use within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class JsonState(Enum):
    VALUE = auto()
    VALUE_OR_END = auto()
    KEY = auto()
    KEY_OR_END = auto()
    COLON = auto()
    NEXT = auto()
    """Expects a comma or the end of the container."""
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    LITERAL = auto()
    DONE = auto()


class JsonMachine:
    """Accepts exactly the prefixes of one JSON object. One exception: raw control characters within strings, which
    models write. Every client's parser would refuse them, so `feed` returns them escaped."""

    def __init__(self) -> None:
        self.state = JsonState.VALUE
        self._stack: list[str] = []
        self._string_is_key = False
        self._literal = ""
        self._hex_digits = 0

    @property
    def depth(self) -> int:
        """The number of open containers."""
        return len(self._stack)

    @property
    def open_brackets(self) -> str:
        """The brackets of the open containers, from the outside in."""
        return "".join(self._stack)

    @property
    def between_values(self) -> bool:
        """Whether the text so far is an object once its open containers are closed."""
        if self.state is JsonState.LITERAL:
            return LITERAL.fullmatch(self._literal) is not None
        whole = (JsonState.NEXT, JsonState.KEY_OR_END, JsonState.VALUE_OR_END, JsonState.DONE)
        return self.state in whole

    def feed(self, ch: str) -> str:
        """Consumes one character and returns it as strict JSON. Raises Malformed."""
        match self.state:
            case JsonState.STRING:
                return self._in_string(ch)
            case JsonState.ESCAPE:
                if ch not in ESCAPES:
                    raise Malformed
                self._hex_digits = 0
                self.state = JsonState.HEX if ch == "u" else JsonState.STRING
            case JsonState.HEX:
                if ch not in "0123456789abcdefABCDEF":
                    raise Malformed
                self._hex_digits += 1
                if self._hex_digits == 4:
                    self.state = JsonState.STRING
            case JsonState.LITERAL if ch not in WHITESPACE + ",]}":
                self._literal += ch
                if len(self._literal) > LITERAL_LIMIT:
                    raise Malformed
            case JsonState.LITERAL:
                if not LITERAL.fullmatch(self._literal):
                    raise Malformed
                self.state = JsonState.NEXT
                self._structure(ch)
            case _:
                self._structure(ch)
        return ch

    def _in_string(self, ch: str) -> str:
        if ch == '"':
            self.state = JsonState.COLON if self._string_is_key else JsonState.NEXT
        elif ch == "\\":
            self.state = JsonState.ESCAPE
        elif ch < " ":
            return escaped(ch)
        return ch

    def _structure(self, ch: str) -> None:
        if ch in WHITESPACE:
            return
        match self.state:
            case JsonState.KEY | JsonState.KEY_OR_END if ch == '"':
                self._string_is_key = True
                self.state = JsonState.STRING
            case JsonState.KEY_OR_END if ch == "}":
                self._pop()
            case JsonState.COLON if ch == ":":
                self.state = JsonState.VALUE
            case JsonState.NEXT if ch == ",":
                self.state = JsonState.KEY if self._stack[-1] == "{" else JsonState.VALUE
            case JsonState.NEXT if ch in "]}" and (self._stack[-1] == "{") == (ch == "}"):
                self._pop()
            case JsonState.VALUE_OR_END if ch == "]":
                self._pop()
            case JsonState.VALUE | JsonState.VALUE_OR_END:
                self._value(ch)
            case _:
                raise Malformed

    def _value(self, ch: str) -> None:
        if ch in "{[" and self.depth < DEPTH_LIMIT:
            self._stack.append(ch)
            self.state = JsonState.KEY_OR_END if ch == "{" else JsonState.VALUE_OR_END
        elif not self._stack:
            raise Malformed
        elif ch == '"':
            self._string_is_key = False
            self.state = JsonState.STRING
        elif ch in "-0123456789tfn":
            self._literal = ch
            self.state = JsonState.LITERAL
        else:
            raise Malformed

    def _pop(self) -> None:
        self._stack.pop()
        self.state = JsonState.NEXT if self._stack else JsonState.DONE


def closed(text: str) -> str:
    """The object that `text` begins, with what was complete when it broke off: without a half string, word or member.
    A number at the very end counts as complete. Empty if `text` begins no object."""
    machine, end, open_brackets = JsonMachine(), 0, ""
    for place, ch in enumerate(text):
        if ch == "," and machine.between_values:
            end, open_brackets = place, machine.open_brackets
        try:
            machine.feed(ch)
        except Malformed:
            break
        if machine.between_values and machine.state is not JsonState.LITERAL:
            end, open_brackets = place + 1, machine.open_brackets
    else:
        if machine.between_values:
            end, open_brackets = len(text), machine.open_brackets
    return text[:end] + "".join("}" if bracket == "{" else "]" for bracket in reversed(open_brackets))


class JsonArguments:
    """Reads one JSON object that is only a call's arguments; its creator has already opened the call."""

    def __init__(self) -> None:
        self.done = False
        self._machine = JsonMachine()

    def feed(self, ch: str) -> list[Signal]:
        if self._machine.depth == 0 and ch != "{":
            raise Malformed
        piece = self._machine.feed(ch)
        self.done = self._machine.state is JsonState.DONE
        return [CallArguments(piece), CallClosed()] if self.done else [CallArguments(piece)]


class JsonCall:
    """Reads `{"name": ..., "arguments": {...}}`. Keys may be in any order, `arguments` may be called `parameters` and
    may be a JSON string. Once the name is known, arguments are passed on as they arrive.

    `accepts` decides whether a name is valid. `strict` refuses other keys, to tell a call from an answer in JSON.
    """

    ARGUMENT_KEYS = ("arguments", "parameters")
    STRICT_KEYS = ("name", "type", *ARGUMENT_KEYS)

    def __init__(self, accepts: Callable[[str], bool], *, strict: bool = False) -> None:
        self.done = False
        self._accepts = accepts
        self._strict = strict
        self._machine = JsonMachine()
        self._collected: list[str] | None = None
        self._in_key = False
        self._streaming = False
        self._key = ""
        self._name: str | None = None
        self._arguments: str | None = None
        """Complete arguments that wait for the name; "" once they were passed on."""

    def feed(self, ch: str) -> list[Signal]:
        machine = self._machine
        state, depth = machine.state, machine.depth
        if depth == 0 and ch != "{":
            raise Malformed
        piece = machine.feed(ch)
        signals: list[Signal] = []
        if self._collected is None:
            self._begin(state, depth, ch, piece, signals)
        elif self._in_key:
            self._collected.append(piece)
            if machine.state is JsonState.COLON:
                self._end_key()
        elif state is JsonState.LITERAL and machine.state is not JsonState.LITERAL and depth == 1:
            self._end_value(signals)
        else:
            self._collected.append(piece)
            if self._streaming:
                signals.append(CallArguments(piece))
            if machine.depth == 1 and machine.state is JsonState.NEXT:
                self._end_value(signals)
        if machine.state is JsonState.DONE:
            self._end_call(signals)
        return signals

    def _begin(self, state: JsonState, depth: int, ch: str, piece: str, signals: list[Signal]) -> None:
        if depth != 1 or ch in WHITESPACE:
            return
        if ch == '"' and state in (JsonState.KEY, JsonState.KEY_OR_END):
            self._collected, self._in_key = [piece], True
        elif state is JsonState.VALUE:
            self._collected, self._in_key = [piece], False
            if ch == "{" and self._key in self.ARGUMENT_KEYS and self._name is not None and self._arguments is None:
                self._streaming = True
                self._arguments = ""
                signals += [CallOpened(self._name), CallArguments(piece)]

    def _end_key(self) -> None:
        self._key = self._take()
        self._in_key = False
        if self._strict and self._key not in self.STRICT_KEYS:
            raise Malformed

    def _end_value(self, signals: list[Signal]) -> None:
        if self._streaming:
            self._streaming = False
            self._collected = None
        elif self._key == "name":
            name = self._take()
            if self._name is not None or not isinstance(name, str) or not self._accepts(name):
                raise Malformed
            self._name = name
        elif self._key in self.ARGUMENT_KEYS:
            if self._arguments is not None:
                raise Malformed
            self._arguments = _object_text("".join(self._collected or ()))
            self._collected = None
        else:
            self._collected = None
        if self._name is not None and self._arguments:
            signals += [CallOpened(self._name), CallArguments(self._arguments)]
            self._arguments = ""

    def _end_call(self, signals: list[Signal]) -> None:
        if self._name is None:
            raise Malformed
        if self._arguments is None:
            if self._strict:
                raise Malformed
            signals += [CallOpened(self._name), CallArguments("{}")]
        signals.append(CallClosed())
        self.done = True

    def _take(self) -> Any:
        text, self._collected = "".join(self._collected or ()), None
        return json.loads(text)


def _object_text(text: str) -> str:
    """The JSON text of arguments that were given as a separate value. Raises Malformed."""
    value = json.loads(text)
    if value is None:
        return "{}"
    if isinstance(value, str):
        text = value.strip() or "{}"
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            raise Malformed from None
    if not isinstance(value, dict):
        raise Malformed
    return text
