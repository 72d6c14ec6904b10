"""Parses answers by the model's own response template: its regions become events.

text   Sure. <tool_call>{"name": ...}</tool_call>
regions     |content|  |tool_calls ............|      thinking and text are emitted as they arrive, a call when its
                                                      region closes: only a whole region can be interpreted
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from parkd.answers.base import CallIds, OutputEvent
from parkd.answers.readers.signals import Names
from parkd.answers.readers.xml_calls import tool_schemas
from parkd.engine_adapter.base import ResponseReader
from parkd.types import FinishReason, ReasoningDelta, TextDelta, ToolCallDelta, ToolChoiceMode, TurnRequest

CONTENT = "content"
CALLS = "tool_calls"
REASONING = frozenset({"reasoning_content", "reasoning", "thinking"})
"""Names of the thinking field in templates."""


class DeclaredParser:
    """Implements `Parser` with a `ResponseReader`. From where an answer does not match its template, it is text. Of a
    call that the answer's limit cut, nothing is sent: only a whole one can be interpreted."""

    def __init__(self, reader: ResponseReader, request: TurnRequest, call_ids: CallIds) -> None:
        self._reader = reader
        self._call_ids = call_ids
        self._wants_calls = bool(request.tools) and request.tool_choice.mode is not ToolChoiceMode.NONE
        self._must_call = request.tool_choice.mode in (ToolChoiceMode.REQUIRED, ToolChoiceMode.NAMED)
        self._names = Names(tool_schemas(request.tools))
        self._max_calls = None if request.parallel_tool_calls else 1
        self._calls_made = 0
        self._field: str | None = None
        """The open region."""
        self._raw = ""
        """The open region's text as the model wrote it, including its opening marker."""
        self._fed = ""
        """Text that was fed and is not in an event yet: markers, and what may become one."""
        self._shown = ""
        """Text of the open region that was emitted."""
        self._blanks = ""
        """White space at the end, held back: next to a marker it belongs to the format."""
        self._broken = False
        for event in reader.initial:
            self._field = None if event["type"] == "region_close" else event["field"]

    @property
    def in_reasoning(self) -> bool:
        return not self._broken and self._field in REASONING

    @property
    def satisfied(self) -> bool:
        return self._max_calls is not None and self._calls_made >= self._max_calls

    def push(self, text: str) -> list[OutputEvent]:
        if not text or self.satisfied:
            return []
        self._fed += text
        return self._read(lambda: self._reader.feed(text))

    def finish(self, reason: FinishReason) -> tuple[list[OutputEvent], FinishReason]:
        cut_call = reason.is_cut and self._field == CALLS and self._wants_calls
        events = [] if self.satisfied or self._broken or cut_call else self._read(self._reader.finish)
        if reason.is_cut and self._must_call:  # the beginning of a marker is no text then
            events = [event for event in events if not isinstance(event, TextDelta)]
        if reason is FinishReason.STOP and self._calls_made:
            reason = FinishReason.TOOL_CALLS
        return events, reason

    def _read(self, read: Callable[[], Sequence[Mapping[str, Any]]]) -> list[OutputEvent]:
        out: list[OutputEvent] = []
        if not self._broken:
            try:
                for event in read():
                    self._take(event, out)
                    if self.satisfied:
                        break
                return out
            except Exception:  # a template is a program with the model's text as input: if it fails, the text is shown
                self._broken = True
        rest, self._raw, self._fed = self._raw + self._fed, "", ""
        return [*out, TextDelta(rest)] if rest else out

    def _take(self, event: Mapping[str, Any], out: list[OutputEvent]) -> None:
        match event["type"]:
            case "region_open":
                self._field, self._raw, self._shown, self._blanks = event["field"], "", "", ""
            case "region_chunk":
                mark, _, rest = self._fed.partition(event["text"])
                self._raw += mark + event["text"]
                self._fed = rest
                if self._streams:
                    self._show(event["text"], out)
                    self._raw = ""
            case "region_close":
                end = self._reader.closing(event["field"], self._fed)
                self._raw, self._fed = self._raw + self._fed[:end], self._fed[end:]
                if self._field == CALLS:
                    self._close_calls(event["value"], out)
                elif self._streams and isinstance(event["value"], str) and event["value"].startswith(self._shown):
                    self._emit(event["value"][len(self._shown) :], out)
                self._field, self._raw = None, ""

    @property
    def _streams(self) -> bool:
        return self._field == CONTENT or self._field in REASONING

    def _show(self, text: str, out: list[OutputEvent]) -> None:
        text = self._blanks + text
        if not self._shown:
            text = text.lstrip()
        ready = text.rstrip()
        self._blanks = text[len(ready) :]
        self._emit(ready, out)

    def _emit(self, text: str, out: list[OutputEvent]) -> None:
        if text:
            self._shown += text
            out.append(ReasoningDelta(text) if self._field in REASONING else TextDelta(text))

    def _close_calls(self, value: Any, out: list[OutputEvent]) -> None:
        values = value if isinstance(value, list) else [value]
        calls = [call for value in values if (call := _call(value, self._names)) is not None]
        if not self._wants_calls or not calls or len(calls) < len(values):
            out.append(TextDelta(self._raw))
            return
        for name, arguments in calls:
            if not self.satisfied:
                out.append(ToolCallDelta(self._calls_made, self._call_ids(), name, arguments))
                self._calls_made += 1


def _call(value: Any, names: Names) -> tuple[str, str] | None:
    """Name, and arguments as JSON text; None if `value` is not a call. Raises ValueError if JSON cannot represent the
    arguments."""
    function = value.get("function", value) if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return None
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except ValueError:
            return None
    arguments = {} if arguments is None else arguments
    if not names.accepts(function["name"]) or not isinstance(arguments, Mapping):
        return None
    return function["name"], json.dumps(arguments, ensure_ascii=False, allow_nan=False)
