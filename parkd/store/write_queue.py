"""Conversations on their way to disk: which are worth writing, in what order, and what changes after each write.

    commit -> offered -> waiting (leased in RAM) -> one write at a time -> on disk, its ancestors there forgotten

Waiting conversations are leased, so that they are not evicted before they are written. After a failure writing pauses,
longer each time. After the second failure in a row nothing waits any more, so that a broken disk holds no memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from parkd.state import StateLayout
from parkd.store.disk import DiskTier
from parkd.store.disk_jobs import RemoveJob, WriteJob, leftovers
from parkd.store.disk_layout import write_job
from parkd.store.disk_policy import WriteAllowance, worth_writing
from parkd.store.disk_records import DiskEntry, index_bytes_of, job_bytes, manifest_limit_bytes
from parkd.store.manifest import ExtentRef
from parkd.store.records import BlockId, ConversationId, Parked, Tier
from parkd.store.shelf import Entry, Shelf

QUEUE_SHARE = 2
"""Waiting conversations hold at most one part in this many of the memory budget. One that waits alone may hold more:
otherwise larger conversations would never reach the disk, which matters most where memory holds only one or two."""
FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 600.0
"""Pause after a failed write; doubled with each further failure in a row."""
FAILURES_BORNE = 1
"""Failures in a row after which conversations may still wait."""


@dataclass(frozen=True)
class DiskSources:
    """What the disk tier gets from outside."""

    wall: Callable[[], float]
    """Seconds since the epoch."""
    new_extent: Callable[[], int]
    """Returns a 64-bit number that no process has used in the directory."""
    first_block: BlockId
    """Block ids count up from here; none of them was ever used in the directory."""


@dataclass(eq=False)
class _Waiting:
    """A conversation to be written."""

    entry: Entry
    bytes: int
    release: Callable[[], None]
    adopted: ExtentRef | None = None
    """Its file, if the engine has written it already; it is charged."""


@dataclass(eq=False)
class _Writing:
    waiting: _Waiting
    job: WriteJob
    reused: tuple[ExtentRef, ...]
    is_dropped: bool = False


class WriteQueue:
    """The way from RAM to disk. `on_work` is called when there may be a new job."""

    def __init__(
        self,
        shelf: Shelf,
        disk: DiskTier,
        layout: StateLayout,
        clock: Callable[[], float],
        sources: DiskSources,
        allowance: WriteAllowance,
        limit_bytes: int,
    ) -> None:
        self.on_work: Callable[[], None] = lambda: None
        self.on_lost: Callable[[ConversationId], None] = lambda _id: None
        """Called with a conversation whose adopted file could not be kept."""
        self.writes = self.written_bytes = self.failures = self.not_written = 0
        self.allowance = allowance
        self._shelf = shelf
        self._disk = disk
        self._layout = layout
        self._clock = clock
        self._sources = sources
        self._limit_bytes = limit_bytes
        self._waiting: dict[ConversationId, _Waiting] = {}
        self._writing: _Writing | None = None
        self._failed_in_a_row = 0
        self._paused_until_s = float("-inf")

    def __len__(self) -> int:
        return len(self._waiting) + (self._writing is not None)

    @property
    def waiting(self) -> tuple[ConversationId, ...]:
        """Conversations whose write has not begun, in its order."""
        return tuple(self._waiting)

    @property
    def is_paused(self) -> bool:
        """True for a while after a failed write."""
        return self._clock() < self._paused_until_s

    def offer(self, entry: Entry) -> None:
        """Queues a conversation in RAM if it is worth a write."""
        parked, allowance = entry.parked, self.allowance
        size = self._missing_bytes(parked)
        allowance.refill(self._clock())
        returned = entry.history.turns > 1 or any(block_id in self._disk.blocks for block_id in parked.blocks)
        worth = worth_writing(size, allowance.left_bytes, allowance.share, has_returned=returned)
        queued = sum(waiting.bytes for waiting in self._waiting.values())
        is_broken = self._failed_in_a_row > FAILURES_BORNE and self.is_paused
        is_full = len(self) > 0 and queued + size > self._limit_bytes
        if not worth or is_broken or is_full:
            self.not_written += 1
            return
        self._waiting[parked.id] = _Waiting(entry, size, self._shelf.lease(entry, self._clock()))
        self.on_work()

    def new_extent(self, size: int) -> ExtentRef:
        """Names a new file of that size."""
        return ExtentRef(self._sources.new_extent(), size)

    def adopt(self, entry: Entry, ref: ExtentRef) -> None:
        """Queues a conversation whose file is already written and charged, so that it gets its manifest."""
        self._waiting[entry.parked.id] = _Waiting(entry, 0, self._shelf.lease(entry, self._clock()), ref)
        self.allowance.spend(ref.taken_bytes)
        self.on_work()

    def cancel(self, conversation_id: ConversationId) -> None:
        """Takes a conversation out of the queue. If it is being written, it is forgotten after the write."""
        waiting = self._waiting.pop(conversation_id, None)
        if waiting is not None:
            self._give_up(waiting)
        if self._writing is not None and self._writing.job.manifest.id == conversation_id:
            self._writing.is_dropped = True

    def cancel_superseded(self) -> None:
        """Takes superseded conversations out of the queue. One that is being written is still written."""
        for conversation_id, waiting in list(self._waiting.items()):
            if not waiting.entry.is_published:
                self._give_up(self._waiting.pop(conversation_id))

    def next_job(self) -> WriteJob | RemoveJob | None:
        """The next job; None in a pause, or while a job is under way that must end first."""
        removal = self._disk.next_removal_job()
        if removal is not None:
            return removal
        if self._writing is not None or self._disk.is_removing or self.is_paused:
            return None
        while self._waiting:
            conversation_id = next(iter(self._waiting))
            writing = self._start(self._waiting[conversation_id])
            if writing is None:
                self.cancel(conversation_id)
                self.not_written += 1
                continue
            size = job_bytes(writing.job)
            if not self._disk.has_room(size):
                self._disk.let_go(writing.reused)
                return self._disk.next_removal_job()
            del self._waiting[conversation_id]
            self.allowance.spend(size)
            self._disk.charge(size)
            self._writing = writing
            return writing.job
        return None

    def finished(self, job: WriteJob, error: Exception | None) -> None:
        """Ends a write job."""
        writing, self._writing = self._writing, None
        assert writing is not None
        assert writing.job is job
        if error is None:
            self._written(writing)
        else:
            self._failed(job)
        self._disk.let_go(writing.reused)
        writing.waiting.release()
        if error is not None and job.is_adopted:
            self.on_lost(job.manifest.id)

    def _start(self, waiting: _Waiting) -> _Writing | None:
        """The job that writes a conversation, with its reused extents held and others condemned to make room; None if
        there is no room."""
        parked = waiting.entry.parked
        shift = self._sources.wall() - self._clock()
        number = self._sources.new_extent() if waiting.adopted is None else waiting.adopted.id
        job, reused = write_job(self._shelf, self._disk, self._layout, parked, number, shift, waiting.adopted)
        superseded = {entry.manifest.id for entry in self._superseded(parked)}
        self._disk.hold(reused)
        if not self._disk.make_room(job_bytes(job), index_bytes_of(job.manifest), parked.last_used_s, superseded):
            self._disk.let_go(reused)
            return None
        return _Writing(waiting, job, reused)

    def _written(self, writing: _Writing) -> None:
        job, entry = writing.job, writing.waiting.entry
        self._failed_in_a_row = 0
        self.writes += 1
        self.written_bytes += job_bytes(job)
        parked = replace(entry.parked, tier=Tier.DISK)
        on_disk = self._disk.add(job.manifest, parked, manifest_limit_bytes(job.manifest))
        if writing.is_dropped:
            self._disk.forget(on_disk)
            return
        on_disk.is_pinned = entry.is_pinned
        for checkpoint, place in zip(parked.checkpoints, job.manifest.checkpoints, strict=True):
            self._disk.know_checkpoint(checkpoint.id, place)
        for ancestor in self._superseded(parked):
            on_disk.is_pinned |= ancestor.is_pinned
            self._disk.forget(ancestor)

    def _failed(self, job: WriteJob) -> None:
        self.failures += 1
        self._disk.write_failed(job, leftovers(job))
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**self._failed_in_a_row)
        self._paused_until_s = self._clock() + pause_s
        self._failed_in_a_row += 1
        if self._failed_in_a_row > FAILURES_BORNE:
            self.not_written += len(self._waiting)
            for conversation_id in list(self._waiting):
                self.cancel(conversation_id)

    def _give_up(self, waiting: _Waiting) -> None:
        """Releases a conversation that will not be written, and condemns its file, if it has one."""
        waiting.release()
        if waiting.adopted is not None:
            self._disk.condemn((waiting.adopted.name,), waiting.adopted.taken_bytes)
            self.on_lost(waiting.entry.parked.id)

    def _superseded(self, parked: Parked) -> list[DiskEntry]:
        """Conversations on disk that this one makes superfluous."""
        places = {checkpoint.position for checkpoint in parked.checkpoints}
        return [
            entry
            for entry in self._disk.prefixes_of(parked)
            if entry.parked.position <= parked.position
            and np.array_equal(entry.parked.units, parked.units[: entry.parked.position])
            and places.issuperset(c.position for c in entry.parked.checkpoints)
        ]

    def _missing_bytes(self, parked: Parked) -> int:
        """Bytes of the conversation that are not on disk yet."""
        blocks = [block_id for block_id in parked.blocks if block_id not in self._disk.blocks]
        checkpoints = [c.id for c in parked.checkpoints if c.id not in self._disk.checkpoints]
        return self._shelf.blocks.bytes_of(blocks) + sum(map(self._shelf.checkpoints.bytes_of, checkpoints))
