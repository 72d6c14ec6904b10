"""Host memory for rows: slabs, taken when they are needed and given back when other bytes need the room.

One slot number addresses the part of every stage. A slab keeps the parts of a stage together, so that neighbouring
slots are one contiguous run for each stage:

    slab   | stage 0: slot 0, slot 1, ... | pad | stage 1: slot 0, slot 1, ... | pad |

Freed slots stay in their slab: memory that was touched once is the fastest to write again. Only a slab with no slot in
use can be given back.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from parkd.store.budget import Budget, Kind, Need, Room
from parkd.store.slots import SlotAllocator
from parkd.types import Bytes, StateLayout

PAGE_BYTES = 4096
LEAST_SLAB_PAGES = 16
"""A stage, so that the padding to whole pages stays small where budgets are tiny."""
MOST_SLAB_SLOTS = 1 << 16
METADATA_SHARE = 64
"""Slabs leave one part in so many of the budget to metadata, unless rows that must fit need it."""
SLABS_IN_BUDGET = 8
SLABS_IN_BUDGET_WITH_FIXED_STATE = 32
"""A budget is cut in at least so many slabs. Fixed state lives outside the slabs, so there the cut is finer: room moves
between the two by giving back empty slabs."""


def round_up(size: int, grain: int) -> int:
    return -(-size // grain) * grain


def anonymous(size: int) -> Bytes:
    """`[size]` zeroed bytes that go back to the machine as soon as nobody refers to them. Raises OSError."""
    if size == 0:
        return np.empty(0, dtype=np.uint8)
    memory = mmap.mmap(-1, size)
    if size >= 2 << 20 and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8)


class SlabHooks(Protocol):
    """Told of host memory that comes and goes, so that it can be registered with a device."""

    def added(self, memory: Bytes) -> None: ...

    def removed(self, memory: Bytes) -> None: ...


@dataclass(frozen=True)
class SlabGeometry:
    """How many bytes slots take. Pure."""

    part_bytes: tuple[int, ...]
    """Bytes of one block in each stage."""
    most_slots: int
    """Slots of a full slab."""

    @classmethod
    def of(cls, layout: StateLayout, block_tokens: int, slab_bytes: int, budget_bytes: int) -> SlabGeometry:
        parts = tuple(0 if layout.is_opaque else stage.row_bytes * block_tokens for stage in layout.stages)
        pieces = SLABS_IN_BUDGET_WITH_FIXED_STATE if layout.fixed_bytes else SLABS_IN_BUDGET
        least = LEAST_SLAB_PAGES * PAGE_BYTES * len(parts)
        target = min(slab_bytes, max(least, budget_bytes // pieces))
        single = cls(parts, 1)
        return cls(parts, max(1, min(MOST_SLAB_SLOTS, single.slots_in_slab(target))))

    @cached_property
    def slot_bytes(self) -> int:
        """All stages. At least 1, for models that keep no rows at all."""
        return max(1, sum(self.part_bytes))

    @cached_property
    def full_slab_bytes(self) -> int:
        return self.slab_bytes(self.most_slots)

    def slab_bytes(self, slots: int) -> int:
        """Bytes of a slab with so many slots; each stage begins on a page."""
        return max(PAGE_BYTES, sum(round_up(slots * part, PAGE_BYTES) for part in self.part_bytes))

    def slots_in_slab(self, size: int) -> int:
        """Most slots of one slab of at most `size` bytes, however many those are."""
        slots = max(0, size) // self.slot_bytes
        while slots > 0 and self.slab_bytes(slots) > size:
            slots -= 1
        return slots

    def slots_in(self, size: int) -> int:
        """Most slots of any number of slabs that take at most `size` bytes together."""
        full, rest = divmod(max(0, size), self.full_slab_bytes)
        return full * self.most_slots + min(self.most_slots, self.slots_in_slab(rest))

    def fits(self, need: Need, room: Room) -> bool:
        spare, wanted = room.free_bytes - need.side_bytes, need.slots - room.open_slots
        if spare < 0 or wanted <= 0:
            return spare >= 0
        return wanted * self.slot_bytes <= spare and wanted <= self.slots_in(spare)


@dataclass(frozen=True, eq=False)
class _Slab:
    memory: Bytes
    stages: tuple[Bytes, ...]
    """A stage each, `[slots * part_bytes]`."""


class SlabPool:
    """Slots with memory behind them, charged to the budget a slab at a time."""

    def __init__(self, geometry: SlabGeometry, budget: Budget, hooks: SlabHooks | None = None) -> None:
        self.geometry = geometry
        self._budget = budget
        self._hooks = hooks
        self._slots = SlotAllocator()
        self._slabs: dict[int, _Slab] = {}
        self._touched_slots = 0
        """The most slots that were ever in use in the slabs there are: the machine gave memory for no more."""

    @property
    def used_slots(self) -> int:
        return self._slots.used_slots

    @property
    def free_slots(self) -> int:
        return self._slots.free_slots

    def room(self, freed_slots: Collection[int] = (), freed_side_bytes: int = 0) -> Room:
        """The room there would be if those slots and bytes were free, and empty slabs were given back."""
        idle = self._slots.idle
        if freed_slots:
            freed = Counter(self._slots.region_of(slot) for slot in freed_slots)
            idle += [base for base, count in freed.items() if count == self._slots.used(base)]
        open_slots, slab_bytes = self._slots.free_slots + len(freed_slots), self._budget[Kind.SLABS]
        for base in idle:
            open_slots -= self._slots.size(base)
            slab_bytes -= self._slabs[base].memory.nbytes
        return Room(open_slots, self._budget.limit_bytes - self._budget.side_bytes + freed_side_bytes - slab_bytes)

    def untouched_bytes(self, need: Need) -> int:
        """What `need` would take from the machine beyond what was written before, at least."""
        return max(0, self.used_slots + need.slots - self._touched_slots) * self.geometry.slot_bytes + need.side_bytes

    def reserve(self, need: Need) -> None:
        """Gives slabs back and takes new ones until the slots are free and the side bytes may be charged.

        The caller has seen that `need` fits `room()`. Raises OSError or MemoryError if the machine has no memory; then
        fewer slots are free than asked for, and nothing else has changed.
        """
        while not self.geometry.fits(need, Room(self.free_slots, self._budget.free_bytes)):
            self._give_back(self._slots.idle[0])
        while self.free_slots < need.slots:
            self._grow(need.slots - self.free_slots, self._budget.free_bytes - need.side_bytes)

    def grow_ahead(self) -> bool:
        """Adds a full slab before anyone needs it, if the budget has the room. False if not."""
        room = self._budget.free_bytes - self._budget.limit_bytes // METADATA_SHARE
        if not any(self.geometry.part_bytes):
            return False
        if self.geometry.slab_bytes(self.geometry.most_slots) > room:
            return False
        self._grow(self.geometry.most_slots, self._budget.free_bytes)
        return True

    def allocate(self, count: int, after: int | None) -> list[int]:
        slots = self._slots.allocate(count, after)
        self._touched_slots = max(self._touched_slots, self.used_slots)
        return slots

    def free(self, slots: Iterable[int]) -> None:
        self._slots.free(slots)

    def buffer(self, stage: int, slot: int, size: int) -> Bytes:
        """`[size]` bytes of a stage from the start of `slot`, which may reach into the slots that follow."""
        base = self._slots.region_of(slot)
        start = (slot - base) * self.geometry.part_bytes[stage]
        return self._slabs[base].stages[stage][start : start + size]

    def close(self) -> None:
        """Gives all slabs back. Every slot must be free."""
        for base in self._slots.regions:
            self._give_back(base)

    def regions(self) -> Mapping[int, int]:
        """First slot of each slab -> slots in use."""
        return self._slots.regions

    def _grow(self, slots: int, spare_bytes: int) -> None:
        """Adds one slab: full if the spare bytes allow and leave the metadata its share, else what is needed."""
        roomy = self.geometry.slots_in_slab(spare_bytes - self._budget.limit_bytes // METADATA_SHARE)
        slots = min(max(slots, roomy), self.geometry.most_slots)
        size = self.geometry.slab_bytes(slots)
        self._budget.charge(Kind.SLABS, size)
        try:
            memory = anonymous(size)
            if self._hooks is not None:
                self._hooks.added(memory)
        except BaseException:
            self._budget.credit(Kind.SLABS, size)
            raise
        stages, at = [], 0
        for part in self.geometry.part_bytes:
            stages.append(memory[at : at + slots * part])
            at += round_up(slots * part, PAGE_BYTES)
        self._slabs[self._slots.add_region(slots)] = _Slab(memory, tuple(stages))

    def _give_back(self, base: int) -> None:
        self._touched_slots = max(self.used_slots, self._touched_slots - self._slots.size(base))
        self._slots.remove_region(base)
        slab = self._slabs.pop(base)
        size = slab.memory.nbytes
        if self._hooks is not None:
            self._hooks.removed(slab.memory)
        del slab
        self._budget.credit(Kind.SLABS, size)
