"""The checkpoints that there are: the fixed state of all stages at one position, in RAM and on disk.

A checkpoint is shared by all conversations that descend from it. Its place in RAM is a buffer, counted by its owners;
its place on disk lives as long as its extent.

    place <- idle buffer, else new memory         release -> idle if page-locked, else freed

Page-locking memory delays all work of a GPU, so page-locked buffers are kept when they become free, and are only freed
when rows need the room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count

from parkd.state import Bytes, FixedPart, StateLayout, Sums
from parkd.store.budget import Budget, Kind
from parkd.store.files.manifest import DiskCheckpoint, DiskPlace
from parkd.store.records import CheckpointId
from parkd.store.slabs import PAGE_BYTES, SlabHooks, round_up, taken

PART_ALIGNMENT_BYTES = 64


@dataclass(slots=True)
class Checkpoint:
    position: int
    sums: Sums | None = None
    """`[stages]`; None before they are known."""
    ram: Bytes | None = None
    part_bytes: tuple[int, ...] = ()
    """Of its parts in RAM."""
    disk: DiskPlace | None = None
    is_sealed: bool = False
    """Its place in RAM holds its bytes."""
    owners: int = 0
    """Conversations in RAM and captures in flight."""

    def vacate(self) -> Bytes:
        """Empties the place in RAM. Returns its memory, to which nothing else refers."""
        assert self.ram is not None
        memory, self.ram, self.is_sealed = self.ram, None, False
        return memory


def checkpoint_bytes_of(layout: StateLayout) -> int:
    """Bytes of memory for one checkpoint of all stages; 0 for a model without fixed state. An estimate for opaque
    states."""
    return checkpoint_charge(tuple(stage.fixed_bytes for stage in layout.stages))


def checkpoint_charge(part_bytes: Sequence[int]) -> int:
    """Bytes of the budget for a checkpoint with parts of these sizes."""
    return round_up(sum(round_up(size, PART_ALIGNMENT_BYTES) for size in part_bytes), PAGE_BYTES)


class IdleBuffers:
    """Buffers for checkpoints, each charged to the budget. With `hooks`, free ones are kept: all have one size then."""

    def __init__(self, size: int, budget: Budget, hooks: SlabHooks | None) -> None:
        self.size = size
        self._budget = budget
        self._hooks = hooks
        self._idle: list[Bytes] = []

    def __len__(self) -> int:
        return len(self._idle)

    def grow_ahead(self, most_bytes: int) -> None:
        """Allocates idle buffers of at most `most_bytes` together. Raises OSError or MemoryError."""
        if self._hooks is None or self.size == 0:
            return
        while (len(self._idle) + 1) * self.size <= most_bytes:
            self._idle.append(taken(self._budget, Kind.IDLE, self.size, self._hooks))

    def take(self, size: int) -> Bytes:
        """A buffer, charged as a checkpoint: an idle one if there is one. Raises OSError, MemoryError."""
        if not self._idle:
            return taken(self._budget, Kind.CHECKPOINTS, size, self._hooks)
        assert size == self.size, "idle buffers have one size"
        self._budget.credit(Kind.IDLE, size)
        self._budget.charge(Kind.CHECKPOINTS, size)
        return self._idle.pop()

    def put(self, memory: Bytes) -> None:
        """Keeps the buffer of a removed checkpoint as idle if there are hooks, else frees it."""
        size = memory.nbytes
        if self._hooks is not None:
            self._idle.append(memory)
        del memory
        self._budget.credit(Kind.CHECKPOINTS, size)
        if self._hooks is not None:
            self._budget.charge(Kind.IDLE, size)

    def give_back(self) -> None:
        """Frees one idle buffer; there must be one."""
        assert self._hooks is not None, "only page-locked buffers are kept"
        memory = self._idle.pop()
        self._hooks.removed(memory)
        del memory
        self._budget.credit(Kind.IDLE, self.size)

    @property
    def held_bytes(self) -> int:
        return sum(memory.nbytes for memory in self._idle)


class CheckpointTable:
    """Every checkpoint once, reference-counted in RAM."""

    def __init__(self, layout: StateLayout, buffers: IdleBuffers) -> None:
        self._usual = tuple(stage.fixed_bytes for stage in layout.stages)
        self._buffers = buffers
        self._checkpoints: dict[CheckpointId, Checkpoint] = {}
        self._ids = count(1)

    def __getitem__(self, checkpoint_id: CheckpointId) -> Checkpoint:
        return self._checkpoints[checkpoint_id]

    def add(self, position: int) -> CheckpointId:
        """A new checkpoint without a place, which its caller gives it."""
        checkpoint_id = next(self._ids)
        self._checkpoints[checkpoint_id] = Checkpoint(position)
        return checkpoint_id

    def place(self, ids: Sequence[CheckpointId], sizes: Sequence[int] | None) -> None:
        """Gives checkpoints a place in RAM, with one owner each. `sizes` are in bytes, for states whose size the layout
        does not tell. Raises OSError or MemoryError, after which none has one."""
        parts = [self._usual] * len(ids) if sizes is None else [(size,) for size in sizes]
        placed: list[CheckpointId] = []
        try:
            for checkpoint_id, part_bytes in zip(ids, parts, strict=True):
                checkpoint = self._checkpoints[checkpoint_id]
                assert checkpoint.ram is None, "a checkpoint has one place in RAM"
                checkpoint.ram = self._buffers.take(checkpoint_charge(part_bytes))
                checkpoint.part_bytes, checkpoint.owners = part_bytes, 1
                placed.append(checkpoint_id)
        except BaseException:
            self.release(placed)
            self._drop_placeless(ids)
            raise

    def seal(self, ids: Sequence[CheckpointId], checksums: Sums | None) -> None:
        """Makes checkpoints readable whose places in RAM have been filled. `checksums` is as for blocks."""
        for at, checkpoint_id in enumerate(ids):
            checkpoint = self._checkpoints[checkpoint_id]
            checkpoint.is_sealed = True
            if checksums is not None:
                checkpoint.sums = checksums[at].copy()

    def hold(self, ids: Iterable[CheckpointId]) -> None:
        """Adds an owner to checkpoints in RAM."""
        for checkpoint_id in ids:
            self._checkpoints[checkpoint_id].owners += 1

    def release(self, ids: Iterable[CheckpointId]) -> None:
        """Takes an owner off checkpoints, and empties the places in RAM of those without another."""
        for checkpoint_id in ids:
            checkpoint = self._checkpoints[checkpoint_id]
            checkpoint.owners -= 1
            if checkpoint.owners == 0:
                self._buffers.put(checkpoint.vacate())
                self._drop_placeless([checkpoint_id])

    def bytes_freed_by(self, ids: Iterable[CheckpointId]) -> int:
        """Bytes that would be freed if one owner released these."""
        alone = [checkpoint_id for checkpoint_id in ids if self._checkpoints[checkpoint_id].owners == 1]
        return sum(map(self.bytes_of, alone))

    def bytes_freed_with(self, holdings: Iterable[Iterable[CheckpointId]]) -> int:
        """Bytes that would be freed if all of these owners released their checkpoints."""
        held = Counter(checkpoint_id for ids in holdings for checkpoint_id in ids)
        return sum(self.bytes_of(i) for i, owners in held.items() if self._checkpoints[i].owners == owners)

    def bytes_of(self, checkpoint_id: CheckpointId) -> int:
        """Bytes of the budget that its place in RAM takes."""
        memory = self._checkpoints[checkpoint_id].ram
        return 0 if memory is None else memory.nbytes

    def parts(self, checkpoint_id: CheckpointId, *, writeable: bool) -> list[FixedPart]:
        """Its parts in RAM, one a stage."""
        checkpoint = self._checkpoints[checkpoint_id]
        assert checkpoint.ram is not None, "a checkpoint that is not in RAM was read"
        parts, at = [], 0
        for size in checkpoint.part_bytes:
            buffer = checkpoint.ram[at : at + size]
            buffer.flags.writeable = writeable
            parts.append(FixedPart(checkpoint.position, buffer))
            at += round_up(size, PART_ALIGNMENT_BYTES)
        return parts

    def checksums(self, checkpoint_id: CheckpointId) -> Sums:
        """`[stages]` of a sealed checkpoint."""
        checkpoint = self._checkpoints[checkpoint_id]
        assert checkpoint.sums is not None, "a checkpoint in flight was read"
        assert checkpoint.is_sealed, "a checkpoint in flight was read"
        return checkpoint.sums

    def put_on_disk(self, checkpoint_id: CheckpointId, found: DiskCheckpoint) -> None:
        """Notes where a checkpoint is on disk that has no place there yet."""
        checkpoint = self._checkpoints[checkpoint_id]
        assert checkpoint.disk is None, "a checkpoint has one place on disk"
        checkpoint.sums, checkpoint.disk = found.sums, found.place

    def take_off_disk(self, ids: Iterable[CheckpointId]) -> None:
        """Empties the places on disk, whose extent is gone or damaged."""
        for checkpoint_id in ids:
            self._checkpoints[checkpoint_id].disk = None
            self._drop_placeless([checkpoint_id])

    def items(self) -> Iterable[tuple[CheckpointId, Checkpoint]]:
        return self._checkpoints.items()

    @property
    def held_bytes(self) -> int:
        """Bytes of the buffers of checkpoints."""
        return sum(map(self.bytes_of, self._checkpoints))

    def _drop_placeless(self, ids: Iterable[CheckpointId]) -> None:
        for checkpoint_id in ids:
            checkpoint = self._checkpoints.get(checkpoint_id)
            if checkpoint is not None and checkpoint.ram is None and checkpoint.disk is None:
                del self._checkpoints[checkpoint_id]
