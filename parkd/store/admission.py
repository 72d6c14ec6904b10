"""Decides whether and how far a live conversation is parked, and what is evicted for it.

Only reads the table; the store carries the decision out. Nothing is evicted for a conversation that is then refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from parkd.state import Costs
from parkd.store.budget import Need, Room, mib
from parkd.store.conversations import Conversation, Conversations, superseded
from parkd.store.eviction import Queue
from parkd.store.history import History
from parkd.store.planning import Plan
from parkd.store.policy import Evictable, Policy, longest_position
from parkd.store.records import ConversationId, RefusalReason, Refused, StoreConfig

LEAST_PART = 8
"""A conversation that is worth less than what would be evicted for it is parked as far as it fits without evictions, if
that adds at least one part in this many of it."""

Replaced = tuple[Conversation, ...]
"""Conversations that a capture will supersede."""


@dataclass(frozen=True, eq=False)
class Decision:
    """How far to park, and the order in which others are evicted until there is room; None: there is room."""

    position: int
    queue: Queue | None
    prefixes: Sequence[Conversation] = ()
    """Parked prefixes of the same conversation, in RAM."""


@dataclass(frozen=True, eq=False)
class Admission:
    """Decisions about plans, over what is in RAM now."""

    config: StoreConfig
    table: Conversations
    policy: Policy

    def decide(
        self,
        plan: Plan,
        in_flight: Sequence[Replaced],
        history: History,
        costs: Costs,
        now_s: float,
        *,
        is_returning: bool = False,
        expected_since_s: float | None = None,
    ) -> Decision | Refused:
        """The position up to which to park, and what to evict for it until `has_room`. `is_returning`: it is known to
        return now, so it is never refused for value. `expected_since_s`: it is on disk, was used then, and is expected
        to return: under every policy it is refused unless it is worth more than what would be evicted."""
        ends = plan.ends
        if ends is not None and not ends:
            return Refused(RefusalReason.NO_CHECKPOINT, "the engine holds no checkpoint to resume from")
        longest = len(plan.units) if ends is None else ends[-1]
        found = self.table.prefixes_of(plan.key_digest, plan.units, plan.prefix_hashes)
        prefixes = [each for each in found if each.ram is not None]
        if self.has_room(plan, longest, in_flight, prefixes):
            return Decision(longest, None, prefixes)
        bound = self.config.conversation_slots
        if bound is not None and self._slots_taken(in_flight, replaced(plan, longest, prefixes), evicted=True) > bound:
            return Refused(RefusalReason.SLOTS, f"all {bound} conversation slots are leased, pinned or being written")
        # A part reaches further than all prefixes, so it supersedes the same ones.
        gone = replaced(plan, longest, prefixes)
        queue = Queue(self.table, self.policy, costs, now_s, family=prefixes, superseded=gone)
        position = longest
        if not self._surely_fits(plan.need(longest), queue):
            room, freeable = self.table.most_room()
            position = longest_position(longest, ends, lambda at: self.table.memory.fits(plan.need(at), room))
            known = self._known(plan, prefixes)
            if position < longest and position < known + self.config.block_tokens:
                message = f"needs {mib(plan.need_bytes(longest))}, {mib(max(0, freeable))} could be freed"
                if position:
                    message += f"; its first {position} tokens would fit, {known} are parked already"
                return Refused(RefusalReason.BUDGET, message)
        is_expected = expected_since_s is not None
        incoming = Evictable(
            "",
            position,
            plan.fresh_bytes(position),
            queue.now_s,
            queue.now_s if expected_since_s is None else expected_since_s,
            position - plan.start(position),
            history,
            is_on_disk=is_expected,
            is_expected=is_expected,
        )
        is_selective = (self.policy.margin > 0 and not is_returning) or is_expected
        if is_selective and not self._is_worth(incoming, plan, in_flight, prefixes, queue, costs):
            part = self._free_part(plan, longest, in_flight, prefixes)
            if part:
                return Decision(part, None, prefixes)
            return Refused(RefusalReason.VALUE, "what would be evicted for it is expected to save more")
        return Decision(position, queue, prefixes)

    def _free_part(
        self,
        plan: Plan,
        longest: int,
        in_flight: Sequence[Replaced],
        prefixes: Sequence[Conversation],
    ) -> int:
        """The last resumable position that fits without evictions, if that is worth having; else 0."""
        least = self._known(plan, prefixes) + max(self.config.block_tokens, -(-longest // LEAST_PART))
        position = longest_position(longest, plan.ends, lambda at: self.has_room(plan, at, in_flight, prefixes))
        return position if position >= least else 0

    def _known(self, plan: Plan, prefixes: Sequence[Conversation]) -> int:
        """Leading tokens that are parked already. A part that adds less than a block to them is useless: reading so few
        tokens takes no longer than restoring them, and others would be evicted for it."""
        parked = max((each.parked.position for each in prefixes), default=0)
        return max(parked, len(plan.held) * self.config.block_tokens)

    def has_room(
        self, plan: Plan, position: int, in_flight: Sequence[Replaced], prefixes: Sequence[Conversation]
    ) -> bool:
        """Whether the plan fits up to `position` now."""
        bound = self.config.conversation_slots
        if bound is not None and self._slots_taken(in_flight, replaced(plan, position, prefixes)) > bound:
            return False
        return self.table.memory.fits(plan.need(position), self.table.memory.room())

    def above_floor(
        self, plan: Plan, outcome: Decision | Refused, free_memory: Callable[[], int] | None
    ) -> Decision | Refused:
        """Turns a decision into a refusal if it would leave the machine less free memory than `min_free_bytes`."""
        if free_memory is None or isinstance(outcome, Refused):
            return outcome
        checkpoints = len(plan.checkpoints_at(outcome.position))
        taken, free = self.table.memory.untouched_bytes(plan.need(outcome.position), checkpoints), free_memory()
        if free - taken >= self.config.min_free_bytes:
            return outcome
        floor = mib(self.config.min_free_bytes)
        message = f"needs {mib(taken)} of the machine's free {mib(free)}, of which {floor} must stay free"
        return Refused(RefusalReason.MEMORY_FLOOR, message)

    def _surely_fits(self, need: Need, queue: Queue) -> bool:
        """True if what the candidates free one by one is enough, so that the costly count of what they share is not
        needed."""
        room = self.table.memory.room()
        freed = Room(room.open_slots + queue.freed_slots, room.free_bytes + queue.freed_side_bytes)
        return self.table.memory.fits(need, freed)

    def _is_worth(
        self,
        incoming: Evictable,
        plan: Plan,
        in_flight: Sequence[Replaced],
        prefixes: Sequence[Conversation],
        queue: Queue,
        costs: Costs,
    ) -> bool:
        """Whether the plan scores more than the policy's margin times the best of what would be evicted for it."""
        room, bound, position = self.table.memory.room(), self.config.conversation_slots, incoming.position
        missing = plan.need_bytes(position) - room.open_slots * self.table.memory.geometry.slot_bytes - room.free_bytes
        taken = 0 if bound is None else self._slots_taken(in_flight, replaced(plan, position, prefixes)) - bound
        margin = max(1.0, self.policy.margin) if incoming.is_expected else self.policy.margin
        return self.policy.score(incoming, costs, queue.now_s) > margin * queue.foresee(missing, taken).most_score

    def _slots_taken(self, in_flight: Sequence[Replaced], incoming: Replaced, *, evicted: bool = False) -> int:
        """Most conversations there can be after all open captures and the incoming one are committed. `evicted`: as if
        everything that may go were evicted. Each capture replaces one ancestor that no other capture counts on, if
        there is one."""
        staying = {each.id for each in self.table.in_ram.values() if not (evicted and each.may_leave_ram)}
        taken, spoken_for = len(staying), set[ConversationId]()
        for ancestors in (*in_flight, incoming):
            free = next((e.id for e in ancestors if e.id in staying and e.id not in spoken_for), None)
            if free is None:
                taken += 1
            else:
                spoken_for.add(free)
        return taken


def replaced(plan: Plan, position: int, prefixes: Sequence[Conversation]) -> Replaced:
    """Those of its prefixes that a capture up to `position` will supersede."""
    return tuple(superseded(prefixes, (*plan.checkpoint_positions(position), *plan.dropped)))
