"""Whether and how far a live conversation is parked, and who goes for it.

Reads the shelf and decides; the store acts on it. Nobody is evicted for a conversation that is then refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from parkd.store.blocks import Owner
from parkd.store.budget import mib
from parkd.store.planning import CapturePlan, block_identity
from parkd.store.policy import Policy, longest_position
from parkd.store.records import BlockId, CaptureRequest, ParkedCheckpoint, RefusalReason, Refused, StoreConfig
from parkd.store.shelf import Entry, Shelf, superseded

KIN_LIMIT = 64
"""Conversations searched for checkpoints to inherit."""

Replaced = tuple[Entry, ...]
"""Conversations that a capture will supersede."""


@dataclass(frozen=True, eq=False)
class Admission:
    """The store's decisions, over what is on the shelf now."""

    config: StoreConfig
    shelf: Shelf
    policy: Policy
    has_fixed_state: bool

    def plan(self, request: CaptureRequest) -> CapturePlan:
        if not self.has_fixed_state:
            request = replace(request, checkpoints=(), rewindable=True)
        held = self._usable_lineage(request)
        return CapturePlan(
            request,
            held,
            self._inheritable(request, held),
            self.config.block_tokens,
            self.shelf.geometry.slot_bytes,
            self.shelf.checkpoints.checkpoint_bytes,
        )

    def settle(self, plan: CapturePlan, in_flight: Sequence[Replaced]) -> int | Refused:
        """The position up to which to park. `next_victim` then says who must go for it."""
        request = plan.request
        # What is parked resumes only where its fixed state is held, whatever the live state may do.
        places = plan.checkpoint_positions(len(request.units)) if self.has_fixed_state else None
        if places is not None and not places:
            return Refused(RefusalReason.NO_CHECKPOINT, "the engine holds no checkpoint to resume from")
        longest = len(request.units) if places is None else places[-1]
        prefixes = self.prefixes(plan)
        if self._is_room(plan, longest, in_flight, prefixes):
            return longest
        bound = self.config.conversation_slots
        if bound is not None and self._slots_taken(in_flight, replaced(plan, longest, prefixes), evicted=True) > bound:
            return Refused(RefusalReason.SLOTS, f"all {bound} conversation slots are leased, pinned or being written")
        room, freeable = self.shelf.most_room()
        position = longest_position(longest, places, lambda place: self.shelf.fits(plan.need(place), room))
        known = max((entry.parked.position for entry in prefixes), default=0)
        if position == 0 or (position < longest and position <= known):
            message = f"needs {mib(plan.need_bytes(longest))}, {mib(max(0, freeable))} could be freed"
            if position:
                message += f"; no more than the {known} tokens that are parked already would fit"
            return Refused(RefusalReason.BUDGET, message)
        return position

    def next_victim(
        self, plan: CapturePlan, position: int, in_flight: Sequence[Replaced], now_s: float
    ) -> Entry | None:
        """Whom to evict next so that the plan fits up to `position`; None once it does."""
        prefixes = self.prefixes(plan)
        if self._is_room(plan, position, in_flight, prefixes):
            return None
        evictable = self.shelf.evictable(replaced(plan, position, prefixes))
        return self.shelf.entry(self.policy.victim(evictable, now_s))

    def prefixes(self, plan: CapturePlan) -> list[Entry]:
        request = plan.request
        return self.shelf.prefixes_of(request.key_digest, request.units, request.prefix_hashes)

    def _usable_lineage(self, request: CaptureRequest) -> tuple[BlockId, ...]:
        """The blocks of the lineage that are still there and hold only rows of the request."""
        size, tokens = self.config.block_tokens, len(request.units)
        held: list[BlockId] = []
        for index, block_id in enumerate(request.lineage):
            block = self.shelf.blocks.get(block_id)
            if block is None or block.checksums is None or block.index != index:
                break
            end = index * size + block.rows
            if end > tokens or (block.rows < size and end != tokens):
                break
            if block.identity != block_identity(request, index, block.rows, size):
                break
            held.append(block_id)
        return tuple(held)

    def _inheritable(self, request: CaptureRequest, held: tuple[BlockId, ...]) -> tuple[ParkedCheckpoint, ...]:
        """Parked checkpoints that belong to the held blocks: the live rows descend from those, so they are as true of
        the new conversation as of the one that made them."""
        if not self.has_fixed_state or not held:
            return ()
        found: dict[int, ParkedCheckpoint] = {}
        for conversation_id, _ in self.shelf.index.find(request.key_digest, request.prefix_hashes, KIN_LIMIT):
            parked = self.shelf.entries[conversation_id].parked
            for checkpoint in parked.checkpoints:
                blocks = -(-checkpoint.position // self.config.block_tokens)
                if parked.blocks[:blocks] == held[:blocks] and checkpoint.position <= len(request.units):
                    found.setdefault(checkpoint.position, checkpoint)
        return tuple(found[position] for position in sorted(found))

    def _is_room(
        self, plan: CapturePlan, position: int, in_flight: Sequence[Replaced], prefixes: Sequence[Entry]
    ) -> bool:
        bound = self.config.conversation_slots
        if bound is not None and self._slots_taken(in_flight, replaced(plan, position, prefixes)) > bound:
            return False
        return self.shelf.fits(plan.need(position), self.shelf.room())

    def _slots_taken(self, in_flight: Sequence[Replaced], incoming: Replaced, *, evicted: bool = False) -> int:
        """Conversations once everything in flight and the incoming one are committed, at most; `evicted` counts as if
        all that may go went. Each capture takes the place of one ancestor that no other capture counts on, if any."""
        staying = {e.owner for e in self.shelf.entries.values() if not (evicted and e.may_go)}
        taken, spoken_for = len(staying), set[Owner]()
        for ancestors in (*in_flight, incoming):
            free = next((e.owner for e in ancestors if e.owner in staying and e.owner not in spoken_for), None)
            if free is None:
                taken += 1
            else:
                spoken_for.add(free)
        return taken


def replaced(plan: CapturePlan, position: int, prefixes: Sequence[Entry]) -> Replaced:
    """Which of the prefixes a capture up to `position` will supersede."""
    return tuple(superseded(prefixes, position, plan.checkpoint_positions(position)))
