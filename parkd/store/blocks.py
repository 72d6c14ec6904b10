"""The blocks that there are, each with an optional place in RAM and an optional place on disk.

    block   |-- place in RAM: a slot of the slabs, or memory or a file of its own (an opaque state)
            |-- place on disk: its parts in an extent

An owner is a conversation in RAM or a capture in flight. A place in RAM lives while it has an owner, a place on disk
while its extent does, a block while it has a place. The id of a block is never used again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from parkd.state import Bytes, Grain, RowRun, StateFile, StateLayout
from parkd.store.budget import BLOCK_BYTES, Budget, Kind
from parkd.store.files.manifest import DiskBlock, DiskPlace
from parkd.store.records import BlockId
from parkd.store.slabs import PAGE_BYTES, SlabPool, round_up, taken

Owner = int


@dataclass(frozen=True)
class StateKind:
    """What kind of state a store holds: how that of a layout is cut and resumed. Nothing else in the store asks this in
    another way.

    rows                       many blocks of equal size; resumed at any token
    rows and fixed state       the same; resumed only at checkpoints
    whole, in memory or file   one block of its own size; resumed where its engine can cut it, else at checkpoints
    """

    layout: StateLayout
    block_tokens: int

    @cached_property
    def is_whole(self) -> bool:
        """An opaque state: one block, parked whole or not at all, and moved whole."""
        return self.layout.grain is not Grain.ROWS

    @cached_property
    def is_file(self) -> bool:
        """An opaque state that stays in the file to which its engine writes it."""
        return self.layout.grain is Grain.FILE

    @cached_property
    def needs_checkpoints(self) -> bool:
        """It is resumed only where there is a checkpoint."""
        return self.layout.resume.needs_checkpoints

    @cached_property
    def stages(self) -> int:
        return len(self.layout.stages)

    def blocks(self, position: int) -> int:
        """How many blocks hold `[0, position)`."""
        return 1 if self.is_whole else -(-position // self.block_tokens)


@dataclass(slots=True)
class Block:
    """Rows `[index * block_tokens, index * block_tokens + rows)` of all stages. An opaque state is one block from 0,
    with as many rows as it has tokens; its bytes cannot be cut, so conversations that differ never share one."""

    index: int
    rows: int
    identity: bytes
    """Stands for the units up to the end of the block."""
    ram: int | None = None
    """Its place in RAM, by number."""
    disk: DiskPlace | None = None
    file: StateFile | None = None
    """The file of an opaque state that stays in it: its place in RAM has no bytes."""
    sums: bytes | None = None
    """The checksums of its parts, 8 bytes per stage; None before they are known."""
    is_sealed: bool = False
    """Its place in RAM holds its bytes, which are immutable from then on."""
    owners: int = 0
    owners_xor: int = 0
    """Exclusive or of all owners, which is the owner itself if there is only one."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A block that needs a place in RAM."""

    index: int
    rows: int
    identity: bytes
    size: int = 0
    """Bytes of an opaque state."""
    file: StateFile | None = None


class Freed(NamedTuple):
    """What goes with blocks that only one owner holds."""

    blocks: int
    slots: int
    outside_bytes: int
    """Bytes outside the slabs, without metadata."""


