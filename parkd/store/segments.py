"""Opaque states: each is one buffer or one file, and takes the place of blocks.

A segment is a block that holds a whole conversation: index 0, and as many rows as the conversation has tokens. Its
bytes cannot be cut, so conversations that differ never share one. Its memory is charged outside the slabs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from parkd.state import Bytes, RowRun, StateFile, StateLayout, StateSizes
from parkd.store.blocks import BlockPool, Owner
from parkd.store.budget import BLOCK_BYTES, Budget, Kind
from parkd.store.records import BlockId
from parkd.store.slabs import PAGE_BYTES, SlabPool, round_up, taken


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """Where a segment is. Memory is allocated in whole pages; `memory` is the part that the state uses."""

    memory: Bytes
    charged: int
    file: StateFile | None


def segment_charge(size: int) -> int:
    """Bytes of the budget that a state of this size takes in memory."""
    return round_up(size, PAGE_BYTES)


class SegmentPool(BlockPool):
    """A `BlockPool` of segments: a slot is the number of a `_Place`."""

    def __init__(self, layout: StateLayout, block_tokens: int, slabs: SlabPool, budget: Budget) -> None:
        super().__init__(layout, block_tokens, slabs, budget)
        self._places: dict[int, _Place] = {}
        self._numbers = count()

    def exclusive(self, owner: Owner) -> int:  # noqa: ARG002 - it takes no slots
        return 0

    def exclusive_bytes(self, owner: Owner, ids: Sequence[BlockId]) -> int:  # noqa: ARG002
        return self.bytes_of([block_id for block_id in ids if self._blocks[block_id].owners == 1])

    def bytes_of(self, ids: Sequence[BlockId]) -> int:
        return sum(self._places[self._blocks[block_id].slot].charged for block_id in ids)

    @property
    def segment_bytes(self) -> int:
        return sum(round_up(place.memory.nbytes, PAGE_BYTES) for place in self._places.values())

    def size_of(self, block_id: BlockId) -> int:
        """Bytes of the state."""
        place = self._places[self._blocks[block_id].slot]
        return place.memory.nbytes if place.file is None else place.file.bytes

    def is_file(self, block_id: BlockId) -> bool:
        return self._places[self._blocks[block_id].slot].file is not None

    def resize_file(self, block_id: BlockId, size: int) -> None:
        """Notes that the file has `size` bytes after all."""
        slot = self._blocks[block_id].slot
        place = self._places[slot]
        assert place.file is not None
        self._places[slot] = _Place(place.memory, place.charged, StateFile(place.file.path, size))

    def slots_freed_with(self, holdings: Iterable[Iterable[BlockId]]) -> list[int]:  # noqa: ARG002
        return []

    def side_bytes_freed_with(self, holdings: Iterable[Iterable[BlockId]]) -> int:
        slots = super().slots_freed_with(holdings)
        return sum(self._places[slot].charged + BLOCK_BYTES for slot in slots)

    def runs(self, ids: Sequence[BlockId], stop: int, *, writeable: bool) -> list[tuple[RowRun, ...]]:  # noqa: ARG002
        """The only run of the only stage: a state is always moved whole."""
        runs = []
        for block_id in ids:
            block = self._blocks[block_id]
            place = self._places[block.slot]
            buffer = place.memory[:]
            buffer.flags.writeable = writeable
            runs.append(RowRun(0, block.rows, buffer, place.file))
        return [tuple(runs)]

    def _place(
        self,
        shapes: Sequence[tuple[int, int, bytes]],
        after: BlockId | None,  # noqa: ARG002 - there is no order among buffers
        sizes: StateSizes | None,
        file: StateFile | None,
    ) -> list[int]:
        assert sizes is not None
        return [self._take(sizes.whole, file) for _ in shapes]

    def _take(self, size: int, file: StateFile | None) -> int:
        if file is None:
            charged = segment_charge(size)
            memory = taken(self._budget, Kind.SEGMENTS, charged)[:size]
        else:
            charged, memory = 0, np.empty(0, dtype=np.uint8)
        number = next(self._numbers)
        self._places[number] = _Place(memory, charged, file)
        return number

    def _vacate(self, slots: Sequence[int]) -> None:
        charged = sum(self._places.pop(slot).charged for slot in slots)
        self._budget.credit(Kind.SEGMENTS, charged)
