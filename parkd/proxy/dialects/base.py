"""The protocol of an API dialect: request bodies in, response bytes out. Pure: no clock, no queue, no engine.

body --parse--> TurnRequest --turn--> events --encoder--> SSE frames, or one document
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from parkd.errors import ParkdError
from parkd.types import Event, TurnRequest


@dataclass(frozen=True, slots=True)
class ResponseMeta:
    """Fields that every answer contains."""

    request_id: str
    model: str
    created_s: int
    """Unix time."""


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """An error that is sent instead of an answer, before the first byte."""

    status: int
    body: Mapping[str, Any]
    headers: Mapping[str, str]


class Encoder(Protocol):
    """Encodes one answer. Events are fed in order; `Finished` is the last."""

    def feed(self, event: Event) -> Iterable[bytes]:
        """SSE frames for the event; none if the dialect does not show it. The frames of `Finished` end the stream.
        Also collects what `document` needs."""

    def keep_alive(self) -> bytes:
        """A frame without content that resets the client's idle timer."""

    def failure(self, error: ParkdError) -> Iterable[bytes]:
        """Frames for an error after the status line was sent; they end the stream."""

    def document(self) -> Mapping[str, Any]:
        """The whole answer as one document. Only after `Finished` was fed."""


class Dialect(Protocol):
    streamed_errors: frozenset[str]
    """Codes of errors that streaming clients expect in the stream rather than in the HTTP status."""
    stream_type: str
    """The media type of a stream."""

    def at_once(self, body: Mapping[str, Any], meta: ResponseMeta) -> Mapping[str, Any] | None:
        """The answer to a request that needs no turn; None for all others."""

    def parse(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> TurnRequest:
        """Ignores unknown fields. Raises InvalidRequest with the field (`param`) and what to do."""

    def encoder(self, request: TurnRequest, body: Mapping[str, Any], meta: ResponseMeta) -> Encoder: ...

    def error(self, error: ParkdError, request_id: str) -> ErrorAnswer: ...


class TurnDialect:
    """What most dialects have in common: server-sent events, errors in the HTTP status, a turn for every request."""

    streamed_errors: frozenset[str] = frozenset()
    stream_type = "text/event-stream; charset=utf-8"

    def at_once(self, body: Mapping[str, Any], meta: ResponseMeta) -> Mapping[str, Any] | None:  # noqa: ARG002
        return None