class RowPlaces:
    """Where rows are in RAM: every block takes a slot of the slabs. Places are numbers, as for `WholePlaces`."""

    are_slots = True

    def __init__(self, layout: StateLayout, block_tokens: int, slabs: SlabPool) -> None:
        self._stages = layout.stages
        self._block_tokens = block_tokens
        self._slabs = slabs

    def take(self, shapes: Sequence[Shape], after: int | None) -> list[int]:
        """A place for each, after the place `after` if that is free. The room was reserved before."""
        return self._slabs.allocate(len(shapes), after)

    def free(self, places: Iterable[int]) -> None:
        self._slabs.free(places)

    @property
    def held_bytes(self) -> int:
        """Bytes of all memory outside the slabs."""
        return 0

    def bytes_of(self, places: Sequence[int]) -> int:
        """Bytes of the budget that they take, without metadata."""
        return len(places) * self._slabs.geometry.slot_bytes

    def runs(self, blocks: Sequence[Block], stop: int, *, writeable: bool) -> list[tuple[RowRun, ...]]:
        """The rows of consecutive blocks up to `stop`, for each stage in as few contiguous runs as memory allows."""
        slots = [_place(block) for block in blocks]
        breaks = [at for at, (slot, after) in enumerate(pairwise(slots), 1) if after != slot + 1]
        pieces: list[tuple[int, int, int]] = []
        for start, end in zip([0, *breaks], [*breaks, len(blocks)], strict=True) if blocks else ():
            first, last = blocks[start], blocks[end - 1]
            rows = min(last.index * self._block_tokens + last.rows, stop)
            pieces.append((first.index * self._block_tokens, rows, slots[start]))
        return [self._stage_runs(stage, pieces, writeable) for stage in range(len(self._stages))]

    def _stage_runs(self, stage: int, pieces: list[tuple[int, int, int]], writeable: bool) -> tuple[RowRun, ...]:
        runs = []
        for first, last, slot in pieces:
            blocks = -(-(last - first) // self._block_tokens)
            buffer = self._slabs.buffer(stage, slot, self._stages[stage].block_bytes(last - first, blocks))
            buffer.flags.writeable = writeable
            runs.append(RowRun(first, last, buffer))
        return tuple(runs)


def whole_charge(size: int) -> int:
    """Bytes of the budget that an opaque state of this size takes in memory, which is allocated in whole pages."""
    return round_up(size, PAGE_BYTES)


class WholePlaces:
    """Opaque states: each has memory of its own outside the slabs, or stays in its file and takes none."""

    are_slots = False

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._wholes: dict[int, Bytes] = {}
        self._numbers = count()

    def take(self, shapes: Sequence[Shape], after: int | None) -> list[int]:  # noqa: ARG002 - buffers have no order
        """Raises OSError or MemoryError with nothing taken: there is one shape."""
        return [self._take(0 if shape.file is not None else shape.size) for shape in shapes]

    def free(self, places: Iterable[int]) -> None:
        charged = sum(whole_charge(self._wholes.pop(place).nbytes) for place in places)
        self._budget.credit(Kind.SEGMENTS, charged)

    def bytes_of(self, places: Iterable[int]) -> int:
        return sum(whole_charge(self._wholes[place].nbytes) for place in places)

    def runs(self, blocks: Sequence[Block], stop: int, *, writeable: bool) -> list[tuple[RowRun, ...]]:  # noqa: ARG002
        """The only run of the only stage: a state is always moved whole."""
        runs = []
        for block in blocks:
            buffer = self._wholes[_place(block)][:]
            buffer.flags.writeable = writeable
            runs.append(RowRun(0, block.rows, buffer, block.file))
        return [tuple(runs)]

    @property
    def held_bytes(self) -> int:
        return self.bytes_of(self._wholes)

    def _take(self, size: int) -> int:
        number = next(self._numbers)
        self._wholes[number] = taken(self._budget, Kind.SEGMENTS, whole_charge(size))[:size]
        return number


def _place(block: Block) -> int:
    assert block.ram is not None, "a block that is not in RAM was read"
    return block.ram


class BlockTable:
    """Every block once. Those in RAM are reference-counted; their metadata is charged block by block."""

    def __init__(self, places: RowPlaces | WholePlaces, stages: int, budget: Budget, first: BlockId = 1) -> None:
        """Ids count up from `first`."""
        self.places = places
        self._stages = stages
        self._budget = budget
        self._blocks: dict[BlockId, Block] = {}
        self._next_id = first
        self._in_ram = 0
        self._exclusive: Counter[Owner] = Counter()
        self._shared: set[BlockId] = set()
        self._changed: set[Owner] = set()

    def get(self, block_id: BlockId) -> Block | None:
        return self._blocks.get(block_id)

    def __getitem__(self, block_id: BlockId) -> Block:
        return self._blocks[block_id]

    @property
    def in_ram(self) -> int:
        return self._in_ram

    @property
    def shared(self) -> int:
        """Blocks in RAM with more than one owner."""
        return len(self._shared)

    def lineage(self, ids: Sequence[BlockId], hashes: Sequence[bytes]) -> list[BlockId]:
        """The longest prefix of `ids` that are whole blocks in RAM with these prefix hashes, in order."""
        index = 0
        for block, prefix_hash in zip(map(self._blocks.get, ids), hashes, strict=False):
            if block is None or block.identity != prefix_hash or block.index != index or not block.is_sealed:
                break
            index += 1
        return list(ids[:index])

    # Owners of places in RAM

    def exclusive(self, owner: Owner) -> int:
        """Blocks that only this owner holds."""
        return self._exclusive[owner]

    def freed_by(self, owner: Owner, ids: Sequence[BlockId]) -> Freed:
        """What would be freed if the owner released `ids`, which are all blocks that it holds."""
        alone = self._exclusive[owner]
        if self.places.are_slots:
            return Freed(alone, alone, 0)
        places = [_place(block) for block in map(self._blocks.__getitem__, ids) if block.owners == 1]
        return Freed(alone, 0, self.places.bytes_of(places))

    def freed_with(self, holdings: Iterable[Iterable[BlockId]]) -> tuple[list[int], int]:
        """The slots that would be freed if all of these owners released their blocks, and the bytes outside the slabs,
        with metadata."""
        held = Counter(block_id for ids in holdings for block_id in ids)
        places = [_place(self._blocks[i]) for i, owners in held.items() if self._blocks[i].owners == owners]
        metadata_bytes = len(places) * BLOCK_BYTES
        if self.places.are_slots:
            return places, metadata_bytes
        return [], metadata_bytes + self.places.bytes_of(places)

    def bytes_of(self, ids: Sequence[BlockId]) -> int:
        """Bytes of the budget that their places in RAM take, without metadata."""
        return self.places.bytes_of([_place(self._blocks[block_id]) for block_id in ids])

    def take_changed(self) -> set[Owner]:
        """Owners whose number of exclusive blocks was changed by others since the last call."""
        changed, self._changed = self._changed, set()
        return changed

    def place(
        self,
        owner: Owner,
        shapes: Sequence[Shape],
        names: Sequence[BlockId | None],
        after: BlockId | None,
    ) -> list[BlockId]:
        """Gives blocks a place in RAM, owned by `owner`: for each of `shapes` the block of that name, which is on disk
        alone, or a new one. In memory they come after block `after` if that is free.

        The caller has reserved the slots and the metadata. Raises OSError or MemoryError, only for opaque states, with
        nothing taken.
        """
        places = self.places.take(shapes, None if after is None else self._blocks[after].ram)
        self._budget.charge(Kind.METADATA, BLOCK_BYTES * len(shapes))
        ids = []
        for shape, name, place in zip(shapes, names, places, strict=True):
            if name is None:
                name = self.new_id()
                self._blocks[name] = Block(shape.index, shape.rows, shape.identity)
            block = self._blocks[name]
            assert block.ram is None, "a block has one place in RAM"
            block.ram, block.file, block.owners, block.owners_xor = place, shape.file, 1, owner
            ids.append(name)
        self._in_ram += len(ids)
        self._exclusive[owner] += len(ids)
        return ids

    def new_id(self) -> BlockId:
        self._next_id += 1
        return self._next_id - 1

    def seal(self, ids: Sequence[BlockId], checksums: npt.NDArray[np.uint64] | None) -> None:
        """Makes blocks immutable whose places in RAM have been filled. `checksums` is `[len(ids), stages]`; None for
        blocks that were read from disk, and compared with theirs."""
        blocks = [self._blocks[block_id] for block_id in ids]
        if checksums is not None:
            for block, sums in zip(blocks, checksums, strict=True):
                block.sums = sums.tobytes()
        for block in blocks:
            block.is_sealed = True

    def hold(self, owner: Owner, ids: Sequence[BlockId]) -> None:
        """Adds an owner to blocks in RAM."""
        lost, shared = [], []
        for block_id, block in zip(ids, map(self._blocks.__getitem__, ids), strict=True):
            if block.owners == 1:
                lost.append(block.owners_xor)
                shared.append(block_id)
            block.owners += 1
            block.owners_xor ^= owner
        self._exclusive.subtract(lost)
        self._changed.update(lost)
        self._shared.update(shared)

    def release(self, owner: Owner, ids: Sequence[BlockId]) -> None:
        """Takes an owner off blocks, and empties the places in RAM of those without another."""
        blocks, shared = self._blocks, self._shared
        alone = [block_id for block_id in ids if block_id not in shared]
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
        self.places.free([_place(blocks[block_id]) for block_id in alone])
        self._budget.credit(Kind.METADATA, BLOCK_BYTES * len(alone))
        self._in_ram -= len(alone)
        self._exclusive[owner] -= len(alone)
        for block_id in alone:
            block = blocks[block_id]
            if block.disk is None:
                del blocks[block_id]
            else:
                block.ram, block.is_sealed, block.owners, block.owners_xor = None, False, 0, 0
        if self._exclusive[owner] == 0:
            del self._exclusive[owner]
            self._changed.discard(owner)

    # Places on disk

    def put_on_disk(self, block_id: BlockId, index: int, found: DiskBlock) -> None:
        """Notes where a block is on disk that has no place there yet, and adds the block if it is unknown."""
        block = self._blocks.get(block_id)
        if block is None:
            block = self._blocks[block_id] = Block(index, found.rows, found.identity, sums=found.sums.tobytes())
        assert block.disk is None, "a block has one place on disk"
        block.disk = found.place

    def take_off_disk(self, ids: Iterable[BlockId]) -> None:
        """Empties the places on disk, whose extent is gone or damaged."""
        for block_id in ids:
            block = self._blocks[block_id]
            block.disk = None
            if block.ram is None:
                del self._blocks[block_id]

    # What moves

    def runs(self, ids: Sequence[BlockId], stop: int, *, writeable: bool) -> list[tuple[RowRun, ...]]:
        """The rows of consecutive blocks in RAM up to `stop`, by stage."""
        return self.places.runs(list(map(self._blocks.__getitem__, ids)), stop, writeable=writeable)

    def buffers(self, block_id: BlockId, block_tokens: int, *, writeable: bool) -> list[Bytes]:
        """The rows of one block in RAM, `[rows * row_bytes]` for each stage."""
        block = self._blocks[block_id]
        stop = block.index * block_tokens + block.rows
        return [runs[0].buffer for runs in self.runs([block_id], stop, writeable=writeable)]

    def checksums(self, ids: Sequence[BlockId]) -> npt.NDArray[np.uint64]:
        """`[len(ids), stages]` of sealed blocks."""
        blocks = [self._blocks[block_id] for block_id in ids]
        assert all(block.is_sealed for block in blocks), "a block in flight was read"
        sums = b"".join(filter(None, (block.sums for block in blocks)))
        return np.frombuffer(sums, dtype=np.uint64).reshape(len(ids), self._stages)

    def items(self) -> Iterable[tuple[BlockId, Block]]:
        return self._blocks.items()
