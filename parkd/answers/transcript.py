"""The content of an answer, collected from its events, by which it is recognised when a client sends it back."""

from __future__ import annotations

import json

from parkd.identity.output_memory import Said, json_key
from parkd.types import Event, ReasoningDelta, TextDelta, ToolCallDelta


class Transcript:
    """Takes the events of one answer in order. For one thread at a time."""

    def __init__(self) -> None:
        self._runs: list[list[str]] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, tuple[str, list[str]]] = {}
        self._in_text = False

    def feed(self, event: Event) -> None:
        match event:
            case TextDelta(text):
                if not self._in_text:
                    self._runs.append([])
                self._runs[-1].append(text)
            case ReasoningDelta(text):
                self._reasoning.append(text)
            case ToolCallDelta():
                _, pieces = self._calls.setdefault(event.index, (event.name or "", []))
                pieces.append(event.arguments)
            case _:
                return
        self._in_text = isinstance(event, TextDelta)

    def said(self) -> Said | None:
        """The content; None if it cannot be recognised, because the arguments of a call are incomplete."""
        runs = tuple("".join(run) for run in self._runs)
        calls: list[tuple[str, str]] = []
        for _, (name, pieces) in sorted(self._calls.items()):
            try:
                calls.append((name, json_key(json.loads("".join(pieces) or "{}"))))
            except (ValueError, RecursionError):
                return None
        return Said(runs, "".join(self._reasoning), tuple(calls))
