"""Conversations on their way to disk: which are worth writing, in what order, and what changes after each write.

    commit -> offered -> waiting (leased in RAM) -> one write at a time -> on disk, its ancestors there forgotten

Waiting conversations are leased, so that they are not evicted before they are written. After a failure writing pauses,
longer each time. After the second failure in a row nothing waits any more, so that a broken disk holds no memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from parkd.store.budget import mib
from parkd.store.conversations import Conversation, Conversations, InRam, superseded
from parkd.store.disk import Disk, index_bytes_of, job_bytes, manifest_limit_bytes
from parkd.store.disk_policy import WritePause, worth_writing
from parkd.store.files.disk_jobs import RemoveJob, WriteJob, leftovers
from parkd.store.files.disk_layout import write_job
from parkd.store.files.manifest import ExtentRef
from parkd.store.records import ConversationId, RefusalReason, Refused

QUEUE_SHARE = 2
"""Waiting conversations hold at most one part in this many of the memory budget. One that waits alone may hold more:
otherwise larger conversations would never reach the disk, which matters most where memory holds only one or two."""
FAILURES_BORNE = 1
"""Failures in a row after which conversations may still wait."""

End = tuple[str, str]
"""How a conversation ended, and why, as is told to who asks for it later."""
UNWANTED: End = "dropped", "it is not wanted any more"
SUPERSEDED: End = "dropped", "a longer one has taken its place"
NO_ROOM: End = "evicted", "the budget on disk has no room for it"
DISK_FAILS: End = "dropped", "the disk failed"


@dataclass(eq=False)
class _Waiting:
    """A conversation to be written."""

    conversation: Conversation
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

    def __init__(self, table: Conversations, disk: Disk, limit_bytes: int) -> None:
        self.on_work: Callable[[], None] = lambda: None
        self.writes = self.written_bytes = self.failures = self.not_written = 0
        self.allowance = disk.setup.allowance
        self._table = table
        self._disk = disk
        self._clock = table.clock
        self._limit_bytes = limit_bytes
        self._waiting: dict[ConversationId, _Waiting] = {}
        self._writing: _Writing | None = None
        self._pause = WritePause()

    def __len__(self) -> int:
        return len(self._waiting) + (self._writing is not None)

    @property
    def waiting(self) -> tuple[ConversationId, ...]:
        """Conversations whose write has not begun, in its order."""
        return tuple(self._waiting)

    @property
    def is_paused(self) -> bool:
        """True for a while after a failed write."""
        return self._pause.is_on(self._clock())

    def offer(self, conversation: Conversation, ram: InRam) -> None:
        """Queues a conversation in RAM if it is worth a write."""
        parked, blocks, allowance = conversation.parked, self._table.blocks, self.allowance
        on_disk = [block_id for block_id in parked.blocks if blocks[block_id].disk is not None]
        size = self._missing_bytes(conversation)
        allowance.refill(self._clock())
        worth = worth_writing(
            size, allowance.left_bytes, allowance.share, has_returned=ram.history.turns > 1 or bool(on_disk)
        )
        queued = sum(waiting.bytes for waiting in self._waiting.values())
        is_broken = self._pause.failures_in_a_row > FAILURES_BORNE and self.is_paused
        is_full = len(self) > 0 and queued + size > self._limit_bytes
        if not worth or is_broken or is_full:
            self.not_written += 1
            return
        self._waiting[parked.id] = _Waiting(conversation, size, self._table.hold(conversation))
        self.on_work()

    def ask(self, conversation: Conversation) -> Refused | None:
        """Queues a conversation in RAM because someone asked for it, whatever it is worth; it leaves RAM once it is
        written. Says why not."""
        if self.is_paused:
            return Refused(RefusalReason.BUSY, "the disk failed a moment ago")
        writing = self._writing is not None and self._writing.waiting.conversation is conversation
        if conversation.id not in self._waiting and not writing:
            size = self._missing_bytes(conversation)
            self.allowance.refill(self._clock())
            if size > self.allowance.left_bytes:
                return Refused(RefusalReason.VALUE, "what may be written to disk today is used up")
            if size > self._disk.config.budget_bytes:
                return Refused(
                    RefusalReason.BUDGET, f"needs {mib(size)} of {mib(self._disk.config.budget_bytes)} on disk"
                )
            self._waiting[conversation.id] = _Waiting(conversation, size, self._table.hold(conversation))
            self.on_work()
        conversation.leaves_ram = True
        return None

    def adopt(self, conversation: Conversation, ref: ExtentRef) -> None:
        """Queues a conversation whose file is already written and charged, so that it gets its manifest."""
        self._waiting[conversation.id] = _Waiting(conversation, 0, self._table.hold(conversation), ref)
        self.allowance.spend(ref.taken_bytes)
        self.on_work()

    def cancel(self, conversation_id: ConversationId, end: End = UNWANTED) -> None:
        """Takes a conversation out of the queue. If it is being written, it is forgotten after the write. `end` is told
        of one whose state is in the file that is not kept."""
        waiting = self._waiting.pop(conversation_id, None)
        if waiting is not None:
            self._give_up(waiting, end)
        if self._writing is not None and self._writing.job.manifest.id == conversation_id:
            self._writing.is_dropped = True

    def cancel_superseded(self) -> None:
        """Takes superseded conversations out of the queue. One that is being written is still written."""
        for conversation_id, waiting in list(self._waiting.items()):
            if waiting.conversation.ram is None:
                self._give_up(self._waiting.pop(conversation_id), SUPERSEDED)

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
                self.cancel(conversation_id, NO_ROOM)
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
        conversation = writing.waiting.conversation
        if error is not None and job.is_adopted:
            self._lost(conversation, DISK_FAILS)
        elif (
            conversation.leaves_ram and conversation.is_on_disk and conversation.ram and not conversation.ram.awaited_by
        ):
            self._table.leave_ram(conversation)

    def _start(self, waiting: _Waiting) -> _Writing | None:
        """The job that writes a conversation, with its reused extents held and others condemned to make room; None if
        there is no room."""
        conversation, setup = waiting.conversation, self._disk.setup
        shift = setup.wall() - self._clock()
        number = setup.new_extent() if waiting.adopted is None else waiting.adopted.id
        job, reused = write_job(self._table, self._disk, conversation, number, shift, waiting.adopted)
        self._disk.hold(reused)
        size, used_s = job_bytes(job), conversation.parked.last_used_s
        if not self._table.make_disk_room(size, index_bytes_of(job.manifest), used_s, self._superseded(conversation)):
            self._disk.let_go(reused)
            return None
        return _Writing(waiting, job, reused)

    def _written(self, writing: _Writing) -> None:
        job, conversation = writing.job, writing.waiting.conversation
        self._pause.succeeded()
        self.writes += 1
        self.written_bytes += job_bytes(job)
        self._table.enter_disk(conversation, job.manifest, manifest_limit_bytes(job.manifest))
        if writing.is_dropped:
            self._table.leave_disk(conversation)
            return
        for ancestor in self._superseded(conversation):
            conversation.is_pinned |= ancestor.is_pinned
            self._table.leave_disk(ancestor)

    def _failed(self, job: WriteJob) -> None:
        self.failures += 1
        self._disk.write_failed(job, leftovers(job))
        self._pause.failed(self._clock())
        if self._pause.failures_in_a_row > FAILURES_BORNE:
            self.not_written += len(self._waiting)
            for conversation_id in list(self._waiting):
                self.cancel(conversation_id, DISK_FAILS)

    def _give_up(self, waiting: _Waiting, end: End) -> None:
        """Releases a conversation that will not be written, and condemns its file, if it has one."""
        waiting.release()
        if waiting.adopted is not None:
            self._disk.condemn(waiting.adopted.name, waiting.adopted.taken_bytes)
            self._lost(waiting.conversation, end)

    def _lost(self, conversation: Conversation, end: End) -> None:
        """Ends a conversation whose file could not be kept."""
        if conversation.ram is not None:
            self._table.forget_in_ram(conversation, *end)

    def _superseded(self, conversation: Conversation) -> list[Conversation]:
        """Conversations on disk that this one makes superfluous there."""
        parked = conversation.parked
        prefixes = self._table.prefixes_of(parked.key_digest, parked.units, parked.prefix_hashes)
        there = [each for each in prefixes if each.disk is not None and each is not conversation]
        return superseded(there, (checkpoint.position for checkpoint in parked.checkpoints))

    def _missing_bytes(self, conversation: Conversation) -> int:
        """Bytes of the conversation that are not on disk yet."""
        blocks, checkpoints = self._table.blocks, self._table.checkpoints
        missing = [block_id for block_id in conversation.parked.blocks if blocks[block_id].disk is None]
        fixed = [c.id for c in conversation.parked.checkpoints if checkpoints[c.id].disk is None]
        return blocks.bytes_of(missing) + sum(map(checkpoints.bytes_of, fixed))
