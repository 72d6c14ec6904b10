"""The answers of OpenAI's Responses API: events to SSE frames, and to one document.

    created  in_progress*  (output_item.added  ...parts and deltas...  output_item.done)*  completed

One item is open at a time: reasoning, a message, or one function call. Frames are numbered, and every frame that
contains the response has the same response id.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from parkd.errors import ParkdError
from parkd.proxy.dialects.base import ResponseMeta
from parkd.proxy.dialects.frames import json_frame
from parkd.proxy.dialects.logprobs import scored
from parkd.proxy.dialects.progress_summaries import ProgressSummaries
from parkd.types import (
    CacheReport,
    DiagnosisKind,
    Event,
    Finished,
    FinishReason,
    Progress,
    ReasoningDelta,
    Started,
    TextDelta,
    ToolCallDelta,
    TurnRequest,
)

INCOMPLETE = {
    FinishReason.LENGTH: {"reason": "max_output_tokens"},
    FinishReason.CONTENT_FILTER: {"reason": "content_filter"},
}
"""`incomplete_details` of answers that were cut."""
SEAL = "parkd1:"
"""Prefix of reasoning that is given to the client as opaque text and sent back by it. It is encoded, not encrypted."""


def sealed_reasoning(text: str) -> str:
    return SEAL + base64.b64encode(text.encode()).decode()


def opened_reasoning(sealed: str) -> str:
    """The text; empty if parkd did not seal it."""
    if not sealed.startswith(SEAL):
        return ""
    try:
        return base64.b64decode(sealed.removeprefix(SEAL), validate=True).decode()
    except (binascii.Error, ValueError):
        return ""


class ResponsesEncoder:
    """Implements `Encoder`. `namespaces` maps the model's name of a tool in a namespace to its (namespace, name)."""

    def __init__(
        self,
        meta: ResponseMeta,
        request: TurnRequest,
        body: Mapping[str, Any],
        namespaces: Mapping[str, tuple[str, str]],
        *,
        seals_reasoning: bool,
        tells_progress: bool = False,
    ) -> None:
        self._suffix = meta.request_id.removeprefix("req_")
        self._namespaces = namespaces
        self._seals_reasoning = seals_reasoning
        # Only in streams: in a document it would come too late, and be sent back for nothing.
        self._progress = ProgressSummaries() if tells_progress and request.stream else None
        self._sequence = 0
        self._created = False
        self._items: list[dict[str, Any]] = []
        self._pieces: list[str] = []
        """Pieces of the open item's text or arguments."""
        self._logprobs: list[Mapping[str, Any]] = []
        """Of the open message's tokens."""
        self._open = False
        self._open_summary = False
        """The open item is a summary of progress alone."""
        self._open_call: int | None = None
        self._document: dict[str, Any] | None = None
        self._echo = {name: body[name] for name in ("tools", "tool_choice", "metadata") if body.get(name) is not None}
        self._base: dict[str, Any] = {
            "id": f"resp_{self._suffix}",
            "object": "response",
            "created_at": meta.created_s,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "max_output_tokens": request.max_output_tokens,
            "model": meta.model,
            "output": [],
            "parallel_tool_calls": request.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": request.reasoning.effort, "summary": None},
            "store": False,
            "temperature": request.sampling.temperature,
            "text": body.get("text") or {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": request.sampling.top_p,
            "top_logprobs": request.sampling.top_logprobs or 0,
            "truncation": "disabled",
            "usage": None,
            "metadata": {},
        }

    def feed(self, event: Event) -> Iterable[bytes]:
        return list(self._frames(event))

    def keep_alive(self) -> bytes:
        """A repeated `response.in_progress`: comments do not reset the idle timers of this API's clients."""
        if not self._created:
            return b"".join(self._create())
        return self._event("response.in_progress", response=self._base)

    def failure(self, error: ParkdError) -> Iterable[bytes]:
        frames = list(self._create())
        told = {"code": error.code, "message": error.message}
        response = {**self._base, **self._echo, "status": "failed", "error": told, "output": self._items}
        return [*frames, self._event("response.failed", response=response)]

    def document(self) -> Mapping[str, Any]:
        assert self._document is not None, "the turn has not finished"
        return self._document

    def _frames(self, event: Event) -> Iterator[bytes]:
        if not isinstance(event, Progress):
            yield from self._create()
        match event:
            case Progress() if self._progress is not None:
                words = self._progress.words(event)
                if words is not None:
                    yield from self._summary(words)
            case Started() | Progress():
                pass
            case TextDelta(text, logprobs):
                yield from self._ensure("message")
                told = scored(logprobs)
                self._logprobs += told
                yield self._delta("response.output_text.delta", text, content_index=0, logprobs=told)
            case ReasoningDelta(text):
                yield from self._ensure("reasoning")
                yield self._delta("response.reasoning_text.delta", text, content_index=0)
            case ToolCallDelta():
                yield from self._call(event)
            case Finished():
                yield from self._close("incomplete" if event.reason.is_cut else "completed")
                yield from self._finish(event)

    def _create(self) -> Iterator[bytes]:
        if not self._created:
            self._created = True
            yield self._event("response.created", response=self._base)
            yield self._event("response.in_progress", response=self._base)

    def _ensure(self, kind: str) -> Iterator[bytes]:
        """Opens an item of this kind (message or reasoning) unless one is open."""
        if self._open and self._items[-1]["type"] == kind and not self._open_summary:
            return
        if kind == "message":
            item = {
                "id": self._item_id("msg"),
                "type": kind,
                "status": "in_progress",
                "role": "assistant",
                "content": [],
            }
        else:
            item = {"id": self._item_id("rs"), "type": kind, "status": "in_progress", "summary": [], "content": []}
        yield from self._add(item)
        yield self._part("response.content_part.added", "")

    def _summary(self, words: str) -> Iterator[bytes]:
        """A part of the summary of a reasoning item that has nothing else."""
        yield from self._create()
        if not self._open_summary:
            new = {"id": self._item_id("rs"), "type": "reasoning", "status": "in_progress", "summary": []}
            yield from self._add(new)
            self._open_summary = True
        item = self._items[-1]
        where, part = {"summary_index": len(item["summary"])}, {"type": "summary_text", "text": words}
        yield self._about_item("response.reasoning_summary_part.added", part={**part, "text": ""}, **where)
        yield self._about_item("response.reasoning_summary_text.delta", delta=words, **where)
        yield self._about_item("response.reasoning_summary_text.done", text=words, **where)
        yield self._about_item("response.reasoning_summary_part.done", part=part, **where)
        item["summary"].append(part)

    def _call(self, delta: ToolCallDelta) -> Iterator[bytes]:
        if not self._open or self._items[-1]["type"] != "function_call" or self._open_call != delta.index:
            name = delta.name or ""
            item = {
                "id": self._item_id("fc"),
                "type": "function_call",
                "status": "in_progress",
                "call_id": delta.call_id or "",
                "name": name,
                "arguments": "",
            }
            if name in self._namespaces:
                item["namespace"], item["name"] = self._namespaces[name]
            yield from self._add(item)
            self._open_call = delta.index
        if delta.arguments:
            yield self._delta("response.function_call_arguments.delta", delta.arguments)

    def _item_id(self, kind: str) -> str:
        return f"{kind}_{self._suffix}_{len(self._items)}"

    def _add(self, item: dict[str, Any]) -> Iterator[bytes]:
        yield from self._close("completed")
        self._items.append(item)
        self._pieces, self._logprobs = [], []
        self._open = True
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=item)

    def _close(self, status: str) -> Iterator[bytes]:
        if not self._open:
            return
        self._open = False
        item, text = self._items[-1], "".join(self._pieces)
        item["status"] = status
        if self._open_summary:
            self._open_summary = False
        elif item["type"] == "function_call":
            item["arguments"] = text
            yield self._about_item("response.function_call_arguments.done", arguments=text, name=item["name"])
        else:
            if item["type"] == "message":
                yield self._about_item("response.output_text.done", content_index=0, text=text, logprobs=self._logprobs)
            else:
                yield self._about_item("response.reasoning_text.done", content_index=0, text=text)
                if self._seals_reasoning:
                    item["encrypted_content"] = sealed_reasoning(text)
            yield self._part("response.content_part.done", text)
            item["content"] = [self._part_object(text)]
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _part_object(self, text: str) -> dict[str, Any]:
        if self._items[-1]["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}

    def _part(self, kind: str, text: str) -> bytes:
        return self._about_item(kind, content_index=0, part=self._part_object(text))

    def _delta(self, kind: str, piece: str, **more: Any) -> bytes:
        self._pieces.append(piece)
        return self._about_item(kind, delta=piece, **more)

    def _about_item(self, kind: str, **more: Any) -> bytes:
        return self._event(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **more)

    def _event(self, kind: str, **more: Any) -> bytes:
        frame = json_frame({"type": kind, "sequence_number": self._sequence, **more}, kind)
        self._sequence += 1
        return frame

    def _finish(self, event: Finished) -> Iterator[bytes]:
        status = "incomplete" if event.reason.is_cut else "completed"
        self._document = {
            **self._base,
            **self._echo,
            "status": status,
            "incomplete_details": INCOMPLETE.get(event.reason),
            "output": self._items,
            "usage": usage(event),
            **cache_diagnostics(event.report),
        }
        yield self._event(f"response.{status}", response=self._document)


def cache_diagnostics(report: CacheReport) -> Mapping[str, Any]:
    """The comparison with an earlier response; empty if the client did not ask for one."""
    diagnosis = report.diagnosis
    if diagnosis is None:
        return {}
    told: dict[str, Any] = {"type": "unavailable"}
    match diagnosis.kind:
        case DiagnosisKind.HIT:
            told = {"type": "cache_hit"}
        case DiagnosisKind.NOT_FOUND:
            told = {"type": "comparison_response_not_found"}
        case DiagnosisKind.CHANGED:
            reason = f"{diagnosis.changed}_changed" if diagnosis.changed in ("model", "tools") else "input_changed"
            told = {
                "type": "cache_miss",
                "reason": reason,
                "cache_missed_tokens": diagnosis.missed_tokens,
                "comparison_reusable_tokens": diagnosis.common_tokens,
            }
    return {"prompt_cache_diagnostics": told}


def usage(event: Finished) -> Mapping[str, Any]:
    """Token counts. Input tokens include cached ones, which were not computed in this request."""
    prompt_tokens, output_tokens = event.report.prompt_tokens, event.timings.output_tokens
    return {
        "input_tokens": prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": event.report.reused_tokens,
            "cache_write_tokens": event.report.written_tokens,
        },
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": event.reasoning_tokens},
        "total_tokens": prompt_tokens + output_tokens,
    }
