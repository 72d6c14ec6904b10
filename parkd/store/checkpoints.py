"""Fixed state of all stages at one position: a buffer each, shared by every conversation that descends from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import numpy.typing as npt

from parkd.store.budget import Budget, Kind
from parkd.store.records import CheckpointId
from parkd.store.slabs import PAGE_BYTES, SlabHooks, anonymous, round_up
from parkd.types import Bytes, FixedPart, StateLayout

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
    """What one checkpoint takes in memory, all stages; 0 for a model without fixed state. Of an opaque state: about."""
    return checkpoint_charge(tuple(stage.fixed_bytes for stage in layout.stages))


def checkpoint_charge(part_bytes: Sequence[int]) -> int:
    """What a checkpoint of these parts takes of the budget."""
    return round_up(sum(round_up(size, PART_ALIGNMENT_BYTES) for size in part_bytes), PAGE_BYTES)


class CheckpointPool:
    """Reference-counted checkpoint buffers, each charged to the budget."""

    def __init__(self, layout: StateLayout, budget: Budget, hooks: SlabHooks | None = None) -> None:
        self._layout = layout
        self._hooks = hooks
        self._budget = budget
        self._checkpoints: dict[CheckpointId, _Checkpoint] = {}
        self._ids = count(1)
        self.checkpoint_bytes = checkpoint_bytes_of(layout)
        """What one checkpoint takes; 0 for a model without fixed state."""

    def __len__(self) -> int:
        return len(self._checkpoints)

    def allocate(self, positions: Sequence[int], sizes: Sequence[int] | None = None) -> list[CheckpointId]:
        """A new checkpoint for each position, with one owner; `sizes` in bytes if the layout does not tell them. Raises
        OSError or MemoryError; then none is kept."""
        ids: list[CheckpointId] = []
        usual = tuple(stage.fixed_bytes for stage in self._layout.stages)
        parts = [usual] * len(positions) if sizes is None else [(size,) for size in sizes]
        try:
            for position, part_bytes in zip(positions, parts, strict=True):
                size = checkpoint_charge(part_bytes)
                self._budget.charge(Kind.CHECKPOINTS, size)
                try:
                    memory = anonymous(size)
                except BaseException:
                    self._budget.credit(Kind.CHECKPOINTS, size)
                    raise
                if self._hooks is not None:
                    self._hooks.added(memory)
                ids.append(next(self._ids))
                self._checkpoints[ids[-1]] = _Checkpoint(position, memory, part_bytes)
        except BaseException:
            self.release(ids)
            raise
        return ids

    def seal(self, ids: Sequence[CheckpointId], checksums: npt.NDArray[np.uint64]) -> None:
        """`checksums` is `[len(ids), stages]`."""
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
                size = checkpoint.memory.nbytes
                if self._hooks is not None:
                    self._hooks.removed(checkpoint.memory)
                del self._checkpoints[checkpoint_id], checkpoint
                self._budget.credit(Kind.CHECKPOINTS, size)

    def owners(self, checkpoint_id: CheckpointId) -> int:
        return self._checkpoints[checkpoint_id].owners

    def bytes_freed_with(self, holdings: Iterable[Iterable[CheckpointId]]) -> int:
        """What would be free if each of these owners let go of its checkpoints."""
        held = Counter(checkpoint_id for ids in holdings for checkpoint_id in ids)
        return sum(self.bytes_of(i) for i, owners in held.items() if self.owners(i) == owners)

    def bytes_of(self, checkpoint_id: CheckpointId) -> int:
        """What it takes of the budget."""
        return self._checkpoints[checkpoint_id].memory.nbytes

    def size_of(self, checkpoint_id: CheckpointId) -> int:
        """Bytes of the state, all stages."""
        return sum(self._checkpoints[checkpoint_id].part_bytes)

    def parts(self, checkpoint_id: CheckpointId, *, writeable: bool) -> list[FixedPart]:
        """One part a stage; a stage without fixed state has an empty one."""
        checkpoint = self._checkpoints[checkpoint_id]
        parts, at = [], 0
        for size in checkpoint.part_bytes:
            buffer = checkpoint.memory[at : at + size]
            buffer.flags.writeable = writeable
            parts.append(FixedPart(checkpoint.position, buffer))
            at += round_up(size, PART_ALIGNMENT_BYTES)
        return parts

    def checksums(self, checkpoint_id: CheckpointId) -> npt.NDArray[np.uint64]:
        """`[stages]` of a sealed checkpoint."""
        parts = self._checkpoints[checkpoint_id].checksums
        assert parts is not None, "a checkpoint in flight was read"
        return parts

    def recount(self) -> dict[CheckpointId, int]:
        """Owners of each checkpoint, to compare with a count of its own."""
        return {checkpoint_id: checkpoint.owners for checkpoint_id, checkpoint in self._checkpoints.items()}
