"""What people are told of a parked conversation: sizes, times, and what it is worth to the eviction policy."""

from __future__ import annotations

from dataclasses import dataclass

from parkd.state import Costs
from parkd.store.conversations import Conversation, Conversations
from parkd.store.eviction import rated
from parkd.store.policy import Policy
from parkd.store.records import Parked


@dataclass(frozen=True, slots=True, eq=False)
class Listed:
    """A row of the table at one instant."""

    parked: Parked
    ram_bytes: int
    """Of its rows and checkpoints in RAM; what it shares with others is counted for each. 0: it is not in RAM."""
    disk_bytes: int
    """The same for its files."""
    own_bytes: int
    """What its eviction from RAM would free."""
    age_s: float
    """Since it was parked."""
    idle_s: float
    turns: int | None
    """Prompts of it that the store knows of; None if it is not in RAM."""
    value: float | None
    """The policy's score: of what may go, the lowest is evicted first. None if it is not in RAM."""
    saves_s: float | None
    """Expected seconds that its next turn is shorter because it is in RAM."""
    is_pinned: bool
    is_foreign: bool
    """Of other weights, or of a layout that nothing describes, so that the running model cannot use it."""


def listed(table: Conversations, conversation: Conversation, policy: Policy, costs: Costs, now_s: float) -> Listed:
    parked, ram, disk = conversation.parked, conversation.ram, conversation.disk
    ram_bytes = disk_bytes = own_bytes = 0
    turns, value, saves_s = None, None, None
    if ram is not None:
        checkpoints = sum(table.checkpoints.bytes_of(each.id) for each in ram.parked.checkpoints)
        ram_bytes = table.blocks.bytes_of(ram.parked.blocks) + checkpoints
        rating = rated(table, conversation, ram, policy, costs, now_s)
        own_bytes, turns, value = rating.candidate.freed_bytes, ram.history.turns, rating.score
        saves_s = rating.candidate.saved_s(costs)
    if disk is not None:
        disk_bytes = disk.manifest_bytes + sum(ref.taken_bytes for ref in disk.extents)
    return Listed(
        parked,
        ram_bytes,
        disk_bytes,
        own_bytes,
        max(0.0, now_s - parked.parked_at_s),
        max(0.0, now_s - parked.last_used_s),
        turns,
        value,
        saves_s,
        conversation.is_pinned,
        conversation.is_foreign,
    )
