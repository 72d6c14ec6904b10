"""Reads Qwen's XML-like calls: `<function=name><parameter=key>value</parameter></function>`.

The value of a parameter is bare text; the tool's schema decides whether it is a string or JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from parkd.answers.readers.json_calls import Closing, Padded
from parkd.answers.readers.json_calls import Sequence as ReaderSequence
from parkd.answers.readers.json_machine import WHITESPACE, JsonCall, escaped
from parkd.answers.readers.signals import (
    CallArguments,
    CallClosed,
    CallOpened,
    CallReader,
    Malformed,
    Names,
    Signal,
)

TAGGED_CALL, TAGGED_END = "<tool_call>", "</tool_call>"
SEED_CALL, SEED_END = "<seed:tool_call>", "</seed:tool_call>"
FUNCTION = "<function="
PARAMETER = "<parameter="
PARAMETER_END = "</parameter>"
FUNCTION_END = "</function>"

ToolSchemas = Mapping[str, Mapping[str, Any]]
"""Tool name -> the properties of its parameters."""


def tool_schemas(tools: Sequence[Mapping[str, Any]]) -> ToolSchemas:
    """Properties by tool name, for tools in the chat dialect's form. Tools in another form have no properties."""
    schemas: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            continue
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        schemas[function["name"]] = properties if isinstance(properties, Mapping) else {}
    return schemas


def takes_text(schema: Any) -> bool:
    """Whether a value under this schema is taken as a string if it could be one. True for unknown schemas."""
    if not isinstance(schema, Mapping):
        return True
    for several in ("anyOf", "oneOf"):
        if isinstance(schema.get(several), list):
            return any(takes_text(option) for option in schema[several])
    if isinstance(schema.get("enum"), list):
        return any(isinstance(value, str) for value in schema["enum"])
    kind = schema.get("type")
    if isinstance(kind, list):
        return "string" in kind
    return kind is None or kind == "string"


class Arguments:
    """The arguments of one call, as JSON text that grows."""

    def __init__(self, properties: Mapping[str, Any]) -> None:
        self.names = Names(properties)
        self._properties = properties
        self._keys: set[str] = set()

    def key(self, raw: str) -> tuple[Signal, bool]:
        """The beginning of an argument, and whether its value is text. Raises Malformed for a key given twice."""
        key = self.names.read(raw)
        if key in self._keys:
            raise Malformed
        begin = ", " if self._keys else "{"
        self._keys.add(key)
        return CallArguments(f"{begin}{json.dumps(key, ensure_ascii=False)}: "), takes_text(self._properties.get(key))

    def end(self) -> list[Signal]:
        return [CallArguments("}" if self._keys else "{}"), CallClosed()]


class XmlCall:
    """Reads one call. `opened`: `<function=` was already consumed as a marker."""

    def __init__(self, schemas: ToolSchemas, *, opened: bool = False, is_padded: bool = True) -> None:
        """`is_padded`: as for `XmlValue`."""
        self.done = False
        self._is_padded = is_padded
        self._schemas = schemas
        self._names = Names(schemas)
        """Of tools; then of the parameters of the one that is called."""
        self._tag = FUNCTION if opened else ""
        """The tag that is being read; empty between tags."""
        self._arguments: Arguments | None = None
        """None until the name was read."""
        self._value: XmlValue | None = None

    def feed(self, ch: str) -> list[Signal]:
        if self._value is not None:
            signals = self._value.feed(ch)
            if self._value.done:
                self._value = None
            return signals
        if not self._tag and ch in WHITESPACE:
            return []
        self._tag += ch
        expected = (PARAMETER, FUNCTION_END) if self._arguments is not None else (FUNCTION,)
        if not any(tag.startswith(self._tag) or self._tag.startswith(tag) for tag in expected):
            raise Malformed
        if len(self._tag) > self._names.limit + len(PARAMETER) + len(">"):
            raise Malformed
        ends = ch == ">" and not self._names.goes_on(self._tag.partition("=")[2])
        return self._tag_read() if ends else []

    def _tag_read(self) -> list[Signal]:
        tag, self._tag = self._tag, ""
        raw = tag.partition("=")[2][:-1]
        if self._arguments is None:
            name = self._names.read(raw)
            self._arguments = Arguments(self._schemas.get(name, {}))
            self._names = self._arguments.names
            return [CallOpened(name)]
        if tag == FUNCTION_END:
            self.done = True
            return self._arguments.end()
        signal, is_text = self._arguments.key(raw)
        self._value = XmlValue(text=is_text, is_padded=self._is_padded)
        return [signal]


class XmlValue:
    """Reads the text of one parameter up to its closing tag `end`. If `is_padded`, the format adds a newline on each
    side, which is left out."""

    def __init__(self, *, text: bool, end: str = PARAMETER_END, is_padded: bool = True) -> None:
        self.done = False
        self._end_tag = end
        self._is_padded = is_padded
        self._text = text
        self._held = ""
        """Text that may not belong to the value: a newline or the beginning of the closing tag. For a value that is
        not text, all of it."""
        self._started = False

    def feed(self, ch: str) -> list[Signal]:
        signals: list[Signal] = []
        if not self._started:
            self._started = True
            if self._text:
                signals.append(CallArguments('"'))
            if ch == "\n" and self._is_padded:
                return signals
        self._held += ch
        if self._held.endswith(self._end_tag):
            self.done = True
            signals.append(CallArguments(self._end(self._held.removesuffix(self._end_tag))))
        elif self._text:
            ready = len(self._held) - self._held_tail()
            if ready:
                signals.append(CallArguments(escaped(self._held[:ready])))
                self._held = self._held[ready:]
        return signals

    def _end(self, rest: str) -> str:
        rest = rest.removesuffix("\n") if self._is_padded else rest
        if self._text:
            return escaped(rest) + '"'
        return _json_value(rest.strip())

    def _held_tail(self) -> int:
        """Length of the longest suffix of what is held that may belong to the closing tag or to the newline before."""
        end = self._end_tag
        for length in range(min(len(self._held), len(end) + 1), 0, -1):
            tail = self._held[-length:]
            if end.startswith(tail) or (self._is_padded and f"\n{end}".startswith(tail)):
                return length
        return 0


def _json_value(text: str) -> str:
    """The value as JSON text. Python's names of constants are understood; anything that is not JSON is a string."""
    constant = {"True": "true", "False": "false", "None": "null"}.get(text)
    if constant is not None:
        return constant
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return text


def _refuse(word: str) -> Any:
    raise ValueError(word)


def tagged_section(schemas: ToolSchemas) -> ReaderSequence:
    """Reads what follows `<tool_call>`: JSON or XML, whichever the model writes, then `</tool_call>`."""

    names = Names(schemas)

    def choose(ch: str) -> CallReader:
        return JsonCall(names.accepts) if ch == "{" else XmlCall(schemas)

    return ReaderSequence(Padded(choose), Closing(TAGGED_END))


def seed_section(schemas: ToolSchemas) -> ReaderSequence:
    """Reads what follows `SEED_CALL`, to `SEED_END`."""
    return ReaderSequence(XmlCall(schemas, is_padded=False), Closing(SEED_END))


def bare_function_section(schemas: ToolSchemas) -> XmlCall:
    """Reads what follows a `<function=` without a `<tool_call>` before it."""
    return XmlCall(schemas, opened=True)
