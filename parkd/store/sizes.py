"""How many conversations a budget holds, by the store's own rules for slabs, blocks and metadata. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from parkd.state import StateLayout
from parkd.store.blocks import whole_charge
from parkd.store.budget import BLOCK_BYTES, Need, Room, conversation_metadata_bytes
from parkd.store.checkpoints import checkpoint_bytes_of
from parkd.store.records import StoreConfig
from parkd.store.slabs import SlabGeometry

EXAMPLE_TOKENS = (2_000, 8_000, 32_000, 128_000)
"""Lengths of conversations to show, besides one that fills the context."""


@dataclass(frozen=True)
class Sizes:
    """What a store of some layout and budget can hold. Pure."""

    layout: StateLayout
    config: StoreConfig
    checkpoints: int = 1
    """Checkpoints of each conversation, if the model has fixed state."""

    @property
    def budget_bytes(self) -> int:
        return self.config.budget_bytes

    @property
    def slots(self) -> int | None:
        """Most conversations; None: no limit but the budget."""
        return self.config.conversation_slots

    @cached_property
    def geometry(self) -> SlabGeometry:
        config = self.config
        return SlabGeometry.of(self.layout, config.block_tokens, config.slab_bytes, config.budget_bytes)

    def need(self, tokens: int, count: int = 1) -> Need:
        """What `count` conversations of `tokens` tokens need if they share nothing."""
        if self.layout.is_opaque:
            whole = tokens * self.layout.row_bytes + self.layout.fixed_bytes
            fixed = checkpoint_bytes_of(self.layout) * self.checkpoints
            metadata = conversation_metadata_bytes(tokens, self.config.block_tokens) + BLOCK_BYTES
            return Need(0, count * (metadata + whole_charge(whole) + fixed))
        blocks = -(-tokens // self.config.block_tokens)
        fixed = checkpoint_bytes_of(self.layout) * self.checkpoints
        side = conversation_metadata_bytes(tokens, self.config.block_tokens) + blocks * BLOCK_BYTES + fixed
        return Need(blocks * count, side * count)

    def need_bytes(self, tokens: int) -> int:
        need = self.need(tokens)
        return need.slots * self.geometry.slot_bytes + need.side_bytes

    def longest(self) -> int:
        """Tokens of the longest single conversation that is parked whole, in multiples of a block."""
        block = self.config.block_tokens
        return block * _most(lambda blocks: self.need(blocks * block), self.geometry, Room(0, self.budget_bytes))

    def count(self, tokens: int) -> int:
        """How many conversations of `tokens` tokens fit together."""
        fits = self.count_in(Room(0, self.budget_bytes), tokens)
        return fits if self.slots is None else min(fits, self.slots)

    def count_in(self, room: Room, tokens: int) -> int:
        """How many conversations of `tokens` tokens fit in `room`, whatever the slots."""
        return _most(lambda count: self.need(tokens, count), self.geometry, room)


def _most(need: Callable[[int], Need], geometry: SlabGeometry, room: Room) -> int:
    low, high = 0, 1
    while geometry.fits(need(high), room):
        low, high = high, high * 2
    while high - low > 1:  # `low` fits, `high` does not
        middle = (low + high) // 2
        low, high = (middle, high) if geometry.fits(need(middle), room) else (low, middle)
    return low
