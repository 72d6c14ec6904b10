"""Blocks in RAM: for each a slot of memory, its owners, and the checksums of its parts.

An owner is a conversation or a capture in flight. A block lives while it has an owner; its id is never used again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from parkd.state import RowRun, StateFile, StateLayout, StateSizes
from parkd.store.budget import BLOCK_BYTES, Budget, Kind
from parkd.store.records import BlockId
from parkd.store.slabs import SlabPool

Owner = int


@dataclass(slots=True)
class Block:
    """Rows `[index * block_tokens, index * block_tokens + rows)` of all stages."""

    index: int
    rows: int
    identity: bytes
    """Stands for the units up to the end of the block."""
    slot: int
    owners: int = 0
    owners_xor: int = 0
    """Exclusive or of all owners, which is the owner itself if there is only one."""
    sums: bytes | None = None
    """The checksums of its parts, 8 bytes per stage. None while the block is being copied; immutable from then on."""

    @property
    def checksums(self) -> npt.NDArray[np.uint64]:
        """`[stages]`. Only for a block that is sealed."""
        assert self.sums is not None, "a block in flight was read"
        return np.frombuffer(self.sums, dtype=np.uint64)


class BlockPool:
    """The blocks in RAM, reference-counted. Their metadata is charged block by block, their rows slab by slab."""

    def __init__(self, layout: StateLayout, block_tokens: int, slabs: SlabPool, budget: Budget) -> None:
        self._layout = layout
        self._block_tokens = block_tokens
        self._slabs = slabs
        self._budget = budget
        self._blocks: dict[BlockId, Block] = {}
        self._next_id: BlockId = 1
        self._exclusive: Counter[Owner] = Counter()
        self._shared: set[BlockId] = set()
        self._changed: set[Owner] = set()

    def number_from(self, first: BlockId) -> None:
        """Ids count up from `first`, so that none is that of a block on disk."""
        self._next_id = first

    def __len__(self) -> int:
        return len(self._blocks)

    def get(self, block_id: BlockId) -> Block | None:
        return self._blocks.get(block_id)

    def lineage(self, ids: Sequence[BlockId], hashes: Sequence[bytes]) -> list[BlockId]:
        """The longest prefix of `ids` that are sealed whole blocks with these prefix hashes, in order."""
        index = 0
        for block, prefix_hash in zip(map(self._blocks.get, ids), hashes, strict=False):
            if block is None or block.identity != prefix_hash or block.index != index or block.sums is None:
                break
            index += 1
        return list(ids[:index])

    def exclusive(self, owner: Owner) -> int:
        """Slots that only this owner holds: what would be freed if it released them."""
        return self._exclusive[owner]

    def exclusive_bytes(self, owner: Owner, ids: Sequence[BlockId]) -> int:  # noqa: ARG002 - used by SegmentPool
        """The same in bytes, without metadata. `ids` are all blocks that the owner holds."""
        return self.exclusive(owner) * self._slabs.geometry.slot_bytes

    def bytes_of(self, ids: Sequence[BlockId]) -> int:
        """Bytes of the budget that their rows take."""
        return len(ids) * self._slabs.geometry.slot_bytes

    def take_changed(self) -> set[Owner]:
        """Owners whose number of exclusive blocks was changed by others since the last call."""
        taken, self._changed = self._changed, set()
        return taken

    @property
    def shared(self) -> int:
        return len(self._shared)

    def allocate(
        self,
        owner: Owner,
        shapes: Sequence[tuple[int, int, bytes]],
        after: BlockId | None,
        names: Sequence[BlockId | None] = (),
        sizes: StateSizes | None = None,
        file: StateFile | None = None,
    ) -> list[BlockId]:
        """New blocks, one for each `(index, rows, identity)` of `shapes`, owned by `owner`.

        The caller has reserved the slots and their metadata. The blocks come after block `after` in memory if that is
        free. `names` are ids that the blocks already have on disk; None, or an empty sequence, gives new ids. `sizes`
        and `file` are for opaque states; only for these it raises OSError or MemoryError, with nothing taken.
        """
        count = len(shapes)
        slots = self._place(shapes, after, sizes, file)
        self._budget.charge(Kind.METADATA, BLOCK_BYTES * count)
        ids = list(range(self._next_id, self._next_id + count))
        self._next_id += count
        for place, name in enumerate(names):
            if name is not None:
                assert name not in self._blocks, "a block has one place in memory"
                ids[place] = name
        self._blocks.update(
            (block_id, Block(index, rows, identity, slot, 1, owner))
            for block_id, slot, (index, rows, identity) in zip(ids, slots, shapes, strict=True)
        )
        if count:
            self._exclusive[owner] += count
        return ids

    def seal(self, ids: Sequence[BlockId], checksums: npt.NDArray[np.uint64]) -> None:
        """Makes copied blocks immutable. `checksums` is `[len(ids), stages]`."""
        data, width = checksums.tobytes(), 8 * len(self._layout.stages)
        assert len(data) == width * len(ids)
        for block_id, at in zip(ids, range(0, len(data), width), strict=True):
            self._blocks[block_id].sums = data[at : at + width]

    def hold(self, owner: Owner, ids: Sequence[BlockId]) -> None:
        lost, shared = [], []
        for block_id, block in zip(ids, map(self._blocks.__getitem__, ids), strict=True):
            if block.owners == 1:
                lost.append(block.owners_xor)
                shared.append(block_id)
            block.owners += 1
            block.owners_xor ^= owner
        if lost:
            self._exclusive.subtract(lost)
            self._changed.update(lost)
            self._shared.update(shared)

    def release(self, owner: Owner, ids: Sequence[BlockId]) -> None:
        """Takes an owner off blocks, and frees those without another."""
        blocks, shared = self._blocks, self._shared
        alone = ids if shared.isdisjoint(ids) else [block_id for block_id in ids if block_id not in shared]
        if len(alone) < len(ids):
            gained, ceased = [], []
            for block_id in shared.intersection(ids):
                block = blocks[block_id]
                block.owners -= 1
                block.owners_xor ^= owner
                if block.owners == 1:
                    gained.append(block.owners_xor)
                    ceased.append(block_id)
            self._exclusive.update(gained)
            self._changed.update(gained)
            shared.difference_update(ceased)
        if alone:
            self._vacate([block.slot for block in map(blocks.pop, alone)])
            self._budget.credit(Kind.METADATA, BLOCK_BYTES * len(alone))
            self._exclusive[owner] -= len(alone)
        if self._exclusive[owner] == 0:
            del self._exclusive[owner]

    def slots_freed_with(self, holdings: Iterable[Iterable[BlockId]]) -> list[int]:
        """Slots that would be freed if all of these owners released their blocks."""
        held = Counter(block_id for ids in holdings for block_id in ids)
        return [self._blocks[i].slot for i, owners in held.items() if self._blocks[i].owners == owners]

    def side_bytes_freed_with(self, holdings: Iterable[Iterable[BlockId]]) -> int:
        """Bytes outside the slabs that would be freed then."""
        return self.metadata_bytes(len(self.slots_freed_with(holdings)))

    def metadata_bytes(self, blocks: int) -> int:
        return blocks * BLOCK_BYTES

    def runs(self, ids: Sequence[BlockId], stop: int, *, writeable: bool) -> list[tuple[RowRun, ...]]:
        """The rows of consecutive blocks up to `stop`, for each stage in as few contiguous runs as memory allows."""
        blocks = list(map(self._blocks.__getitem__, ids))
        slots = [block.slot for block in blocks]
        breaks = [at for at, (slot, after) in enumerate(pairwise(slots), 1) if after != slot + 1]
        pieces: list[tuple[int, int, int]] = []
        for start, end in zip([0, *breaks], [*breaks, len(blocks)], strict=True) if blocks else ():
            first, last = blocks[start], blocks[end - 1]
            rows = min(last.index * self._block_tokens + last.rows, stop)
            pieces.append((first.index * self._block_tokens, rows, first.slot))
        return [self._stage_runs(stage, pieces, writeable) for stage in range(len(self._layout.stages))]

    def _place(
        self,
        shapes: Sequence[tuple[int, int, bytes]],
        after: BlockId | None,
        sizes: StateSizes | None,  # noqa: ARG002 - for states that are no rows, as the next
        file: StateFile | None,  # noqa: ARG002
    ) -> list[int]:
        return self._slabs.allocate(len(shapes), None if after is None else self._blocks[after].slot)

    def _vacate(self, slots: Sequence[int]) -> None:
        self._slabs.free(slots)

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
        parts = [self._blocks[block_id].sums for block_id in ids]
        assert None not in parts, "a block in flight was read"
        return np.frombuffer(b"".join(filter(None, parts)), dtype=np.uint64).reshape(len(ids), len(self._layout.stages))

    @property
    def segment_bytes(self) -> int:
        """Bytes of the buffers outside the slabs."""
        return 0

    def recount(self) -> dict[BlockId, int]:
        """The number of owners of each block, for tests to compare with their own count."""
        return {block_id: block.owners for block_id, block in self._blocks.items()}
