"""`parkd plan`: computes how many conversations of a model a budget holds and which it refuses, without loading it.

Takes the flags of `parkd serve`, and applies the store's own rules for slabs, blocks and metadata.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from parkd.config import MIB
from parkd.engine_adapter.base import BLOCK_TOKENS
from parkd.state import Grain, StageLayout, StateLayout
from parkd.store.blocks import whole_charge
from parkd.store.budget import BLOCK_BYTES, Need, Room, conversation_metadata_bytes
from parkd.store.checkpoints import checkpoint_bytes_of
from parkd.store.records import StoreConfig
from parkd.store.slabs import SlabGeometry

EXAMPLE_TOKENS = (2_000, 8_000, 32_000, 128_000)
"""Lengths of the conversations shown, besides one that fills the context."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a store of some layout and budget can hold. Pure."""

    layout: StateLayout
    budget_bytes: int
    slots: int | None = None
    checkpoints: int = 1
    """Checkpoints of each conversation, if the model has fixed state."""

    @property
    def geometry(self) -> SlabGeometry:
        slab_bytes = StoreConfig(self.budget_bytes, BLOCK_TOKENS).slab_bytes
        return SlabGeometry.of(self.layout, BLOCK_TOKENS, slab_bytes, self.budget_bytes)

    def need(self, tokens: int, count: int = 1) -> Need:
        """What `count` conversations of `tokens` tokens need if they share nothing."""
        if self.layout.is_opaque:
            whole = tokens * self.layout.row_bytes + self.layout.fixed_bytes
            fixed = checkpoint_bytes_of(self.layout) * self.checkpoints
            metadata = conversation_metadata_bytes(tokens, BLOCK_TOKENS) + BLOCK_BYTES
            return Need(0, count * (metadata + whole_charge(whole) + fixed))
        blocks = -(-tokens // BLOCK_TOKENS)
        fixed = checkpoint_bytes_of(self.layout) * self.checkpoints
        side = conversation_metadata_bytes(tokens, BLOCK_TOKENS) + blocks * BLOCK_BYTES + fixed
        return Need(blocks * count, side * count)

    def need_bytes(self, tokens: int) -> int:
        need = self.need(tokens)
        return need.slots * self.geometry.slot_bytes + need.side_bytes

    def longest(self) -> int:
        """Tokens of the longest single conversation that is parked whole, in multiples of a block."""
        return BLOCK_TOKENS * _most(lambda blocks: self.need(blocks * BLOCK_TOKENS), self.geometry, self.budget_bytes)

    def count(self, tokens: int) -> int:
        """How many conversations of `tokens` tokens fit together."""
        fits = _most(lambda count: self.need(tokens, count), self.geometry, self.budget_bytes)
        return fits if self.slots is None else min(fits, self.slots)


def _most(need: Callable[[int], Need], geometry: SlabGeometry, budget_bytes: int) -> int:
    low, high = 0, 1
    room = Room(0, budget_bytes)
    while geometry.fits(need(high), room):
        low, high = high, high * 2
    while high - low > 1:  # `low` fits, `high` does not
        middle = (low + high) // 2
        low, high = (middle, high) if geometry.fits(need(middle), room) else (low, middle)
    return low


def layout_of(stages: tuple[StageLayout, ...], grain: Grain = Grain.ROWS) -> StateLayout:
    """The layout of planned stages, used for sizes only; its checksum's name is a placeholder."""
    return StateLayout(stages, "planned", grain)


def lines(name: str, sizes: Sizes, context_tokens: int, min_free_bytes: int) -> list[str]:
    """The plan as lines of text. `context_tokens` is the length of the longest possible conversation."""
    layout, budget = sizes.layout, sizes.budget_bytes
    stages = " | ".join(
        f"layers {stage.first_layer}-{stage.end_layer - 1}: {stage.row_bytes:,} bytes a token"
        + (f", {stage.fixed_bytes:,} fixed" if stage.fixed_bytes else "")
        for stage in layout.stages
    )
    checkpoint = checkpoint_bytes_of(layout)
    state = f"{layout.row_bytes:,} bytes a token" + (f", {checkpoint:,} bytes a checkpoint" if checkpoint else "")
    kept = f"a block is {BLOCK_TOKENS} tokens of all stages, {sizes.geometry.slot_bytes:,} bytes"
    if layout.is_opaque:
        kept = "each conversation is parked whole and shares nothing"
    shown = [
        f"model     {name}, context {context_tokens:,} tokens",
        f"stages    {stages}",
        f"state     {state}; {kept}",
    ]
    if budget == 0:
        return [*shown, "refused   everything: parking is off (--conversation-cache-mib 0)"]
    longest = sizes.longest()
    slots = "" if sizes.slots is None else f", at most {sizes.slots} conversations"
    blocks = "" if layout.is_opaque else f"{longest // BLOCK_TOKENS:,} blocks, "
    shown.append(f"budget    {budget // MIB:,} MiB{slots}: {blocks}{longest:,} tokens in one conversation")
    for tokens in sorted({*(size for size in EXAMPLE_TOKENS if size < context_tokens), context_tokens}):
        size = -(-sizes.need_bytes(tokens) // MIB)
        shown.append(f"fits      {sizes.count(tokens):>6,} conversations of {tokens:>9,} tokens, {size:,} MiB each")
    return [*shown, *_refusals(sizes, context_tokens, longest, min_free_bytes)]


def _refusals(sizes: Sizes, context_tokens: int, longest: int, min_free_bytes: int) -> list[str]:
    fixed = sizes.layout.resume.needs_checkpoints
    shown = []
    if longest == 0:
        need = -(-sizes.need_bytes(1) // MIB)
        least = "one token" if sizes.layout.is_opaque else "one block"
        shown.append(f"refused   everything: {least} and its metadata take {need:,} MiB")
    elif longest < context_tokens and sizes.layout.is_opaque:
        full = -(-sizes.need_bytes(context_tokens) // MIB)
        shown.append(
            f"refused   longer than about {longest:,} tokens: parked whole or not (a full context: {full:,} MiB)"
        )
    elif longest < context_tokens:
        where = "the last checkpoint that fits" if fixed else f"{longest:,} tokens"
        full = -(-sizes.need_bytes(context_tokens) // MIB)
        shown.append(f"in part   longer than {longest:,} tokens: parked up to {where} (a full context: {full:,} MiB)")
    if sizes.slots is not None:
        shown.append(f"refused   conversation {sizes.slots + 1} while the other {sizes.slots} are in use or pinned")
    shown.append(f"refused   anything that would leave less than {min_free_bytes // MIB:,} MiB of memory free")
    shown.append("refused   under --eviction-policy value: what is worth less than all that would be evicted for it")
    return shown
