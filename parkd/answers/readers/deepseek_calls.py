"""Reads DeepSeek's calls. Each is between a begin token and an end token.

V3, R1   <calls begin> <call begin>function<sep>NAME\\n```json\\n{...}\\n```<call end> ... <calls end>
V3.1     <calls begin> <call begin>NAME<sep>{...}<call end> ... <calls end>
"""

from __future__ import annotations

import re

from parkd.answers.readers.json_machine import WHITESPACE, JsonArguments
from parkd.answers.readers.signals import CallOpened, Malformed, Names, Signal


def tag(words: str) -> str:
    """The special token for these words, with the bars and spaces of DeepSeek's tokens."""
    return f"<\uff5c{words.replace(' ', chr(0x2581))}\uff5c>"


CALLS_BEGIN, CALLS_END = tag("tool calls begin"), tag("tool calls end")
CALL_BEGIN, CALL_END, SEPARATOR = tag("tool call begin"), tag("tool call end"), tag("tool sep")
FENCE = "```json"
HEAD_ROOM = 64
"""Characters of the tokens around a call's name."""
_HEAD = re.compile(
    rf"\s*{CALL_BEGIN}(?:function{SEPARATOR}(?P<fenced>.+?)\n{FENCE}\s*|(?P<plain>.+?){SEPARATOR}\s*)", re.DOTALL
)
_TAIL = re.compile(rf"\s*(?:```)?\s*{CALL_END}")


class DeepSeekCalls:
    """Reads from after `CALLS_BEGIN` to `CALLS_END`."""

    def __init__(self, names: Names) -> None:
        self.done = False
        self._names = names
        self._text = ""
        """Text since the section began or since the last arguments ended."""
        self._arguments: JsonArguments | None = None
        self._in_tail = False

    def feed(self, ch: str) -> list[Signal]:
        if self._arguments is not None:
            signals = self._arguments.feed(ch)
            if self._arguments.done:
                self._arguments, self._in_tail = None, True
            return signals
        begun = self._text.partition(CALL_BEGIN)[2].removeprefix(f"function{SEPARATOR}")
        if ch == "{" and not self._in_tail and not self._names.goes_on(begun + ch):
            opened = CallOpened(self._name())
            self._arguments = JsonArguments()
            return [opened, *self._arguments.feed(ch)]
        if (ch == "{" and self._in_tail) or len(self._text) >= self._names.limit + HEAD_ROOM:
            raise Malformed
        self._text += ch
        if self._in_tail and _TAIL.fullmatch(self._text):
            self._text, self._in_tail = "", False
        self.done = self._text.strip() == CALLS_END
        return []

    def _name(self) -> str:
        """Ends the head (the text before the arguments) and returns the name."""
        head = _HEAD.fullmatch(self._text)
        if head is None:
            raise Malformed
        self._text = ""
        return self._names.read(head["fenced"] or head["plain"])


KIMI_BEGIN, KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
ONE_BEGIN, ONE_END = "<|tool_call_begin|>", "<|tool_call_end|>"
ARGUMENTS = "<|tool_call_argument_begin|>"
FUNCTIONS = "functions."
KIMI_ROOM = 96
"""Characters of the tokens around a call's name, and of its number."""
_KIMI_HEAD = re.compile(
    rf"\s*{re.escape(ONE_BEGIN)}\s*(?:{re.escape(FUNCTIONS)})?(?P<name>.+?)(?::\d+)?\s*{re.escape(ARGUMENTS)}\s*",
    re.DOTALL,
)


class KimiCalls:
    """Reads from after `KIMI_BEGIN` to `KIMI_END`."""

    def __init__(self, names: Names) -> None:
        self.done = False
        self._names = names
        self._text = ""
        """Text since the section began or since the last call ended."""
        self._arguments: JsonArguments | None = None
        self._in_tail = False

    def feed(self, ch: str) -> list[Signal]:
        if self._arguments is not None:
            signals = self._arguments.feed(ch)
            if self._arguments.done:
                self._arguments, self._in_tail = None, True
            return signals
        if not self._text and ch in WHITESPACE:
            return []
        if ch == "{" and ARGUMENTS in self._text:
            head = _KIMI_HEAD.fullmatch(self._text)
            if head is None:
                raise Malformed
            self._text, self._arguments = "", JsonArguments()
            return [CallOpened(self._names.read(head["name"])), *self._arguments.feed(ch)]
        self._text += ch
        expected = (ONE_END,) if self._in_tail else (ONE_BEGIN, KIMI_END)
        if not any(mark.startswith(self._text) or self._text.startswith(mark) for mark in expected):
            raise Malformed
        if len(self._text) > self._names.limit + KIMI_ROOM:
            raise Malformed
        if self._in_tail and self._text == ONE_END:
            self._text, self._in_tail = "", False
        self.done = self._text == KIMI_END
        return []
