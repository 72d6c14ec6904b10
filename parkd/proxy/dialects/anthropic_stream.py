"""Anthropic's answers: events to SSE frames, and to one document.

    message_start  (content_block_start  content_block_delta*  content_block_stop)*  message_delta  message_stop

One block is open at a time: thinking, text, or one tool call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import orjson

from parkd.answers.readers.json_machine import closed
from parkd.errors import ParkdError
from parkd.identity.surrogates import mended
from parkd.proxy.dialects.anthropic_errors import error_document
from parkd.proxy.dialects.base import ResponseMeta
from parkd.proxy.dialects.frames import json_frame
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
)

SHORT_TTL_S = 300.0
"""The default ttl of `cache_control`."""
SIGNATURE = "parkd"
"""Clients drop thinking without a signature, and send the signature back. parkd does not check it."""

STOP_REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.TOOL_CALLS: "tool_use",
    FinishReason.CONTENT_FILTER: "refusal",
    FinishReason.CANCELLED: "end_turn",
}


class MessagesEncoder:
    """Implements `Encoder`. Usage counts cached tokens separately: `input_tokens` are those read in this request."""

    def __init__(self, meta: ResponseMeta, *, writes_for_s: float | None = None) -> None:
        """`writes_for_s`: seconds for which the request asks to keep its prompt; None if it does not ask."""
        self._meta = meta
        self._writes_for_s = writes_for_s
        self._blocks: list[dict[str, Any]] = []
        self._arguments: dict[int, list[str]] = {}
        self._text: list[str] = []
        """Pieces of the open block, joined when it closes."""
        self._open: str | None = None
        self._open_call: int | None = None
        self._diagnostics: dict[str, Any] = {}
        self._document: dict[str, Any] | None = None

    def feed(self, event: Event) -> Iterable[bytes]:
        return list(self._frames(event))

    def keep_alive(self) -> bytes:
        return _event("ping")

    def failure(self, error: ParkdError) -> Iterable[bytes]:
        return [json_frame(error_document(error, self._meta.request_id), "error")]

    def document(self) -> Mapping[str, Any]:
        assert self._document is not None, "the turn has not finished"
        return self._document

    def _frames(self, event: Event) -> Iterator[bytes]:
        match event:
            case Started(report):
                self._diagnostics = diagnostics(report)
                yield _event("message_start", message=self._message(usage(report, 0, writes_for_s=self._writes_for_s)))
            case Progress():
                pass
            case TextDelta(text):
                yield from self._ensure("text", {"type": "text", "text": ""})
                yield self._delta("text_delta", text=text)
                self._text.append(text)
            case ReasoningDelta(text):
                yield from self._ensure("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                yield self._delta("thinking_delta", thinking=text)
                self._text.append(text)
            case ToolCallDelta():
                yield from self._call(event)
            case Finished():
                yield from self._close()
                yield from self._finish(event)

    def _message(self, counts: Mapping[str, int]) -> dict[str, Any]:
        return {
            "id": "msg_" + self._meta.request_id.removeprefix("req_"),
            "type": "message",
            "role": "assistant",
            "model": self._meta.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": counts,
            **self._diagnostics,
        }

    def _ensure(self, kind: str, block: dict[str, Any]) -> Iterator[bytes]:
        if self._open != kind:
            yield from self._start(kind, block)

    def _start(self, kind: str, block: dict[str, Any]) -> Iterator[bytes]:
        yield from self._close()
        self._open = kind
        self._text = []
        self._blocks.append(dict(block))
        yield _event("content_block_start", index=len(self._blocks) - 1, content_block=block)

    def _call(self, delta: ToolCallDelta) -> Iterator[bytes]:
        if self._open != "tool_use" or self._open_call != delta.index:
            block = {"type": "tool_use", "id": delta.call_id or "", "name": delta.name or "", "input": {}}
            yield from self._start("tool_use", block)
            self._open_call = delta.index
        if delta.arguments:
            yield self._delta("input_json_delta", partial_json=delta.arguments)
            self._text.append(delta.arguments)

    def _delta(self, kind: str, **fields: str) -> bytes:
        return _event("content_block_delta", index=len(self._blocks) - 1, delta={"type": kind, **fields})

    def _close(self) -> Iterator[bytes]:
        if self._open is None:
            return
        block, text = self._blocks[-1], "".join(self._text)
        if self._open == "thinking":
            block["thinking"], block["signature"] = text, SIGNATURE
            yield self._delta("signature_delta", signature=SIGNATURE)
        elif self._open == "text":
            block["text"] = text
        else:
            block["input"] = _arguments(text)
        self._open = None
        yield _event("content_block_stop", index=len(self._blocks) - 1)

    def _finish(self, event: Finished) -> Iterator[bytes]:
        reason = STOP_REASONS[event.reason]
        if event.reason is FinishReason.STOP and event.stop_string is not None:
            reason = "stop_sequence"
        counts = usage(
            event.report, event.timings.output_tokens, event.reasoning_tokens, writes_for_s=self._writes_for_s
        )
        ending = {"stop_reason": reason, "stop_sequence": event.stop_string}
        self._document = {**self._message(counts), "content": self._blocks, **ending}
        yield _event("message_delta", delta=ending, usage=counts)
        yield _event("message_stop")


def usage(
    report: CacheReport, output_tokens: int, reasoning_tokens: int = 0, *, writes_for_s: float | None = None
) -> dict[str, Any]:
    """Anthropic's token counts; the three input counts add up to the prompt. parkd keeps every prompt, but counts it as
    written to the cache only if the request asks for that (`cache_control`), since clients display it as a cost.
    """
    written = 0 if writes_for_s is None else report.written_tokens
    hours = written if writes_for_s is not None and writes_for_s > SHORT_TTL_S else 0
    counts: dict[str, Any] = {
        "input_tokens": report.prompt_tokens - report.reused_tokens - written,
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": report.reused_tokens,
        "cache_creation": {"ephemeral_5m_input_tokens": written - hours, "ephemeral_1h_input_tokens": hours},
        "output_tokens": output_tokens,
    }
    if reasoning_tokens:
        counts["output_tokens_details"] = {"thinking_tokens": reasoning_tokens}
    return counts


def diagnostics(report: CacheReport) -> dict[str, Any]:
    """Why the earlier request's prompt was not reused whole, if the client asked; empty if it was."""
    diagnosis = report.diagnosis
    if diagnosis is None:
        return {}
    reason: dict[str, Any] | None = None
    match diagnosis.kind:
        case DiagnosisKind.CHANGED:
            reason = {"type": f"{diagnosis.changed}_changed", "cache_missed_input_tokens": diagnosis.missed_tokens}
        case DiagnosisKind.NOT_FOUND:
            reason = {"type": "previous_message_not_found"}
        case DiagnosisKind.UNAVAILABLE:
            reason = {"type": "unavailable"}
    return {"diagnostics": None if reason is None else {"cache_miss_reason": reason}}


def _arguments(text: str) -> Any:
    """A call's arguments as a value that can be serialised; of a call that broke off, what was complete, as Anthropic's
    SDK reads it from a stream.

    A surrogate without a partner, which a model may write as an escape, is U+FFFD.
    """
    document = mended(text)
    for readable in (document, closed(document)):
        with suppress(orjson.JSONDecodeError):
            return orjson.loads(readable)
    return {}  # Empty, or with a number that no double can hold.


def _event(kind: str, **fields: Any) -> bytes:
    return json_frame({"type": kind, **fields}, kind)
