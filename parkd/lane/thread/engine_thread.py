"""The engine's own thread: every engine call runs here, one at a time, while the event loop goes on.

run     a short call: between two parts of what is under way
work    the reading of a prompt or the writing of an answer, in parts; those of several turns take turns (`rounds`)
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from parkd.engine_adapter.base import Seat
from parkd.errors import EngineFailure
from parkd.lane.thread.rounds import READ_SHARE, Spent, next_prompt, reads_next
from parkd.lane.thread.work import NextChunk, NextStep, Work

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class _Caller:
    """Who waits for a result."""

    future: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop

    def settle(self, outcome: object, error: BaseException | None) -> bool:
        """False if nobody can wait for anything any more."""
        try:
            self.loop.call_soon_threadsafe(_settle, self.future, outcome, error)
        except RuntimeError:  # the loop has closed
            return False
        return True


@dataclass(slots=True, eq=False)
class _UnderWay:
    """Work between two of its parts."""

    work: Work[Any]
    caller: _Caller
    next: NextStep | NextChunk


Job = tuple[Callable[[], Any] | Work[Any], _Caller]


class EngineThread:
    """Runs functions one after the other. An exception is raised in the caller; the thread continues.

    The thread is a daemon: a native call that never returns must not keep the process from ending. It needs no bound
    on its queue, because its only caller, the lane, awaits each call, and has one under way for each turn.
    """

    def __init__(
        self,
        name: str = "parkd-engine",
        *,
        step_ahead: Callable[[Sequence[Seat]], None] = lambda _seats: None,
        read_share: float = READ_SHARE,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`step_ahead` is called before answers of several seats make a step; see `Engine.step_ahead`. `read_share` is
        the share of the time that prompts have where answers are under way too."""
        self._step_ahead = step_ahead
        self._read_share = read_share
        self._monotonic = monotonic
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._under_way: list[_UnderWay] = []
        """In the order in which they began; only used on the thread."""
        self._spent = Spent()
        self._chunks = 0
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Ends the thread after the queued calls. False if it is still busy after `timeout_s`."""
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls `function` on the thread. Returns what it returns and raises what it raises."""
        result: T = await self._put(lambda: function(*args, **kwargs))
        return result

    async def work(self, work: Work[T]) -> T:
        """Does `work` on the thread, with others between its parts. Returns what it returns and raises what it
        raises."""
        result: T = await self._put(work)
        return result

    @property
    def is_shared(self) -> bool:
        """Whether others wait for the thread, or work on it: only asked by what is under way there."""
        return len(self._under_way) > 1 or not self._jobs.empty()

    async def _put(self, job: Callable[[], Any] | Work[Any]) -> Any:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._jobs.put((job, _Caller(future, loop)))
        return await future

    def _serve(self) -> None:
        while self._take_jobs():
            if self._under_way and not self._round():
                return

    def _take_jobs(self) -> bool:
        """Begins what is queued; waits for it if nothing is under way. False if the thread is to end."""
        while not self._under_way or not self._jobs.empty():
            job = self._jobs.get()
            if job is None:
                if not self._under_way:
                    return False
                self._jobs.put(None)  # what is under way ends first
                return True
            work, caller = job
            is_open = self._call(work, caller) if callable(work) else self._part(work, caller)
            if not is_open:
                return False
            del job, work, caller  # nor in this one, which waits
        return True

    def _call(self, function: Callable[[], Any], caller: _Caller) -> bool:
        try:
            outcome, error = function(), None
        except BaseException as raised:  # the caller decides what it means; this thread must live on
            outcome, error = None, raised
        is_open = caller.settle(outcome, error)
        del function, outcome, error  # a snapshot's buffers must not live on in this frame
        return is_open

    def _part(self, work: Work[Any], caller: _Caller) -> bool:
        """Does the next part of `work`, which is then under way unless it ended."""
        try:
            following = next(work)
        except StopIteration as end:
            return caller.settle(end.value, None)
        except BaseException as raised:
            return caller.settle(None, raised)
        self._under_way.append(_UnderWay(work, caller, following))
        return True

    def _round(self) -> bool:
        """Makes a step of all answers under way, or reads a chunk of one prompt. False if nobody waits any more."""
        steps = [each for each in self._under_way if isinstance(each.next, NextStep)]
        chunks = [each for each in self._under_way if isinstance(each.next, NextChunk)]
        if not steps or not chunks:
            self._spent = Spent()
        reads = not steps or (bool(chunks) and reads_next(self._spent, self._read_share))
        began_s = self._monotonic()
        if reads:
            left = [each.next.left_tokens for each in chunks if isinstance(each.next, NextChunk)]
            chosen = [chunks[next_prompt(left, self._chunks)]]
            self._chunks += 1
        else:
            chosen = steps
            if len(steps) > 1:
                self._ahead([each.next.seat for each in steps if isinstance(each.next, NextStep)])
        for each in chosen:
            if not self._go_on(each):
                return False
        took_s = self._monotonic() - began_s
        spent = self._spent
        self._spent = Spent(spent.reading_s + took_s * reads, spent.stepping_s + took_s * (not reads))
        return True

    def _ahead(self, seats: Sequence[Seat]) -> None:
        try:
            self._step_ahead(seats)
        except EngineFailure:  # each seat makes its step alone, and whose it is gets the error
            return
        except Exception:
            log.exception("a step of several answers failed unexpectedly; each is made alone")

    def _go_on(self, under_way: _UnderWay) -> bool:
        """Does the next part of what is under way, which keeps its place unless it ended."""
        try:
            under_way.next = next(under_way.work)
        except StopIteration as end:
            outcome, error = end.value, None
        except BaseException as raised:
            outcome, error = None, raised
        else:
            return True
        self._under_way.remove(under_way)
        return under_way.caller.settle(outcome, error)


def _settle(future: asyncio.Future[Any], outcome: object, error: BaseException | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(outcome)
    elif isinstance(error, StopIteration):  # a future cannot carry one
        future.set_exception(RuntimeError("StopIteration on the engine's thread"))
    else:
        future.set_exception(error)
