"""Reads calls in tags: GLM's pairs of keys and values, and MiniMax's named elements.

    <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>
    <minimax:tool_call><invoke name="name"><parameter name="key">value</parameter></invoke></minimax:tool_call>

Values are bare text, as Qwen's are; the tool's schema decides whether one is a string or JSON. White space between tags
belongs to the format.
"""

from __future__ import annotations

from parkd.answers.readers.json_machine import WHITESPACE
from parkd.answers.readers.signals import CallOpened, Malformed, Names, Signal
from parkd.answers.readers.xml_calls import Arguments, ToolSchemas, XmlValue

TOOL_CALL_END = "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
MINIMAX_CALL = "<minimax:tool_call>"
MINIMAX_END = "</minimax:tool_call>"
INVOKE, INVOKE_END = '<invoke name="', "</invoke>"
PARAMETER, PARAMETER_END = '<parameter name="', "</parameter>"
NAME_END = '">'


class GlmCall:
    """Reads what follows GLM's `<tool_call>`, to its end."""

    def __init__(self, schemas: ToolSchemas) -> None:
        self.done = False
        self._schemas = schemas
        self._names = Names(schemas)
        self._held = ""
        self._arguments: Arguments | None = None
        self._expected: tuple[str, ...] = (KEY, TOOL_CALL_END)
        self._is_text = True
        self._value: XmlValue | None = None

    def feed(self, ch: str) -> list[Signal]:
        if self._value is not None:
            signals = self._value.feed(ch)
            if self._value.done:
                self._value, self._expected = None, (KEY, TOOL_CALL_END)
            return signals
        if self._arguments is None:
            return self._name(ch)
        if not self._held and ch in WHITESPACE:
            return []
        self._held += ch
        if self._held.startswith(KEY):
            return self._key(self._arguments)
        if not any(tag.startswith(self._held) for tag in self._expected):
            raise Malformed
        if self._held == VALUE:
            self._held, self._value = "", XmlValue(text=self._is_text, end=VALUE_END, is_padded=False)
        elif self._held == TOOL_CALL_END:
            self.done = True
            return self._arguments.end()
        return []

    def _name(self, ch: str) -> list[Signal]:
        if ch == "<" and not self._names.goes_on(self._held + ch):
            name = self._names.read(self._held)
            self._arguments, self._held = Arguments(self._schemas.get(name, {})), ch
            return [CallOpened(name)]
        self._held += ch
        if len(self._held) > self._names.limit + len("\n"):
            raise Malformed
        return []

    def _key(self, arguments: Arguments) -> list[Signal]:
        if KEY not in self._expected or len(self._held) > arguments.names.limit + len(KEY + KEY_END):
            raise Malformed
        if not self._held.endswith(KEY_END):
            return []
        signal, self._is_text = arguments.key(self._held.removeprefix(KEY).removesuffix(KEY_END))
        self._held, self._expected = "", (VALUE,)
        return [signal]


class MiniMaxCalls:
    """Reads what follows `<minimax:tool_call>`, to its end: one call or several."""

    def __init__(self, schemas: ToolSchemas) -> None:
        self.done = False
        self._schemas = schemas
        self._names = Names(schemas)
        self._held = ""
        self._arguments: Arguments | None = None
        self._has_called = False
        self._value: XmlValue | None = None

    def feed(self, ch: str) -> list[Signal]:
        if self._value is not None:
            signals = self._value.feed(ch)
            if self._value.done:
                self._value = None
            return signals
        if not self._held and ch in WHITESPACE:
            return []
        self._held += ch
        opener = INVOKE if self._arguments is None else PARAMETER
        if self._held.startswith(opener):
            return self._opened(self._held.removeprefix(opener))
        closer = (MINIMAX_END if self._has_called else "") if self._arguments is None else INVOKE_END
        if not opener.startswith(self._held) and not closer.startswith(self._held):
            raise Malformed
        return self._closed() if self._held == closer else []

    def _opened(self, raw: str) -> list[Signal]:
        names = self._names if self._arguments is None else self._arguments.names
        if len(raw) > names.limit + len(NAME_END):
            raise Malformed
        if not raw.endswith(NAME_END) or names.goes_on(raw):
            return []
        raw, self._held = raw.removesuffix(NAME_END), ""
        if self._arguments is None:
            name = names.read(raw)
            self._arguments, self._has_called = Arguments(self._schemas.get(name, {})), True
            return [CallOpened(name)]
        signal, is_text = self._arguments.key(raw)
        self._value = XmlValue(text=is_text, end=PARAMETER_END, is_padded=False)
        return [signal]

    def _closed(self) -> list[Signal]:
        self._held = ""
        if self._arguments is None:
            self.done = True
            return []
        signals, self._arguments = self._arguments.end(), None
        return signals
