"""The answer of one turn as an ASGI response: a stream of server-sent events, or one document.

    submit -> [queue] -> Started | deadline -> headers -> events, keep-alives -> end

When the client disconnects, its turn is handed to `Resends`, which gives it up unless the client comes back.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping

import anyio
from starlette.types import Message, Receive, Scope, Send

from parkd.errors import EngineFailure, ParkdError
from parkd.lane.lane import Lane
from parkd.lane.reports.turn_log import TurnLog
from parkd.lane.resend import Resends
from parkd.lane.turn import Turn
from parkd.proxy.config import ProxyConfig
from parkd.proxy.dialects.base import Dialect, Encoder
from parkd.proxy.dialects.frames import encoded
from parkd.proxy.requests import id_headers
from parkd.types import CacheReport, Finished, Started

PENDING = "pending"
DOCUMENT_POLL_S = 60.0
"""Longest wait for an event while a document is filled; only a bound, since no keep-alives are sent."""


def stream_headers(dialect: Dialect) -> dict[str, str]:
    """Headers of every stream in this dialect."""
    return {"content-type": dialect.stream_type, "cache-control": "no-store", "x-accel-buffering": "no"}


def cache_headers(report: CacheReport | None) -> dict[str, str]:
    """Headers about the start of the turn; `pending` if it is not known when they are sent."""
    if report is None:
        return {"x-parkd-cache": PENDING}
    headers = {"x-parkd-cache": report.outcome.value}
    if report.is_known:
        headers["x-parkd-reused-tokens"] = str(report.reused_tokens)
    if report.why:
        headers["x-parkd-why"] = header_text(report.why)
    if report.divergence is not None:
        headers["x-parkd-divergence"] = header_text(str(report.divergence))
    return headers


def header_text(text: str) -> str:
    """A text as a header value: latin-1, without control characters."""
    printable = "".join(character if character.isprintable() else " " for character in text)
    return printable.encode("latin-1", "replace").decode("latin-1")


async def send_document(send: Send, status: int, document: Mapping[str, object], headers: Mapping[str, str]) -> None:
    body = encoded(document)
    sized = {"content-type": "application/json", **headers, "content-length": str(len(body))}
    await send({"type": "http.response.start", "status": status, "headers": _raw(sized)})
    await send({"type": "http.response.body", "body": body})


class TurnResponse:
    """Queues the turn and sends its answer, or its error."""

    def __init__(
        self,
        turn: Turn,
        lane: Lane[Turn],
        log: TurnLog,
        resends: Resends,
        dialect: Dialect,
        encoder: Encoder,
        config: ProxyConfig,
        monotonic: Callable[[], float],
        again: Callable[[int], Awaitable[Turn]],
    ) -> None:
        """`again` makes the turn of another answer to the request, by its number."""
        self._turn = turn
        self._again = again
        self._number = 0
        self._lane = lane
        self._log = log
        self._resends = resends
        self._dialect = dialect
        self._encoder = encoder
        self._config = config
        self._monotonic = monotonic

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        turn = self._turn
        try:
            if not self._turn.submitted:
                self._turn.submitted = True
                self._lane.submit(turn)
        except ParkdError as error:
            turn.release_body()
            self._log.record(turn, error)
            await self._send_error(send, error)
            return
        done = False
        try:
            async with anyio.create_task_group() as tasks:
                turn.channel.on_overflow = tasks.cancel_scope.cancel
                tasks.start_soon(self._watch, receive, tasks.cancel_scope)
                await (self._stream(send) if turn.request.stream else self._document(send))
                done = True
                tasks.cancel_scope.cancel()
        finally:
            if done:
                turn.release_body()
            else:
                self._resends.left(self._turn)

    async def _goes_on(self) -> bool:
        """After an answer: queues the turn of the next one. False if it was the last. Raises ParkdError."""
        ended = self._turn
        self._number += 1
        if self._number >= ended.request.answers:
            return False
        turn = await self._again(self._number)
        turn.channel.on_overflow, turn.submitted = ended.channel.on_overflow, True
        self._turn = turn
        self._lane.submit(turn)
        return True

    async def _watch(self, receive: Receive, scope: anyio.CancelScope) -> None:
        while True:
            message: Message = await receive()
            if message["type"] == "http.disconnect":
                scope.cancel()
                return

    async def _document(self, send: Send) -> None:
        report: CacheReport | None = None
        try:
            while True:
                event = await self._turn.channel.next(DOCUMENT_POLL_S)
                if event is not None:
                    for _ in self._encoder.feed(event):
                        pass  # the frames are for streams; feeding the encoder fills the document
                if isinstance(event, Finished):
                    report = report or event.report
                    if not await self._goes_on():
                        break
            document = self._encoder.document()
        except ParkdError as error:
            self._record_unstarted(error)
            await self._send_error(send, error)
            return
        await send_document(send, 200, document, {**id_headers(self._turn.request_id), **cache_headers(report)})

    async def _stream(self, send: Send) -> None:
        try:
            event = await self._turn.channel.next(self._config.first_byte_deadline_s)
        except ParkdError as error:
            self._record_unstarted(error)
            await self._send_error(send, error)
            return
        report = event.report if isinstance(event, Started) else None
        headers = {**stream_headers(self._dialect), **id_headers(self._turn.request_id), **cache_headers(report)}
        await send({"type": "http.response.start", "status": 200, "headers": _raw(headers)})
        sent_s = self._monotonic()
        try:
            while True:
                silent_s = self._monotonic() - sent_s
                frames = b""
                if event is not None:
                    frames = _joined(self._encoder.feed(event))
                elif silent_s >= self._config.keep_alive_s or report is None:
                    frames = self._encoder.keep_alive()
                if frames:
                    await send({"type": "http.response.body", "body": frames, "more_body": True})
                    sent_s = self._monotonic()
                if isinstance(event, Finished) and not await self._goes_on():
                    break
                report = event.report if isinstance(event, Started) else report
                silence_s = max(0.0, self._config.keep_alive_s - (self._monotonic() - sent_s))
                event = await self._turn.channel.next(silence_s)
        except ParkdError as error:
            self._record_unstarted(error)
            last = _joined(self._encoder.failure(error))
            await send({"type": "http.response.body", "body": last, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    def _record_unstarted(self, error: ParkdError) -> None:
        """Records a turn that the lane never ran. The runner records all others."""
        if self._turn.began_s is None:
            self._log.record(self._turn, error)

    async def _send_error(self, send: Send, error: ParkdError) -> None:
        answer = self._dialect.error(error, self._turn.request_id)
        headers = {**id_headers(self._turn.request_id), **answer.headers}
        await send_document(send, answer.status, answer.body, headers)


def unforeseen() -> ParkdError:
    """The error that a client gets for an unexpected exception."""
    return EngineFailure("The server met an unexpected error; its log has the details.")


def _joined(frames: Iterable[bytes]) -> bytes:
    return b"".join(frames)


def _raw(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
