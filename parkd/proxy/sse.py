"""The answer of one turn as an ASGI response: a stream of server-sent events, or one document.

    submit -> [queue] -> Started | deadline -> headers -> events, keep-alives -> end

When the client disconnects, its turn is handed to `Resends`, which gives it up unless the client comes back.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping

import anyio
from starlette.types import Message, Receive, Scope, Send

from parkd.errors import EngineFailure, ParkdError, QueueFull
from parkd.lane.events import EventChannel, next_of
from parkd.lane.lane import Lane
from parkd.lane.reports.turn_log import TurnLog
from parkd.lane.resend import Resends
from parkd.lane.turn import Turn
from parkd.proxy.config import ProxyConfig
from parkd.proxy.dialects.base import Dialect, Encoder
from parkd.proxy.dialects.choices import Choices
from parkd.proxy.dialects.frames import encoded
from parkd.proxy.requests import id_headers
from parkd.types import CacheReport, Event, Finished, Started

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
    if report.held_tokens is not None:
        headers["x-parkd-held-tokens"] = str(report.held_tokens)
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
        self._under_way = {0: turn}
        """Answer -> its turn."""
        self._channels: dict[int, EventChannel] = {0: turn.channel}
        """The same by their channels, the one read last at the end."""
        self._next_answer = 1
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
            elif turn.request.answers == 1:
                self._resends.left(turn)
            else:
                self._give_up()

    async def _next(self, timeout_s: float) -> tuple[int, Event] | None:
        """The next event of an answer, by its number. Raises what one of them failed with."""
        return await next_of(self._channels, timeout_s)

    def _frames(self, number: int, event: Event) -> bytes:
        encoder = self._encoder
        return _joined(encoder.feed(event, number) if isinstance(encoder, Choices) else encoder.feed(event))

    async def _goes_on(self, number: int, event: Event) -> bool:
        """After each event: queues the turn of another answer if one has ended. False behind the last event of all.
        Raises ParkdError."""
        if isinstance(event, Finished):
            del self._under_way[number], self._channels[number]
            await self._add_answers()
        return bool(self._under_way)

    async def _add_answers(self) -> None:
        """Queues turns of further answers, as many as the lane can run at once; fewer if others wait for their places.
        Raises ParkdError."""
        first = self._turn
        while self._next_answer < first.request.answers and len(self._under_way) < self._lane.width:
            turn = await self._again(self._next_answer)
            turn.channel.on_overflow, turn.submitted = first.channel.on_overflow, True
            try:
                self._lane.submit(turn)
            except QueueFull as error:
                if self._under_way:
                    return  # tried again when one of them ends
                self._log.record(turn, error)
                raise
            self._under_way[self._next_answer], self._channels[self._next_answer] = turn, turn.channel
            self._next_answer += 1

    def _give_up(self) -> None:
        """Ends what is under way: nobody wants it."""
        for turn in self._under_way.values():
            self._resends.give_up(turn)

    async def _watch(self, receive: Receive, scope: anyio.CancelScope) -> None:
        while True:
            message: Message = await receive()
            if message["type"] == "http.disconnect":
                scope.cancel()
                return

    async def _document(self, send: Send) -> None:
        report: CacheReport | None = None
        try:
            await self._add_answers()
            while True:
                found = await self._next(DOCUMENT_POLL_S)
                if found is None:
                    continue
                number, event = found
                self._frames(number, event)  # these are for streams; feeding the encoder fills the document
                if isinstance(event, Finished) and number == 0:
                    report = event.report
                if not await self._goes_on(number, event):
                    break
            document = self._encoder.document()
        except ParkdError as error:
            self._failed(error)
            await self._send_error(send, error)
            return
        await send_document(send, 200, document, {**id_headers(self._turn.request_id), **cache_headers(report)})

    async def _stream(self, send: Send) -> None:
        try:
            await self._add_answers()
            found = await self._next(self._config.first_byte_deadline_s)
        except ParkdError as error:
            self._failed(error)
            await self._send_error(send, error)
            return
        report = found[1].report if found is not None and isinstance(found[1], Started) else None
        headers = {**stream_headers(self._dialect), **id_headers(self._turn.request_id), **cache_headers(report)}
        await send({"type": "http.response.start", "status": 200, "headers": _raw(headers)})
        sent_s = self._monotonic()
        try:
            while True:
                silent_s = self._monotonic() - sent_s
                frames = b""
                if found is not None:
                    frames = self._frames(*found)
                elif silent_s >= self._config.keep_alive_s or report is None:
                    frames = self._encoder.keep_alive()
                if frames:
                    await send({"type": "http.response.body", "body": frames, "more_body": True})
                    sent_s = self._monotonic()
                if found is not None:
                    if not await self._goes_on(*found):
                        break
                    report = found[1].report if isinstance(found[1], Started) else report
                silence_s = max(0.0, self._config.keep_alive_s - (self._monotonic() - sent_s))
                found = await self._next(silence_s)
        except ParkdError as error:
            self._failed(error)
            last = _joined(self._encoder.failure(error))
            await send({"type": "http.response.body", "body": last, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    def _failed(self, error: ParkdError) -> None:
        """One of the answers failed, so all end. Records a turn that the lane never ran; the runner records all
        others."""
        for turn in self._under_way.values():
            if not turn.channel.closed:
                self._resends.give_up(turn)
            elif turn.began_s is None:
                self._log.record(turn, error)

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
