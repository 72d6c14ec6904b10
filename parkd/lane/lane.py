"""The serial executor of turns: they wait in a bounded queue and run one at a time, in the order of arrival."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

import anyio

from parkd.errors import EngineLost, ParkdError, QueueFull, ShuttingDown

log = logging.getLogger(__name__)

LONGEST_RETRY_AFTER_S = 120
TURN_WEIGHT = 0.2
"""Weight of the newest turn in the running mean of turn lengths."""


class Waiting(Protocol):
    """The interface of turns that the lane uses."""

    def fail(self, error: ParkdError) -> None:
        """Called if the turn fails, or will never run."""

    def stop(self) -> None:
        """Called to end the running turn at its next chunk or token."""


W = TypeVar("W", bound=Waiting)


class Lane(Generic[W]):
    """Calls `run` for one turn at a time, with at most `max_queue` turns waiting. Lives on the event loop."""

    def __init__(
        self,
        run: Callable[[W], Awaitable[None]],
        *,
        max_queue: int,
        monotonic: Callable[[], float],
        on_queued: Callable[[W], None] = lambda _turn: None,
        owners: int = 1,
        owner_of: Callable[[W], str] = lambda _turn: "",
    ) -> None:
        """`on_queued` is called for each turn that has to wait for another one. If there are several `owners`, one of
        them has at most half of the places."""
        self._run = run
        self._on_queued = on_queued
        self._max_queue = max_queue
        self._share = max_queue if owners <= 1 else max(1, max_queue // 2)
        self._owner_of = owner_of
        self._monotonic = monotonic
        self._waiting: deque[W] = deque()
        self._running: W | None = None
        self._arrived = anyio.Event()
        self._ended = anyio.Event()
        """Set when the running turn ends."""
        self._closed_by: ParkdError | None = None
        self._turn_s = 1.0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def queue(self) -> tuple[W, ...]:
        """The waiting turns, the next one first."""
        return tuple(self._waiting)

    @property
    def busy(self) -> bool:
        return self._running is not None

    @property
    def running(self) -> W | None:
        return self._running

    @property
    def closed(self) -> bool:
        return self._closed_by is not None

    def check_room(self, owner: str = "") -> None:
        """Raises QueueFull if no turn of the owner may be queued, or the error with which the lane was closed:
        ShuttingDown, EngineLost."""
        if self._closed_by is not None:
            raise self._closed_by
        if len(self._waiting) >= self._max_queue:
            raise QueueFull(
                f"{len(self._waiting)} requests are waiting, which is the limit of --max-queue. Try again later.",
                retry_after_s=self.retry_after_s(),
            )
        own = sum(self._owner_of(turn) == owner for turn in self._waiting)
        if own >= self._share:
            raise QueueFull(
                f"{own} requests of this key are waiting, and one key has at most half of --max-queue "
                f"({self._max_queue}). Try again later.",
                retry_after_s=self.retry_after_s(),
            )

    def submit(self, turn: W) -> None:
        """Queues `turn`. Raises as `check_room` does."""
        self.check_room(self._owner_of(turn))
        self._waiting.append(turn)
        self._arrived.set()
        if self._running is not None or len(self._waiting) > 1:
            self._on_queued(turn)

    def is_waiting(self, turn: W) -> bool:
        return turn in self._waiting

    def leave(self, turn: W) -> bool:
        """Removes `turn` from the queue, or stops it if it runs. True if it had not run yet."""
        if turn in self._waiting:
            self._waiting.remove(turn)
            return True
        if turn is self._running:
            turn.stop()
        return False

    async def serve(self) -> None:
        """Runs turns until the task is cancelled. Raises EngineLost after all waiting turns have failed with it."""
        while True:
            while not self._waiting:
                self._arrived = anyio.Event()
                await self._arrived.wait()
            turn = self._waiting.popleft()
            self._running, self._ended = turn, anyio.Event()
            began_s = self._monotonic()
            try:
                await self._run(turn)
            except EngineLost as lost:
                self.close(lost)
                raise
            except Exception as error:
                stopped = EngineLost("The server met an error from which it cannot recover; it stops.")
                turn.fail(stopped)
                self.close(stopped)
                raise stopped from error
            finally:
                self._running = None
                self._ended.set()
            self._turn_s += TURN_WEIGHT * (self._monotonic() - began_s - self._turn_s)

    def close(self, error: ParkdError) -> None:
        """Prevents turns from starting: waiting turns fail with `error`, and `submit` raises it from now on."""
        self._closed_by = self._closed_by or error
        waiting = list(self._waiting)
        self._waiting.clear()
        for turn in waiting:
            turn.fail(error)

    async def drain(self, deadline_s: float) -> bool:
        """Closes the lane and waits for the running turn. Stops the turn after `deadline_s`. True if it ended without
        that."""
        self.close(ShuttingDown("The server is stopping. Try again when it is back.", retry_after_s=5))
        with anyio.move_on_after(deadline_s):
            await self.idle()
        running = self._running
        if running is None:
            return True
        log.warning("the running answer did not end within %.0f s and is cut", deadline_s)
        running.fail(ShuttingDown("The server is stopping; the answer was cut.", retry_after_s=5))
        running.stop()
        return False

    async def idle(self) -> None:
        """Waits until no turn runs. Only useful once the lane is closed."""
        while self._running is not None:
            await self._ended.wait()

    def retry_after_s(self) -> int:
        """Estimated seconds until a place in the queue is free: the mean duration of recent turns."""
        return min(LONGEST_RETRY_AFTER_S, max(1, math.ceil(self._turn_s)))
