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
from parkd.store.slabs import PAGE_BYTES, anonymous, round_up
from parkd.types import Bytes, FixedPart, StateLayout

PART_ALIGNMENT_BYTES = 64


@dataclass(slots=True)
class _Checkpoint:
    position: int
    memory: Bytes
    owners: int = 1
    checksums: npt.NDArray[np.uint64] | None = None
    """`[stages]`; None while it is being written."""


def checkpoint_bytes_of(layout: StateLayout) -> int:
    """What one checkpoint takes in memory, all stages; 0 for a model without fixed state."""
    return round_up(sum(round_up(stage.fixed_bytes, PART_ALIGNMENT_BYTES) for stage in layout.stages), PAGE_BYTES)


class CheckpointPool:
    """Reference-counted checkpoint buffers, each charged to the budget."""

    def __init__(self, layout: StateLayout, budget: Budget) -> None:
        self._layout = layout
        self._budget = budget
        self._checkpoints: dict[CheckpointId, _Checkpoint] = {}
        self._ids = count(1)
        self.checkpoint_bytes = checkpoint_bytes_of(layout)
        """What one checkpoint takes; 0 for a model without fixed state."""

    def __len__(self) -> int:
        return len(self._checkpoints)

    def allocate(self, positions: Sequence[int]) -> list[CheckpointId]:
        """A new checkpoint for each position, with one owner. Raises OSError or MemoryError; then none is kept."""
        ids: list[CheckpointId] = []
        try:
            for position in positions:
                self._budget.charge(Kind.CHECKPOINTS, self.checkpoint_bytes)
                try:
                    memory = anonymous(self.checkpoint_bytes)
                except BaseException:
                    self._budget.credit(Kind.CHECKPOINTS, self.checkpoint_bytes)
                    raise
                ids.append(next(self._ids))
                self._checkpoints[ids[-1]] = _Checkpoint(position, memory)
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
                del self._checkpoints[checkpoint_id], checkpoint
                self._budget.credit(Kind.CHECKPOINTS, self.checkpoint_bytes)

    def owners(self, checkpoint_id: CheckpointId) -> int:
        return self._checkpoints[checkpoint_id].owners

    def bytes_freed_with(self, holdings: Iterable[Iterable[CheckpointId]]) -> int:
        """What would be free if each of these owners let go of its checkpoints."""
        held = Counter(checkpoint_id for ids in holdings for checkpoint_id in ids)
        freed = sum(1 for checkpoint_id, owners in held.items() if self.owners(checkpoint_id) == owners)
        return freed * self.checkpoint_bytes

    def parts(self, checkpoint_id: CheckpointId, *, writeable: bool) -> list[FixedPart]:
        """One part a stage; a stage without fixed state has an empty one."""
        checkpoint = self._checkpoints[checkpoint_id]
        parts, at = [], 0
        for stage in self._layout.stages:
            buffer = checkpoint.memory[at : at + stage.fixed_bytes]
            buffer.flags.writeable = writeable
            parts.append(FixedPart(checkpoint.position, buffer))
            at += round_up(stage.fixed_bytes, PART_ALIGNMENT_BYTES)
        return parts

    def checksums(self, checkpoint_id: CheckpointId) -> npt.NDArray[np.uint64]:
        """`[stages]` of a sealed checkpoint."""
        parts = self._checkpoints[checkpoint_id].checksums
        assert parts is not None, "a checkpoint in flight was read"
        return parts

    def recount(self) -> dict[CheckpointId, int]:
        """Owners of each checkpoint, to compare with a count of its own."""
        return {checkpoint_id: checkpoint.owners for checkpoint_id, checkpoint in self._checkpoints.items()}
