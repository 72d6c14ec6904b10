"""Blocks in RAM: a slot of the pool, who owns it, and the checksums of its parts.

An owner is a conversation or a capture in flight. A block lives while it has an owner; its id is never used again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import numpy.typing as npt

from parkd.store.budget import BLOCK_BYTES, Budget, Kind
from parkd.store.records import BlockId
from parkd.store.slabs import SlabPool
from parkd.types import RowRun, StateFile, StateLayout, StateSizes

Owner = int


@dataclass(slots=True)
class Block:
    """Rows `[index * block_tokens, index * block_tokens + rows)` of all stages."""

    index: int
    rows: int
    identity: bytes
    """Names the units up to the block's end."""
    slot: int
    owners: int = 0
    owners_xor: int = 0
    """Exclusive or of the owners: the owner itself once there is only one."""
    checksums: npt.NDArray[np.uint64] | None = None
    """`[stages]`; None while the block is being written. Immutable from then on."""


class BlockPool:
    """The RAM tier's blocks, reference-counted, charged for metadata one by one and for rows a slab at a time."""

    def __init__(self, layout: StateLayout, block_tokens: int, slabs: SlabPool, budget: Budget) -> None:
        self._layout = layout
        self._block_tokens = block_tokens
        self._slabs = slabs
        self._budget = budget
        self._blocks: dict[BlockId, Block] = {}
        self._ids = count(1)
        self._exclusive: Counter[Owner] = Counter()
        self._changed: set[Owner] = set()

    def number_from(self, first: BlockId) -> None:
        """Ids are given from here on, so that none is one that lies on disk."""
        self._ids = count(first)

    def __len__(self) -> int:
        return len(self._blocks)

    def get(self, block_id: BlockId) -> Block | None:
        return self._blocks.get(block_id)

    def exclusive(self, owner: Owner) -> int:
        """Slots that nobody else owns: what would be freed if the owner let go."""
        return self._exclusive[owner]

    def exclusive_bytes(self, owner: Owner, ids: Sequence[BlockId]) -> int:  # noqa: ARG002 - what they are decides elsewhere
        """The same in bytes, without metadata. `ids` are all that the owner holds."""
        return self.exclusive(owner) * self._slabs.geometry.slot_bytes

    def bytes_of(self, ids: Sequence[BlockId]) -> int:
        """What their rows take of the budget."""
        return len(ids) * self._slabs.geometry.slot_bytes

    def take_changed(self) -> set[Owner]:
        """Owners whose exclusive blocks others came to share, or ceased to, since this was last asked."""
        taken, self._changed = self._changed, set()
        return taken

    @property
    def shared(self) -> int:
        return len(self._blocks) - self._exclusive.total()

    def allocate(
        self,
        owner: Owner,
        shapes: Sequence[tuple[int, int, bytes]],
        after: BlockId | None,
        names: Sequence[BlockId | None] = (),
        sizes: StateSizes | None = None,
        file: StateFile | None = None,
    ) -> list[BlockId]:
        """New blocks of (index, rows, identity), owned by `owner`, behind block `after` in memory if that is free.

        The caller has reserved the slots and their metadata. `names` are the ids, where the bytes to come have one
        already because they lie on disk under it; None, or none at all, gives a new one. `sizes` and `file` are of
        states that are no rows. Raises OSError or MemoryError, with nothing taken, for those alone.
        """
        slots = self._place(shapes, after, sizes, file)
        self._budget.charge(Kind.METADATA, BLOCK_BYTES * len(shapes))
        ids = []
        for slot, (index, rows, identity), name in zip(slots, shapes, names or [None] * len(shapes), strict=True):
            block_id = next(self._ids) if name is None else name
            assert block_id not in self._blocks, "a block has one place in memory"
            self._blocks[block_id] = Block(index, rows, identity, slot)
            ids.append(block_id)
        self.hold(owner, ids)
        return ids

    def seal(self, ids: Sequence[BlockId], checksums: npt.NDArray[np.uint64]) -> None:
        """Makes written blocks immutable. `checksums` is `[len(ids), stages]`."""
        for block_id, parts in zip(ids, checksums, strict=True):
            self._blocks[block_id].checksums = parts.copy()

    def hold(self, owner: Owner, ids: Iterable[BlockId]) -> None:
        for block_id in ids:
            block = self._blocks[block_id]
            if block.owners == 1:
                self._exclusive[block.owners_xor] -= 1
                self._changed.add(block.owners_xor)
            elif block.owners == 0:
                self._exclusive[owner] += 1
            block.owners += 1
            block.owners_xor ^= owner

    def release(self, owner: Owner, ids: Iterable[BlockId]) -> None:
        """Frees what has no owner left."""
        for block_id in ids:
            block = self._blocks[block_id]
            block.owners -= 1
            block.owners_xor ^= owner
            if block.owners == 1:
                self._exclusive[block.owners_xor] += 1
                self._changed.add(block.owners_xor)
            elif block.owners == 0:
                self._exclusive[owner] -= 1
                del self._blocks[block_id]
                self._vacate(block.slot)
                self._budget.credit(Kind.METADATA, BLOCK_BYTES)
        if self._exclusive[owner] == 0:
            del self._exclusive[owner]

    def slots_freed_with(self, holdings: Iterable[Iterable[BlockId]]) -> list[int]:
        """Slots that would be free if each of these owners let go of its blocks."""
        held = Counter(block_id for ids in holdings for block_id in ids)
        return [self._blocks[i].slot for i, owners in held.items() if self._blocks[i].owners == owners]

    def side_bytes_freed_with(self, holdings: Iterable[Iterable[BlockId]]) -> int:
        """Bytes outside the slabs that would be free then."""
        return self.metadata_bytes(len(self.slots_freed_with(holdings)))

    def metadata_bytes(self, blocks: int) -> int:
        return blocks * BLOCK_BYTES

    def runs(self, ids: Sequence[BlockId], stop: int, *, writeable: bool) -> list[tuple[RowRun, ...]]:
        """The rows of consecutive blocks up to `stop`, for each stage in as few contiguous runs as memory allows."""
        pieces: list[tuple[int, int, int]] = []
        for block_id in ids:
            block = self._blocks[block_id]
            first = block.index * self._block_tokens
            last = min(first + block.rows, stop)
            if pieces and pieces[-1][2] + (first - pieces[-1][0]) // self._block_tokens == block.slot:
                pieces[-1] = (pieces[-1][0], last, pieces[-1][2])
            else:
                pieces.append((first, last, block.slot))
        return [self._stage_runs(stage, pieces, writeable) for stage in range(len(self._layout.stages))]

    def _place(
        self,
        shapes: Sequence[tuple[int, int, bytes]],
        after: BlockId | None,
        sizes: StateSizes | None,  # noqa: ARG002 - for states that are no rows, as the next
        file: StateFile | None,  # noqa: ARG002
    ) -> list[int]:
        return self._slabs.allocate(len(shapes), None if after is None else self._blocks[after].slot)

    def _vacate(self, slot: int) -> None:
        self._slabs.free([slot])

    def _stage_runs(self, stage: int, pieces: list[tuple[int, int, int]], writeable: bool) -> tuple[RowRun, ...]:
        row_bytes = self._layout.stages[stage].row_bytes
        runs = []
        for first, last, slot in pieces:
            buffer = self._slabs.buffer(stage, slot, (last - first) * row_bytes)
            buffer.flags.writeable = writeable
            runs.append(RowRun(first, last, buffer))
        return tuple(runs)

    def checksums(self, ids: Sequence[BlockId]) -> npt.NDArray[np.uint64]:
        """`[len(ids), stages]` of sealed blocks."""
        table = np.empty((len(ids), len(self._layout.stages)), dtype=np.uint64)
        for row, block_id in enumerate(ids):
            parts = self._blocks[block_id].checksums
            assert parts is not None, "a block in flight was read"
            table[row] = parts
        return table

    def recount(self) -> dict[BlockId, int]:
        """Owners of each block, to compare with a count of its own."""
        return {block_id: block.owners for block_id, block in self._blocks.items()}
