"""The executor of turns: they wait in a bounded queue, and run in the order that a schedule gives, as many at once as
the lane is wide.

    submit -> waiting -> running -> ended
                          |  ^
                          v  |
                         paused      the turn's state is safe, and another runs

A turn's `run` lasts from its first slice to its end. In between it calls `pause`, which returns when it may go on.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import anyio
import anyio.abc

from parkd.errors import Cancelled, EngineLost, ParkdError, QueueFull, ShuttingDown
from parkd.lane.schedule import NO_WORK, Accounts, Fifo, Job, Schedule, Work

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

    def ask_to_pause(self) -> None:
        """Called to let the running turn give way at its next chunk or token, if it can."""


W = TypeVar("W", bound=Waiting)


@dataclass(eq=False)
class _Place(Generic[W]):
    """A turn in the lane."""

    turn: W
    number: int
    ran_s: float = 0.0
    is_asked: bool = False
    """Whether it was asked to give way in its present slice."""
    may_run: anyio.Event = field(default_factory=anyio.Event)
    """Set when a paused turn runs again, or never will."""
    error: ParkdError | None = None
    """Why a paused turn does not run again."""


class Lane(Generic[W]):
    """Calls `run` for each turn, of which at most `width` at a time are not paused; at most `max_queue` turns wait.
    Lives on the event loop."""

    def __init__(
        self,
        run: Callable[[W], Awaitable[None]],
        *,
        max_queue: int,
        monotonic: Callable[[], float],
        on_queued: Callable[[W], None] = lambda _turn: None,
        on_slice: Callable[[], None] = lambda: None,
        on_idle: Callable[[], None] = lambda: None,
        owners: int = 1,
        owner_of: Callable[[W], str] = lambda _turn: "",
        schedule: Schedule | None = None,
        work_of: Callable[[W], Work] = lambda _turn: NO_WORK,
        width: int = 1,
        may_join: Callable[[W, Sequence[W]], bool] = lambda _turn, _beside: True,
        awaits: Callable[[W, Sequence[W]], bool] = lambda _turn, _begun: False,
        passes_over: bool = True,
        can_pause: bool = True,
    ) -> None:
        """`on_queued` is called for each turn that has to wait for another one, `on_slice` when a turn begins to run or
        goes on, `on_idle` when a turn has ended and no other is there. If there are several `owners`, one of them has
        at most half of the places. `work_of` says what a turn needs from now on, for the schedule. `may_join` says
        whether a turn can run beside those that do; if the next one cannot, no other goes before it. `awaits` says
        whether a turn had better begin later, since one of those that have begun computes what it would; it is asked
        again at `look_again`. `passes_over`: others go before it meanwhile. `can_pause`: running turns may be
        asked to give way."""
        self.width = width
        self._can_pause = can_pause
        self._may_join = may_join
        self._awaits = awaits
        self._passes_over = passes_over
        self.schedule = schedule or Fifo()
        self._work_of = work_of
        self._accounts = Accounts()
        self._run = run
        self._on_queued = on_queued
        self._on_slice = on_slice
        self._on_idle = on_idle
        self._max_queue = max_queue
        self._share = max_queue if owners <= 1 else max(1, max_queue // 2)
        self._owner_of = owner_of
        self._monotonic = monotonic
        self._waiting: deque[_Place[W]] = deque()
        self._paused: list[_Place[W]] = []
        self._running: list[_Place[W]] = []
        """In the order in which their slices began."""
        self._number = 0
        self._changed = anyio.Event()
        """Set when another turn might run."""
        self._ended = anyio.Event()
        """Set when a slice ends, or a paused turn, and then a new one."""
        self._alarm: asyncio.TimerHandle | None = None
        """When a running turn is asked to give way."""
        self._closed_by: ParkdError | None = None
        self._lost: EngineLost | None = None
        self._turn_s = 1.0

    @property
    def waiting(self) -> int:
        """Turns that have not begun."""
        return len(self._waiting)

    @property
    def queue(self) -> tuple[W, ...]:
        """The waiting turns, in the order of their arrival."""
        return tuple(place.turn for place in self._waiting)

    @property
    def paused(self) -> int:
        """Turns that have begun, and will go on."""
        return len(self._paused)

    @property
    def paused_turns(self) -> tuple[W, ...]:
        return tuple(place.turn for place in self._paused)

    @property
    def busy(self) -> bool:
        return bool(self._running or self._paused)

    @property
    def is_idle(self) -> bool:
        """Nobody runs, waits or is paused."""
        return not (self.busy or self._waiting)

    @property
    def running(self) -> W | None:
        """Of the turns that run, the one whose slice began first; None: no turn runs."""
        return self._running[0].turn if self._running else None

    @property
    def running_turns(self) -> tuple[W, ...]:
        return tuple(place.turn for place in self._running)

    def holds_up(self, turn: W) -> bool:
        """Whether the turn runs while another one that is there cannot."""
        others = self._waiting or self._paused
        return bool(others) and turn in self.running_turns and self._startable() is None

    @property
    def closed(self) -> bool:
        return self._closed_by is not None

    def check_room(self, owner: str = "") -> None:
        """Raises QueueFull if no turn of the owner may be queued, or the error with which the lane was closed:
        ShuttingDown, EngineLost."""
        if self._closed_by is not None:
            raise self._closed_by
        places = len(self._waiting) + len(self._paused)
        if places >= self._max_queue:
            raise QueueFull(
                f"{places} requests are waiting, which is the limit of --max-queue. Try again later.",
                retry_after_s=self.retry_after_s(),
            )
        own = sum(self._owner_of(place.turn) == owner for place in (*self._waiting, *self._paused))
        if own >= self._share:
            raise QueueFull(
                f"{own} requests of this key are waiting, and one key has at most half of --max-queue "
                f"({self._max_queue}). Try again later.",
                retry_after_s=self.retry_after_s(),
            )

    def submit(self, turn: W) -> None:
        """Queues `turn`. Raises as `check_room` does."""
        self.check_room(self._owner_of(turn))
        self._number += 1
        self._waiting.append(_Place(turn, self._number))
        self._accounts.arrive(self._number, self._owner_of(turn), self._monotonic())
        self._changed.set()
        is_first = not self._paused and len(self._waiting) == 1
        if not is_first or self._startable() is None:
            self._on_queued(turn)
        self._look_ahead()

    def is_waiting(self, turn: W) -> bool:
        return any(place.turn is turn for place in self._waiting)

    def leave(self, turn: W) -> bool:
        """Removes `turn` from the queue, or stops it if it runs or is paused. True if it had not run yet."""
        for place in self._waiting:
            if place.turn is turn:
                self._waiting.remove(place)
                self._accounts.leave(place.number)
                self._changed.set()  # it may have been next, and unable to run
                self._look_ahead()
                return True
        if turn in self.running_turns:
            turn.stop()
        for place in [place for place in self._paused if place.turn is turn]:
            turn.stop()
            self._end_paused(place, Cancelled("The client left while its answer was paused."))
        return False

    async def serve(self) -> None:
        """Runs turns until the task is cancelled. Raises EngineLost after all waiting and paused turns have failed with
        it."""
        async with anyio.create_task_group() as tasks:
            while (lost := self._lost) is None:
                self._changed = anyio.Event()
                place = self._startable()
                if place is None:
                    await self._changed.wait()
                elif place in self._paused:
                    self._paused.remove(place)
                    self._begin_slice(place)
                    place.may_run.set()
                else:
                    self._waiting.remove(place)
                    self._begin_slice(place)
                    tasks.start_soon(self._live, place)
        assert lost is not None
        raise lost

    async def pause(self, turn: W) -> None:
        """Called by a running turn when its state is safe: lets others run, and returns when the turn is to go on.

        Raises the error with which it ends instead: Cancelled, ShuttingDown, EngineLost. Others may run then.
        """
        place = self._place_of(turn)
        assert place is not None, "only a running turn can be paused"
        place.may_run = anyio.Event()
        self._count(place)
        self._accounts.rest(place.number, self._monotonic())
        self._paused.append(place)
        self._end_slice(place)
        try:
            await place.may_run.wait()
        except BaseException:  # the server ends
            if place in self._paused:
                self._paused.remove(place)
            raise
        if place.error is not None:
            raise place.error

    def is_to_pause(self, turn: W) -> bool:
        """Whether there still is another turn for which this one, which runs, is to give way."""
        running = self._place_of(turn)
        return running is not None and self._startable() is None and self._is_over(running)

    def look_again(self) -> None:
        """Called when a running turn has computed something that others may await."""
        if self._waiting:
            self._changed.set()
            self._look_ahead()

    def keep_running(self, turn: W) -> None:
        """Called by a running turn if it was asked to pause and does not: it goes on for another slice."""
        place = self._place_of(turn)
        if place is not None:
            self._count(place)
            self._accounts.run(place.number, self._monotonic())
            place.is_asked = False
            self._look_ahead()

    def close(self, error: ParkdError) -> None:
        """Prevents turns from starting: waiting turns fail with `error`, and `submit` raises it from now on."""
        self._closed_by = self._closed_by or error
        waiting = list(self._waiting)
        self._waiting.clear()
        for place in waiting:
            self._accounts.leave(place.number)
            place.turn.fail(error)

    async def drain(self, deadline_s: float) -> bool:
        """Closes the lane and waits for the turns that have begun. Stops them after `deadline_s`. True if they ended
        without that."""
        self.close(ShuttingDown("The server is stopping. Try again when it is back.", retry_after_s=5))
        with anyio.move_on_after(deadline_s):
            await self.idle()
        if not self.busy:
            return True
        running = self.running_turns
        log.warning("%d answers did not end within %.0f s and are cut", len(running) + len(self._paused), deadline_s)
        cut = ShuttingDown("The server is stopping; the answer was cut.", retry_after_s=5)
        for place in list(self._paused):
            self._end_paused(place, cut)
        for turn in running:
            turn.fail(cut)
            turn.stop()
        return False

    async def idle(self) -> None:
        """Waits until no turn runs or is paused. Only useful once the lane is closed."""
        while self.busy:
            await self._ended.wait()

    def retry_after_s(self) -> int:
        """Estimated seconds until a place in the queue is free: the mean duration of recent turns, by how many run at
        once."""
        return min(LONGEST_RETRY_AFTER_S, max(1, math.ceil(self._turn_s / self.width)))

    # -- slices --

    async def _live(self, place: _Place[W]) -> None:
        """Runs a turn, from its first slice to its end."""
        try:
            await self._run(place.turn)
        except EngineLost as lost:
            self._lose(lost)
        except Exception as error:
            stopped = EngineLost("The server met an error from which it cannot recover; it stops.")
            stopped.__cause__ = error
            place.turn.fail(stopped)
            self._lose(stopped)
        finally:
            is_running = place in self._running
            if is_running:
                self._count(place)
            self._accounts.leave(place.number)
            if is_running:
                self._end_slice(place)
                if self.is_idle:
                    self._on_idle()
                self._turn_s += TURN_WEIGHT * (place.ran_s - self._turn_s)

    def _lose(self, lost: EngineLost) -> None:
        if self._lost is None:
            self._lost = lost
            self.close(lost)
            for place in list(self._paused):
                self._end_paused(place, lost)
            for turn in self.running_turns:
                turn.fail(lost)
                turn.stop()
            self._changed.set()

    def _place_of(self, turn: W) -> _Place[W] | None:
        """Of a running turn; None: it does not run."""
        return next((place for place in self._running if place.turn is turn), None)

    def _startable(self) -> _Place[W] | None:
        """Who begins or goes on now; None: nobody, or not yet."""
        if len(self._running) >= self.width or not (self._paused or self._waiting):
            return None
        able = self._able()
        places = {place.number: place for place in (able if self._passes_over else self._others())}
        if not places:
            return None
        now_s = self._monotonic()
        place = places[self.schedule.next([self._job(place, now_s) for place in places.values()], now_s).number]
        if place not in able:
            return None
        return place if not self._running or self._may_join(place.turn, self.running_turns) else None

    def _others(self) -> Sequence[_Place[W]]:
        """Who does not run."""
        return [*self._paused, *self._waiting]

    def _able(self) -> Sequence[_Place[W]]:
        """Who does not run, and awaits nothing of those that have begun."""
        begun = (*self.running_turns, *self.paused_turns)
        return [*self._paused, *(place for place in self._waiting if not self._awaits(place.turn, begun))]

    def _job(self, place: _Place[W], now_s: float) -> Job:
        """At one moment for all that are compared, since what their key used fades."""
        return self._accounts.job(place.number, self._work_of(place.turn), now_s)

    def _begin_slice(self, place: _Place[W]) -> None:
        self._running.append(place)
        place.is_asked = False
        self._accounts.run(place.number, self._monotonic())
        self._on_slice()
        self._look_ahead()

    def _count(self, place: _Place[W]) -> None:
        place.ran_s += self._accounts.count(place.number, self._monotonic())

    def _end_slice(self, place: _Place[W]) -> None:
        self._running.remove(place)
        self._look_ahead()
        self._changed.set()
        self._note_ended()

    def _end_paused(self, place: _Place[W], error: ParkdError) -> None:
        """Lets a paused turn end with `error`."""
        self._paused.remove(place)
        place.error = error
        place.may_run.set()
        self._changed.set()
        self._note_ended()
        self._look_ahead()

    def _note_ended(self) -> None:
        ended, self._ended = self._ended, anyio.Event()
        ended.set()

    def _look_ahead(self) -> None:
        """Called when others come or go: sets when running turns are asked to give way to them. No more are asked than
        there are others, those first that the schedule would let run last."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if not self._can_pause:
            return  # whether somebody gives way where nobody waits is the schedule's to say
        if self._startable() is not None:
            return  # somebody begins now, and this is called again
        able = self._able()
        over, waits_s = list[_Place[W]](), list[float]()
        now_s, others = self._jobs_of(able)
        for place in self._running:
            until_s = None if place.is_asked else self._until_s(place, others, now_s)
            left_s = math.inf if until_s is None else until_s - now_s
            if left_s <= 0:
                over.append(place)
            else:
                waits_s.append(left_s)
        asked = sum(place.is_asked for place in self._running)
        most = max(1, len(able)) - asked
        for place in self._last_first(over)[: max(0, most)]:
            place.is_asked = True
            place.turn.ask_to_pause()
        left_s = min(waits_s, default=math.inf)
        if left_s < math.inf:
            self._alarm = asyncio.get_running_loop().call_later(left_s, self._look_ahead)

    def _last_first(self, places: Sequence[_Place[W]]) -> list[_Place[W]]:
        """The places, the one first that the schedule would let run last."""
        order, now_s = list[_Place[W]](), self._monotonic()
        jobs = {place: self._job(place, now_s) for place in places}
        while jobs:
            number = self.schedule.next(list(jobs.values()), now_s).number
            order.append(next(place for place in jobs if place.number == number))
            del jobs[order[-1]]
        return order[::-1]

    def _jobs_of(self, able: Sequence[_Place[W]]) -> tuple[float, list[Job]]:
        """The time, and those that are `able` to run then. What runs is counted up to then."""
        now_s = self._monotonic()
        for place in self._running:
            self._count(place)
        return now_s, [self._job(place, now_s) for place in able]

    def _until_s(self, running: _Place[W], others: Sequence[Job], now_s: float) -> float | None:
        """As the schedule says, if it gives way to these others."""
        return self.schedule.until_s(self._job(running, now_s), others, now_s)

    def _is_over(self, running: _Place[W]) -> bool:
        now_s, others = self._jobs_of(self._able())
        until_s = self._until_s(running, others, now_s)
        return until_s is not None and until_s <= now_s
