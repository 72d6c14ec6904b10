"""What a dialect is: bodies in, bytes out. Pure: no clock, no queue, no engine.

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
    """What every answer names."""

    request_id: str
    model: str
    created_s: int
    """Unix time."""


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """An error before the first byte."""

    status: int
    body: Mapping[str, Any]
    headers: Mapping[str, str]


class Encoder(Protocol):
    """One answer. Events are fed in order; `Finished` is the last."""

    def feed(self, event: Event) -> Iterable[bytes]:
        """SSE frames for the event, none for events the dialect does not show. The last event's frames close the
        stream. Also accumulates what `document` needs."""

    def keep_alive(self) -> bytes:
        """A frame that resets the client's idle timer and carries nothing."""

    def failure(self, error: ParkdError) -> Iterable[bytes]:
        """Frames for an error after the status line has gone out; closes the stream."""

    def document(self) -> Mapping[str, Any]:
        """The non-streamed answer, after `Finished` was fed."""


class Dialect(Protocol):
    streamed_errors: frozenset[str]
    """Codes of errors that a streaming client looks for in the stream and not in the status."""

    def parse(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> TurnRequest:
        """Ignores unknown fields. Raises InvalidRequest naming the field (`param`) and what to do."""

    def encoder(self, request: TurnRequest, body: Mapping[str, Any], meta: ResponseMeta) -> Encoder: ...

    def error(self, error: ParkdError, request_id: str) -> ErrorAnswer: ...
