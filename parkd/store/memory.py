"""The memory of parked state: one budget, the slabs of rows, and the buffers that wait for checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Collection

from parkd.state import StateLayout
from parkd.store.budget import Budget, Kind, Need, Room
from parkd.store.checkpoints import IdleBuffers, checkpoint_bytes_of
from parkd.store.records import StoreConfig
from parkd.store.slabs import SlabGeometry, SlabHooks, SlabPool

CHECKPOINTS_AHEAD_SHARE = 4
"""Of memory that is allocated ahead, one part in this many is for checkpoints: conversations of 80,000 tokens of a 27B
hybrid model, with 8 checkpoints each, take about this share."""


class Memory:
    """What is reserved, and what could be. Opaque states take memory of their own, within the same budget."""

    def __init__(
        self,
        config: StoreConfig,
        layout: StateLayout,
        hooks: SlabHooks | None,
        observer: Callable[[], None] | None,
    ) -> None:
        self.budget = Budget(config.budget_bytes, observer)
        self.geometry = SlabGeometry.of(layout, config.block_tokens, config.slab_bytes, config.budget_bytes)
        self.slabs = SlabPool(self.geometry, self.budget, hooks)
        self.idle = IdleBuffers(checkpoint_bytes_of(layout), self.budget, hooks)

    @property
    def bytes_in_use(self) -> int:
        return self.slabs.used_slots * self.geometry.slot_bytes + self.budget.side_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes in use for rows and opaque states."""
        return self.slabs.used_slots * self.geometry.slot_bytes + self.budget[Kind.SEGMENTS]

    def fits(self, need: Need, room: Room) -> bool:
        return self.geometry.fits(need, room)

    def room(self, freed_slots: Collection[int] = (), freed_side_bytes: int = 0) -> Room:
        """The room if those slots and bytes were freed as well."""
        return self.slabs.room(freed_slots, freed_side_bytes)

    def reserve(self, need: Need, checkpoints: int) -> None:
        """Makes `need` allocatable, which includes this many checkpoints. The caller has checked that it fits `room()`.
        Raises as `SlabPool.reserve` does."""
        need = self._beyond_idle(need, checkpoints)
        while len(self.idle) > checkpoints:
            if self.fits(need, Room(self.slabs.free_slots, self.budget.free_bytes)):
                break
            self.idle.give_back()
        self.slabs.reserve(need)

    def untouched_bytes(self, need: Need, checkpoints: int) -> int:
        """Bytes that `need`, with this many checkpoints, would take from the machine at least."""
        return self.slabs.untouched_bytes(self._beyond_idle(need, checkpoints))

    def grow_ahead(self) -> None:
        """Allocates the budget before it is needed. Raises OSError or MemoryError; what was allocated stays."""
        self.idle.grow_ahead(self.budget.limit_bytes // CHECKPOINTS_AHEAD_SHARE)
        while self.slabs.grow_ahead():
            pass

    def close(self) -> None:
        """Frees all memory. Nothing may be in use."""
        while len(self.idle):
            self.idle.give_back()
        self.slabs.close()

    def _beyond_idle(self, need: Need, checkpoints: int) -> Need:
        """What remains of `need` once this many checkpoints have taken what idle buffers there are."""
        return Need(need.slots, need.side_bytes - min(checkpoints, len(self.idle)) * self.idle.size)
