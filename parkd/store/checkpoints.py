"""Checkpoints in RAM: the fixed state of all stages at one position, shared by all conversations that descend from it.

    allocate <- idle buffer, else new memory         release -> idle if page-locked, else freed

Page-locking memory delays all work of a GPU, so page-locked buffers are kept when they become free, and are only freed
when rows need the room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import numpy.typing as npt

from parkd.state import Bytes, FixedPart, StateLayout
from parkd.store.budget import Budget, Kind
from parkd.store.records import CheckpointId
from parkd.store.slabs import PAGE_BYTES, SlabHooks, round_up, taken

PART_ALIGNMENT_BYTES = 64


@dataclass(slots=True)
class _Checkpoint:
    position: int
    memory: Bytes
    part_bytes: tuple[int, ...]
    owners: int = 1
    checksums: npt.NDArray[np.uint64] | None = None
    """`[stages]`; None while it is being written."""


def checkpoint_bytes_of(layout: StateLayout) -> int:
    """Bytes of memory for one checkpoint of all stages; 0 for a model without fixed state. An estimate for opaque
    states."""
    return checkpoint_charge(tuple(stage.fixed_bytes for stage in layout.stages))


def checkpoint_charge(part_bytes: Sequence[int]) -> int:
    """Bytes of the budget for a checkpoint with parts of these sizes."""
    return round_up(sum(round_up(size, PART_ALIGNMENT_BYTES) for size in part_bytes), PAGE_BYTES)


class CheckpointPool:
    """Reference-counted checkpoint buffers, each charged to the budget. With `hooks`, free buffers are kept."""

    def __init__(self, layout: StateLayout, budget: Budget, hooks: SlabHooks | None = None) -> None:
        self._layout = layout
        self._hooks = hooks
        self._budget = budget
        self._checkpoints: dict[CheckpointId, _Checkpoint] = {}
        self._idle: list[Bytes] = []
        """Buffers of `checkpoint_bytes` each."""
        self._ids = count(1)
        self.checkpoint_bytes = checkpoint_bytes_of(layout)
        """Bytes of one checkpoint; 0 for a model without fixed state."""

    def __len__(self) -> int:
        return len(self._checkpoints)

    def allocate(self, positions: Sequence[int], sizes: Sequence[int] | None = None) -> list[CheckpointId]:
        """A new checkpoint for each position, with one owner. `sizes` are in bytes, for states whose size the layout
        does not tell. Raises OSError or MemoryError, after which nothing is allocated."""
        ids: list[CheckpointId] = []
        usual = tuple(stage.fixed_bytes for stage in self._layout.stages)
        assert sizes is None or self._hooks is None, "idle buffers have one size"
        parts = [usual] * len(positions) if sizes is None else [(size,) for size in sizes]
        try:
            for position, part_bytes in zip(positions, parts, strict=True):
                memory = self._taken(checkpoint_charge(part_bytes))
                ids.append(next(self._ids))
                self._checkpoints[ids[-1]] = _Checkpoint(position, memory, part_bytes)
        except BaseException:
            self.release(ids)
            raise
        return ids

    @property
    def idle(self) -> int:
        """Number of idle buffers, which `allocate` uses before it allocates new memory."""
        return len(self._idle)

    @property
    def held_bytes(self) -> tuple[int, int]:
        """Bytes of the buffers of checkpoints, and of the idle ones."""
        used = sum(checkpoint.memory.nbytes for checkpoint in self._checkpoints.values())
        return used, sum(memory.nbytes for memory in self._idle)

    def reused_bytes(self, checkpoints: int) -> int:
        """Bytes of idle buffers that this many new checkpoints would use."""
        return min(checkpoints, len(self._idle)) * self.checkpoint_bytes

    def grow_ahead(self, most_bytes: int) -> None:
        """Allocates idle buffers of at most `most_bytes` together. Raises OSError or MemoryError."""
        if self._hooks is None or self.checkpoint_bytes == 0:
            return
        while (len(self._idle) + 1) * self.checkpoint_bytes <= most_bytes:
            self._idle.append(taken(self._budget, Kind.IDLE, self.checkpoint_bytes, self._hooks))

    def give_back(self) -> None:
        """Frees one idle buffer; there must be one."""
        memory = self._idle.pop()
        if self._hooks is not None:
            self._hooks.removed(memory)
        del memory
        self._budget.credit(Kind.IDLE, self.checkpoint_bytes)

    def close(self) -> None:
        """Frees the idle buffers."""
        while self._idle:
            self.give_back()

    def seal(self, ids: Sequence[CheckpointId], checksums: npt.NDArray[np.uint64]) -> None:
        """Makes copied checkpoints readable. `checksums` is `[len(ids), stages]`."""
        for checkpoint_id, parts in zip(ids, checksums, strict=True):
            self._checkpoints[checkpoint_id].checksums = parts.copy()

    def hold(self, ids: Iterable[CheckpointId]) -> None:
        for checkpoint_id in ids:
            self._checkpoints[checkpoint_id].owners += 1

    def release(self, ids: Iterable[CheckpointId]) -> None:
        for checkpoint_id in ids:
            checkpoint = self._checkpoints[checkpoint_id]
            checkpoint.owners -= 1
            if checkpoint.owners == 0:
                del checkpoint
                self._vacated(self._checkpoints.pop(checkpoint_id).memory)

    def owners(self, checkpoint_id: CheckpointId) -> int:
        return self._checkpoints[checkpoint_id].owners

    def bytes_freed_with(self, holdings: Iterable[Iterable[CheckpointId]]) -> int:
        """Bytes that would be freed if all of these owners released their checkpoints."""
        held = Counter(checkpoint_id for ids in holdings for checkpoint_id in ids)
        return sum(self.bytes_of(i) for i, owners in held.items() if self.owners(i) == owners)

    def bytes_of(self, checkpoint_id: CheckpointId) -> int:
        """Bytes of the budget that it takes."""
        return self._checkpoints[checkpoint_id].memory.nbytes

    def size_of(self, checkpoint_id: CheckpointId) -> int:
        """Bytes of the state, all stages."""
        return sum(self._checkpoints[checkpoint_id].part_bytes)

    def parts(self, checkpoint_id: CheckpointId, *, writeable: bool) -> list[FixedPart]:
        """One part for each stage, empty for a stage without fixed state."""
        checkpoint = self._checkpoints[checkpoint_id]
        parts, at = [], 0
        for size in checkpoint.part_bytes:
            buffer = checkpoint.memory[at : at + size]
            buffer.flags.writeable = writeable
            parts.append(FixedPart(checkpoint.position, buffer))
            at += round_up(size, PART_ALIGNMENT_BYTES)
        return parts

    def checksums(self, checkpoint_id: CheckpointId) -> npt.NDArray[np.uint64]:
        """The checksums `[stages]` of a sealed checkpoint."""
        parts = self._checkpoints[checkpoint_id].checksums
        assert parts is not None, "a checkpoint in flight was read"
        return parts

    def recount(self) -> dict[CheckpointId, int]:
        """The number of owners of each checkpoint, for tests to compare with their own count."""
        return {checkpoint_id: checkpoint.owners for checkpoint_id, checkpoint in self._checkpoints.items()}

    def _taken(self, size: int) -> Bytes:
        """A buffer, charged as a checkpoint: an idle one if there is one. Raises OSError, MemoryError."""
        if not self._idle:
            return taken(self._budget, Kind.CHECKPOINTS, size, self._hooks)
        self._budget.credit(Kind.IDLE, size)
        self._budget.charge(Kind.CHECKPOINTS, size)
        return self._idle.pop()

    def _vacated(self, memory: Bytes) -> None:
        """Keeps the buffer of a removed checkpoint as idle if there are hooks, else frees it."""
        size = memory.nbytes
        if self._hooks is not None:
            self._idle.append(memory)
        del memory
        self._budget.credit(Kind.CHECKPOINTS, size)
        if self._hooks is not None:
            self._budget.charge(Kind.IDLE, size)
