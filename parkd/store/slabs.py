"""Host memory for rows, in slabs that are allocated when needed and freed when other bytes need the room.

One slot number addresses the part of every stage. A slab keeps the parts of a stage together, so that neighbouring
slots are one contiguous run for each stage:

    slab   | stage 0: slot 0, slot 1, ... | pad | stage 1: slot 0, slot 1, ... | pad |

Free slots stay in their slab, because memory that was touched before is the fastest to write. Only a slab without used
slots can be freed.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from parkd.state import Bytes, StateLayout
from parkd.store.budget import Budget, Kind, Need, Room
from parkd.store.slots import SlotAllocator

PAGE_BYTES = 4096
LEAST_SLAB_PAGES = 16
"""Least pages per stage, so that the padding to whole pages stays small with tiny budgets."""
MOST_SLAB_SLOTS = 1 << 16
METADATA_SHARE = 64
"""Slabs leave one part in this many of the budget for metadata, unless rows that must fit need it."""
SLABS_IN_BUDGET = 8
SLABS_IN_BUDGET_WITH_FIXED_STATE = 32
"""A budget is divided into at least this many slabs. More with fixed state, which is outside the slabs: room moves
between the two by freeing empty slabs."""


def round_up(size: int, grain: int) -> int:
    return -(-size // grain) * grain


def anonymous(size: int) -> Bytes:
    """`[size]` zeroed bytes, which the machine gets back as soon as nothing refers to them. Raises OSError."""
    if size == 0:
        return np.empty(0, dtype=np.uint8)
    memory = mmap.mmap(-1, size)
    if size >= 2 << 20 and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8)


class SlabHooks(Protocol):
    """Called when host memory is allocated and freed, so that it can be registered with a device."""

    def added(self, memory: Bytes) -> None: ...

    def removed(self, memory: Bytes) -> None: ...


def taken(budget: Budget, kind: Kind, size: int, hooks: SlabHooks | None = None) -> Bytes:
    """`[size]` zeroed bytes, charged to `budget` and reported to `hooks`. Raises OSError or MemoryError, with nothing
    charged."""
    budget.charge(kind, size)
    try:
        memory = anonymous(size)
        if hooks is not None:
            hooks.added(memory)
    except BaseException:
        budget.credit(kind, size)
        raise
    return memory


@dataclass(frozen=True)
class SlabGeometry:
    """The sizes of slots and slabs. Pure."""

    part_bytes: tuple[int, ...]
    """Bytes of one block in each stage."""
    most_slots: int
    """Slots of a full slab."""

    @classmethod
    def of(cls, layout: StateLayout, block_tokens: int, slab_bytes: int, budget_bytes: int) -> SlabGeometry:
        parts = tuple(0 if layout.is_opaque else stage.block_bytes(block_tokens) for stage in layout.stages)
        pieces = SLABS_IN_BUDGET_WITH_FIXED_STATE if layout.has_fixed_state else SLABS_IN_BUDGET
        least = LEAST_SLAB_PAGES * PAGE_BYTES * len(parts)
        target = min(slab_bytes, max(least, budget_bytes // pieces))
        single = cls(parts, 1)
        return cls(parts, max(1, min(MOST_SLAB_SLOTS, single.slots_in_slab(target))))

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes of a slot in all stages; 1 for models without rows."""
        return max(1, sum(self.part_bytes))

    @cached_property
    def full_slab_bytes(self) -> int:
        return self.slab_bytes(self.most_slots)

    def slab_bytes(self, slots: int) -> int:
        """Bytes of a slab with `slots` slots. Each stage begins on a page."""
        return max(PAGE_BYTES, sum(round_up(slots * part, PAGE_BYTES) for part in self.part_bytes))

    def slots_in_slab(self, size: int) -> int:
        """Most slots of one slab of at most `size` bytes, not limited by `most_slots`."""
        slots = max(0, size) // self.slot_bytes
        while slots > 0 and self.slab_bytes(slots) > size:
            slots -= 1
        return slots

    def slots_in(self, size: int) -> int:
        """Most slots of several slabs of at most `size` bytes together."""
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
    """One per stage, `[slots * part_bytes]`."""


class SlabPool:
    """Slots with memory, charged to the budget slab by slab."""

    def __init__(self, geometry: SlabGeometry, budget: Budget, hooks: SlabHooks | None = None) -> None:
        self.geometry = geometry
        self._budget = budget
        self._hooks = hooks
        self._slots = SlotAllocator()
        self._slabs: dict[int, _Slab] = {}
        self._touched_slots = 0
        """Most slots that were ever in use in the present slabs. The system has given memory only for these."""

    @property
    def used_slots(self) -> int:
        return self._slots.used_slots

    @property
    def free_slots(self) -> int:
        return self._slots.free_slots

    @property
    def held_bytes(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.memory.nbytes for slab in self._slabs.values())

    def room(self, freed_slots: Collection[int] = (), freed_side_bytes: int = 0) -> Room:
        """The room if those slots and bytes were freed as well, and empty slabs given back."""
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
        """Bytes that `need` would take from the machine in addition to what was touched before, at least."""
        return max(0, self.used_slots + need.slots - self._touched_slots) * self.geometry.slot_bytes + need.side_bytes

    def reserve(self, need: Need) -> None:
        """Frees slabs and allocates others until the slots are free and the side bytes can be charged.

        The caller has checked that `need` fits `room()`. Raises OSError or MemoryError if the machine has no memory;
        there are then fewer free slots than asked for, and nothing else has changed.
        """
        while not self.geometry.fits(need, Room(self.free_slots, self._budget.free_bytes)):
            self._give_back(self._slots.idle[0])
        while self.free_slots < need.slots:
            self._grow(need.slots - self.free_slots, self._budget.free_bytes - need.side_bytes)

    def grow_ahead(self) -> bool:
        """Allocates a full slab before it is needed. False if the budget has no room."""
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
        """`[size]` bytes of a stage from the start of `slot` on. They may extend into the next slots."""
        base = self._slots.region_of(slot)
        start = (slot - base) * self.geometry.part_bytes[stage]
        return self._slabs[base].stages[stage][start : start + size]

    def close(self) -> None:
        """Frees all slabs. Every slot must be free."""
        for base in self._slots.regions:
            self._give_back(base)

    def regions(self) -> Mapping[int, int]:
        """The first slot of each slab, and how many of its slots are used."""
        return self._slots.regions

    def _grow(self, slots: int, spare_bytes: int) -> None:
        """Allocates one slab: a full one if that leaves the share of metadata, else one of the needed slots."""
        roomy = self.geometry.slots_in_slab(spare_bytes - self._budget.limit_bytes // METADATA_SHARE)
        slots = min(max(slots, roomy), self.geometry.most_slots)
        memory = taken(self._budget, Kind.SLABS, self.geometry.slab_bytes(slots), self._hooks)
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
