"""How a turn starts: the pure decision over what is live, what is parked and what things cost.

live     truncate to the common prefix and read on
parked   restore rows [keep_rows, position) and read on; rows [0, keep_rows) are in the arenas already
cold     read everything
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from parkd.engine_adapter.base import BLOCK_TOKENS
from parkd.identity.matcher import (
    StartOption,
    choose_start,
    cold_start,
    common_prefix,
    image_at,
    resumable_position,
)
from parkd.lane.live_conversation import LiveConversation
from parkd.state import Costs, StateLayout
from parkd.store.records import Parked, Tier
from parkd.types import CacheOutcome, PromptIdentity, Units

DISK_READ_S = 0.001
"""Cost of a read from disk besides its bytes: opening files and switching between threads."""


@dataclass(frozen=True, slots=True)
class StartPlan:
    option: StartOption
    keep_rows: int
    """Live rows `[0, keep_rows)` stay in the arenas; the others are overwritten."""
    parked: Parked | None
    """The conversation to restore; None: none."""
    common: int = 0
    """Tokens of the longest prefix that the prompt shares with anything live or parked."""
    known: int = 0
    """Tokens of the conversation that shares it."""
    resumable: int = 0
    """The last position that the turn could start from, whatever it costs."""

    nearest: Units | None = field(default=None, compare=False, repr=False)
    """The units that share `common` with the prompt, if both continue differently after it."""

    @property
    def is_on_disk(self) -> bool:
        """Whether the conversation must be read into RAM first."""
        return self.parked is not None and self.parked.tier is Tier.DISK

    @property
    def outcome(self) -> CacheOutcome:
        """For reports: state that was promoted for this start counts as restored from disk."""
        if self.parked is not None and self.parked.tier is not Tier.RAM:
            return CacheOutcome.RESTORED_DISK
        return self.option.outcome


def decide_start(
    prompt: PromptIdentity,
    live: LiveConversation,
    candidates: Sequence[Parked],
    *,
    layout: StateLayout,
    live_checkpoints: Sequence[int],
    cost: Costs,
    rewind_floor: int | None = None,
    has_spare: bool = False,
) -> StartPlan:
    """The cheapest exact start.

    The live state can be cut to `live_checkpoints` and to every position from `rewind_floor` on. A floor of None means
    0 without fixed state, and the live position with it. `has_spare`: the engine can keep several conversations live.
    Then a live conversation that is parked is not cut to less than half, since returning to it would need a restore.
    """
    length = len(prompt)
    plans = [StartPlan(cold_start(length), 0, None)]
    deepest_common, deepest_known, deepest_position = 0, 0, 0
    nearest: Units | None = None
    if live.key == prompt.key:
        common = common_prefix(live.units, prompt.units)
        floor = rewind_floor if rewind_floor is not None else layout.resume.floor
        floor = live.position if floor is None else floor
        position = resumable_position(common, length, floor, live_checkpoints, prompt.images)
        is_worth_more = has_spare and live.parked_id is not None and live.position - position > position
        if position > 0 and not is_worth_more:
            plans.append(StartPlan(StartOption(CacheOutcome.LIVE, position, length), position, None))
        deepest_common, deepest_known, deepest_position = common, live.position, position
        nearest = live.units
    for parked in candidates:
        if parked.layout_digest != layout.digest:
            continue
        common = common_prefix(parked.units, prompt.units)
        checkpoints = [checkpoint.position for checkpoint in parked.checkpoints]
        position = resumable_position(common, length, layout.resume.floor, checkpoints, prompt.images)
        if common > deepest_common:
            deepest_common, deepest_known, nearest = common, len(parked.units), parked.units
        deepest_position = max(deepest_position, position)
        if position > 0:
            plans.append(_restore_plan(parked, position, length, live, layout))
    best = choose_start([plan.option for plan in plans], cost).option
    plan = next(plan for plan in plans if plan.option is best)
    if deepest_common == min(deepest_known, length):
        nearest = None
    return replace(plan, common=deepest_common, known=deepest_known, resumable=deepest_position, nearest=nearest)


def plan_cold(prompt: PromptIdentity) -> StartPlan:
    return StartPlan(cold_start(len(prompt)), 0, None)


def _restore_plan(parked: Parked, position: int, length: int, live: LiveConversation, layout: StateLayout) -> StartPlan:
    # The last block is restored even if it is live: there is always a row to copy, beside a checkpoint at its end.
    keep = min(live.shared_rows(parked.blocks), (position - 1) // BLOCK_TOKENS * BLOCK_TOKENS)
    moved = (position - keep) * layout.row_bytes + layout.fixed_bytes
    if layout.is_opaque:  # restored whole, then cut
        keep, moved = 0, parked.position * layout.row_bytes + layout.fixed_bytes
    tier = CacheOutcome.RESTORED_DISK if parked.tier is Tier.DISK else CacheOutcome.RESTORED_RAM
    extra_s = DISK_READ_S if parked.tier is Tier.DISK else 0.0
    option = StartOption(tier, position, length, move_bytes=moved, extra_s=extra_s, conversation=parked.id)
    return StartPlan(option, keep, parked)


def explain(prompt: PromptIdentity, plan: StartPlan, gone: str) -> str:
    """Why tokens are read although part of this prompt was known; empty if there is nothing to explain.

    For the header and the log, so it contains no text of the prompt. `gone` is the store's explanation of what it no
    longer holds beyond the common prefix.
    """
    position, length = plan.option.position, len(prompt)
    if position >= length - 1:
        return ""
    if gone:
        return gone
    if position < plan.resumable:
        return f"reading is cheaper than restoring {plan.resumable} tokens"
    if 0 < plan.common < min(plan.known, length):
        label = next((span.label for span in prompt.segments if span.start <= plan.common < span.stop), "the prompt")
        image = image_at(prompt, plan.common)
        return f"differs from token {plan.common} in {f'{image} of ' if image else ''}{label}"
    if position < plan.common:
        return f"no exact state between tokens {position} and {plan.common}"
    return ""
