"""`parkd plan`: computes how many conversations of a model a budget holds and which it refuses, without loading it.

Takes the flags of `parkd serve`, and applies the store's own rules for slabs, blocks and metadata.
"""

from __future__ import annotations

from parkd.config import MIB
from parkd.state import Grain, StageLayout, StateLayout
from parkd.store.checkpoints import checkpoint_bytes_of
from parkd.store.sizes import EXAMPLE_TOKENS, Sizes


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
    kept = f"a block is {layout.block_tokens} tokens of all stages, {sizes.geometry.slot_bytes:,} bytes"
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
    blocks = "" if layout.is_opaque else f"{longest // layout.block_tokens:,} blocks, "
    whole = min(longest, context_tokens)
    shown.append(f"budget    {budget // MIB:,} MiB{slots}: {blocks}{whole:,} tokens in one conversation")
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
