"""Blocks in RAM: a slot of the pool, who owns it, and the checksums of its parts.

An owner is a conversation or a capture in flight. A block lives while it has an owner; its id is never used again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

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
    sums: bytes | None = None
    """The checksums of its parts, 8 bytes a stage; None while the block is being written. Immutable from then on."""

    @property
    def checksums(self) -> npt.NDArray[np.uint64]:
        """`[stages]` of a block that is written."""
        assert self.sums is not None, "a block in flight was read"
        return np.frombuffer(self.sums, dtype=np.uint64)


class BlockPool:
    """The RAM tier's blocks, reference-counted, charged for metadata one by one and for rows a slab at a time."""

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
        """Ids are given from here on, so that none is one that lies on disk."""
        self._next_id = first

    def __len__(self) -> int:
        return len(self._blocks)

    def get(self, block_id: BlockId) -> Block | None:
        return self._blocks.get(block_id)

    def lineage(self, ids: Sequence[BlockId], hashes: Sequence[bytes]) -> list[BlockId]:
        """The first of `ids` that are whole written blocks of these prefix hashes, one behind the other."""
        index = 0
        for block, prefix_hash in zip(map(self._blocks.get, ids), hashes, strict=False):
            if block is None or block.identity != prefix_hash or block.index != index or block.sums is None:
                break
            index += 1
        return list(ids[:index])

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
        """New blocks of (index, rows, identity), owned by `owner`, behind block `after` in memory if that is free.

        The caller has reserved the slots and their metadata. `names` are the ids, where the bytes to come have one
        already because they lie on disk under it; None, or none at all, gives a new one. `sizes` and `file` are of
        states that are no rows. Raises OSError or MemoryError, with nothing taken, for those alone.
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
        """Makes written blocks immutable. `checksums` is `[len(ids), stages]`."""
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
        """Frees what has no owner left."""
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
        return np.frombuffer(b"".join(filter(None, parts)), dtype=np.uint64).reshape(len(ids), -1)

    def recount(self) -> dict[BlockId, int]:
        """Owners of each block, to compare with a count of its own."""
        return {block_id: block.owners for block_id, block in self._blocks.items()}
