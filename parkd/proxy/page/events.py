"""Server-sent events: the document of `/parkd/now`, whenever it has changed.

    state ── looked at every STEP_S ──> differs from what was sent? ──> one event

There is no queue: each listener's own task looks, and sends what is true then. So a listener that reads slowly misses
states in between, holds one event at most, and delays nobody else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import anyio
import orjson
from starlette.types import Message, Receive, Scope, Send

from parkd.errors import QueueFull

STEP_S = 0.5
"""How often a listener looks. A turn's last state may so be told this much later."""
SILENCE_S = 15.0
"""The longest silence on a stream; then a comment is sent, so that it is noticed when the other side has gone."""
SEND_DEADLINE_S = 30.0
"""A listener that takes nothing for this long is let go, since it holds a place."""
LISTENERS_PER_KEY = 8
LISTENERS = 64
"""Most listeners of all keys together."""
FIRST_LISTENERS = 64
"""Beyond them, so many keys that have none may still have one: a few keys do not shut all others out."""
RETRY_AFTER_S = 5
LAST_S = 1.0
"""Longest wait for the end of a stream to be sent."""

HEADERS = (
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
    (b"x-content-type-options", b"nosniff"),
)


class Listeners:
    """Counts the listeners of each key. Lives on the event loop."""

    def __init__(self) -> None:
        self._of: Counter[str] = Counter()

    @contextmanager
    def place(self, owner: str) -> Iterator[None]:
        """A place for as long as the context lasts. Raises QueueFull if there is none."""
        self.check(owner)
        self._of[owner] += 1
        try:
            yield
        finally:
            self._of[owner] -= 1
            if not self._of[owner]:
                del self._of[owner]

    def check(self, owner: str) -> None:
        """Raises QueueFull."""
        most = LISTENERS if self._of[owner] else LISTENERS + FIRST_LISTENERS
        if self._of[owner] >= LISTENERS_PER_KEY or self._of.total() >= most:
            raise QueueFull(
                f"{self._of[owner]} listeners of this key are connected (at most {LISTENERS_PER_KEY}, of all keys "
                f"{LISTENERS}). Close one, or ask GET /parkd/now from time to time.",
                retry_after_s=RETRY_AFTER_S,
            )

    def __len__(self) -> int:
        return self._of.total()


class EventStream:
    """One listener, as an ASGI response. Ends when the client leaves or the server stops."""

    def __init__(
        self,
        listeners: Listeners,
        owner: str,
        document: Callable[[], Mapping[str, Any]],
        is_over: Callable[[], bool],
        headers: Mapping[str, str],
    ) -> None:
        self._listeners = listeners
        self._owner = owner
        self._document = document
        self._is_over = is_over
        self._headers = [*HEADERS, *((name.encode(), value.encode("latin-1")) for name, value in headers.items())]

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        with self._listeners.place(self._owner):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_until_left, receive, tasks.cancel_scope)
                await self._tell(send)
                tasks.cancel_scope.cancel()

    async def _tell(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        sent, silent_s = b"", 0.0
        with anyio.CancelScope() as given_up:
            while True:
                over = self._is_over()
                data = orjson.dumps(self._document())
                frame = b""
                if data != sent:
                    frame = b"event: now\ndata: " + data + b"\n\n"
                elif silent_s >= SILENCE_S:
                    frame = b": still here\n\n"
                if frame:
                    given_up.deadline = anyio.current_time() + SEND_DEADLINE_S
                    await send({"type": "http.response.body", "body": frame, "more_body": True})
                    given_up.deadline = float("inf")
                    sent, silent_s = data, 0.0
                if over:
                    break
                await anyio.sleep(STEP_S)
                silent_s += STEP_S
        with anyio.move_on_after(LAST_S):
            await send({"type": "http.response.body", "body": b""})


async def _until_left(receive: Receive, scope: anyio.CancelScope) -> None:
    while True:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            scope.cancel()
            return
