"""Parses answers that another server has parsed already: their parts come joined by marks, one character each.

    THINKING text ... TEXT text ... CALL name ARGUMENTS {...} CALL name ARGUMENTS {...}

An answer without a mark at its beginning begins with text.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from parkd.engine_adapter.remote.alphabet import Mark
from parkd.types import FinishReason, ReasoningDelta, TextDelta, ToolCallDelta, TurnRequest

OutputEvent = TextDelta | ReasoningDelta | ToolCallDelta


_PARTS = {mark.joint: mark for mark in (Mark.THINKING, Mark.TEXT, Mark.CALL, Mark.ARGUMENTS)}
_JOINTS = re.compile(f"([{''.join(_PARTS)}])")


class PartsParser:
    """A `Parser` of answers. Everything is passed on as it came: white space, unknown tools, arguments that are no
    JSON."""

    def __init__(self, request: TurnRequest, call_ids: Callable[[], str]) -> None:
        """`call_ids` gives the ids of calls."""
        self._call_ids = call_ids
        self._max_calls = None if request.parallel_tool_calls else 1
        self._part = Mark.TEXT
        self._name = ""
        self._index = -1

    @property
    def in_reasoning(self) -> bool:
        return self._part is Mark.THINKING

    @property
    def satisfied(self) -> bool:
        """Once another call than the only one begins."""
        return self._max_calls is not None and self._part is Mark.CALL and self._index + 1 >= self._max_calls

    def push(self, text: str) -> list[OutputEvent]:
        events: list[OutputEvent] = []
        for piece in _JOINTS.split(text):
            if piece and not self.satisfied:
                part = _PARTS.get(piece)
                if part is None:
                    self._take(piece, events)
                else:
                    self._begin(part, events)
        return events

    def finish(self, reason: FinishReason) -> tuple[list[OutputEvent], FinishReason]:
        """A call of which only the name came, is one without arguments, unless the answer was cut there."""
        events: list[OutputEvent] = []
        if self._part is Mark.CALL and not reason.is_cut and not self.satisfied:
            self._begin(Mark.ARGUMENTS, events)
        if reason is FinishReason.STOP and self._index >= 0:
            reason = FinishReason.TOOL_CALLS
        return events, reason

    def _begin(self, part: Mark, events: list[OutputEvent]) -> None:
        if part is Mark.ARGUMENTS:
            self._index += 1
            events.append(ToolCallDelta(self._index, self._call_ids(), self._name))
        self._name = ""
        self._part = part

    def _take(self, text: str, events: list[OutputEvent]) -> None:
        match self._part:
            case Mark.THINKING:
                events.append(ReasoningDelta(text))
            case Mark.TEXT:
                events.append(TextDelta(text))
            case Mark.CALL:
                self._name += text
            case Mark.ARGUMENTS:
                events.append(ToolCallDelta(self._index, arguments=text))
