"""File work outside the event loop: one thread writes, one reads. The loop reports to the store how each job ended.

    writes     after replies, one job at a time, as the store hands them out
    reads      for the turn that runs or waits, one job at a time, with several calls in flight; while nobody waits,
               ahead of a client that is expected to return

The store decides what is written and read. The loop never waits for a file. Tasks are cancelled only when the process
ends, so that the store learns how every job ended.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import anyio
import anyio.abc

from parkd.lane.cost import CostMeter
from parkd.lane.thread.engine_thread import EngineThread
from parkd.store.budget import mib
from parkd.store.files.disk_jobs import RemoveJob, mark, on_pool, read, remove, write
from parkd.store.files.fs import FileSystem
from parkd.store.flights import GivenUp, Promotion
from parkd.store.records import ConversationGone, ConversationId, Parked, RefusalReason
from parkd.store.store import ConversationStore
from parkd.types import CacheOutcome

log = logging.getLogger(__name__)

CALLS_IN_FLIGHT = 4
"""Calls of one job that run at once: enough to keep a drive busy while checksums are computed."""
IDLE_STEP_S = 30.0
"""How often the store is checked for work that becomes due with time: expired conversations, the end of a pause."""
ROOM_WAIT_S = 10.0
"""Longest wait of a promotion for room that writes under way will free."""
STOP_WAIT_S = 2.0
PROMOTION_LINE_S = 5.0
"""Time between two lines of the log about one conversation that is being read."""


@dataclass(eq=False)
class DiskRead:
    """How far a conversation is read from disk. Its calls end on several threads; any thread may look."""

    total_bytes: int
    began_s: float
    calls: int = 0
    ended: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def counted(
        self, calls: Sequence[Callable[[], None]], is_given_up: Callable[[], bool] = lambda: False
    ) -> list[Callable[[], None]]:
        """The same calls, each of which counts once it has ended, and raises GivenUp if the read is given up before."""
        self.calls += len(calls)
        return [lambda call=call: self._run(call, is_given_up) for call in calls]  # type: ignore[misc]

    def _run(self, call: Callable[[], None], is_given_up: Callable[[], bool]) -> None:
        if is_given_up():
            raise GivenUp
        call()
        with self._lock:
            self.ended += 1

    @property
    def read_bytes(self) -> int:
        """About: calls are of about equal size."""
        return self.total_bytes * self.ended // self.calls if self.calls else 0

    def left_s(self, now_s: float) -> float | None:
        """Expected seconds until it is read, at the speed so far; None before the first call has ended."""
        read_bytes, taken_s = self.read_bytes, now_s - self.began_s
        return (self.total_bytes - read_bytes) * taken_s / read_bytes if read_bytes else None


class DiskWorker:
    """The disk tier's threads. `serve` runs as long as the app does."""

    def __init__(
        self, store: ConversationStore, fs: FileSystem, costs: CostMeter, monotonic: Callable[[], float]
    ) -> None:
        self._store = store
        self._fs = fs
        self._costs = costs
        self._monotonic = monotonic
        self._writer = EngineThread("parkd-disk-write")
        self._reader = EngineThread("parkd-disk-read")
        self._pool = ThreadPoolExecutor(CALLS_IN_FLIGHT, "parkd-disk")
        self._run_all = on_pool(self._pool)
        self._wake = anyio.Event()
        self._progress = anyio.Event()
        self._reading = anyio.Lock()
        self._wanted: list[ConversationId] = []
        """What turns want to be read, or is read for them."""
        self.under_way: DiskRead | None = None
        """The read that runs now, of a conversation that is to be restored."""
        store.queue.on_work = self.wake

    async def serve(self) -> None:
        """Runs the store's jobs until cancelled."""
        self._writer.start()
        self._reader.start()
        while True:
            self._wake = anyio.Event()
            if not await self._work():
                await self.mark()
                with anyio.move_on_after(IDLE_STEP_S):
                    await self._wake.wait()

    def wake(self) -> None:
        """Called when there may be work."""
        self._wake.set()

    async def flush(self, deadline_s: float) -> bool:
        """Waits until everything is written. False if the deadline came first."""
        with anyio.move_on_after(deadline_s):
            while self._store.has_writes and not self._store.queue.is_paused:
                await self._step()
            return not self._store.has_writes
        log.warning("conversations that were not written to disk within %.0f s are not kept", deadline_s)
        return False

    async def mark(self, *, stops: bool = False) -> None:
        """Writes down when conversations were last used, for the next process."""
        job = self._store.next_marks(stops=stops)
        if job is not None:
            await self._writer.run(mark, self._fs, job)

    def stop(self) -> None:
        """Ends the threads. A call that hangs in the device does not keep the process from ending."""
        for thread in (self._writer, self._reader):
            thread.stop(STOP_WAIT_S)
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def room(self, wait_s: float) -> bool:
        """Waits for the next job to end, since that frees room. False if none is under way, or none ended in time."""
        if not self._store.frees_room:
            return False
        with anyio.move_on_after(wait_s):
            await self._step()
            return True
        return False

    async def promote(self, conversation_id: ConversationId, stop: int) -> Parked | None:
        """Reads the blocks of `[0, stop)` of a conversation into RAM. None if that failed."""
        self._wanted.append(conversation_id)
        try:
            async with self._reading:
                return await self._promote(conversation_id, stop)
        finally:
            self._wanted.remove(conversation_id)

    async def promote_ahead(self, conversation_id: ConversationId, stop: int) -> Parked | None:
        """The same for a conversation that nobody asked for yet, if it is worth its room. Given up as soon as a turn
        wants another one to be read. None if that was so, or it failed."""
        async with self._reading:
            return await self._promote(conversation_id, stop, is_ahead=True)

    async def _promote(self, conversation_id: ConversationId, stop: int, *, is_ahead: bool = False) -> Parked | None:
        began_s = self._monotonic()
        while not (is_ahead and self._wants_others(conversation_id)):
            try:
                promotion = self._store.promote(conversation_id, stop, is_ahead=is_ahead)
            except ConversationGone:
                return None
            if isinstance(promotion, Promotion):
                return await self._read(promotion, conversation_id)
            left_s = began_s + ROOM_WAIT_S - self._monotonic()
            may_wait = promotion.reason in (RefusalReason.BUDGET, RefusalReason.BUSY) and left_s > 0
            if not may_wait or not await self.room(left_s):
                log.info("a conversation was not read from disk: %s", promotion.message)
                return None
        return None

    def _wants_others(self, conversation_id: ConversationId) -> bool:
        return any(wanted != conversation_id for wanted in self._wanted)

    async def _read(self, promotion: Promotion, conversation_id: ConversationId) -> Parked | None:
        began_s = self._monotonic()
        error: Exception | None = None
        self.under_way = under_way = DiskRead(promotion.job.bytes, began_s)

        def is_given_up() -> bool:
            return promotion.is_ahead and self._wants_others(conversation_id)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._tell, under_way)
            try:
                await self._reader.run(
                    read, self._fs, promotion.job, lambda calls: self._run_all(under_way.counted(calls, is_given_up))
                )
            except GivenUp as given_up:
                error = given_up
            except Exception as raised:
                log.warning("a conversation on disk could not be read: %s", raised)
                error = raised
            tasks.cancel_scope.cancel()
        self.under_way = None
        parked = self._store.promoted(promotion, error)
        self._wake.set()  # Damaged files are to be removed.
        if parked is not None:
            self._costs.note_move(CacheOutcome.RESTORED_DISK, promotion.job.bytes, self._monotonic() - began_s)
        return parked

    async def _tell(self, under_way: DiskRead) -> None:
        """Says every few seconds how far a read is."""
        while True:
            await anyio.sleep(PROMOTION_LINE_S)
            left_s = under_way.left_s(self._monotonic())
            log.info(
                "reading a conversation from disk: %s of %s%s",
                mib(under_way.read_bytes),
                mib(under_way.total_bytes),
                "" if left_s is None else f", {left_s:.0f} s left",
            )

    async def _work(self) -> bool:
        """Runs the next job. False if there is none."""
        job = self._store.next_job()
        if job is None:
            return False
        error: Exception | None = None
        left: Sequence[str] = ()
        try:
            if isinstance(job, RemoveJob):
                left = await self._writer.run(remove, self._fs, job)
            else:
                await self._writer.run(write, self._fs, job, self._run_all)
        except Exception as raised:
            log.warning("a conversation could not be written to disk: %s", raised)
            error = raised
        self._store.finished(job, error, left)
        self._progress.set()
        self._progress = anyio.Event()
        return True

    async def _step(self) -> None:
        self._wake.set()
        await self._progress.wait()
