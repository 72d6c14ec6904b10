"""Decides whether and how far a live conversation is parked, and what is evicted for it.

Only reads the shelf; the store carries the decision out. Nothing is evicted for a conversation that is then refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from parkd.state import Costs, StateSizes
from parkd.store.blocks import Owner
from parkd.store.budget import Need, Room, mib
from parkd.store.eviction import Queue
from parkd.store.history import History
from parkd.store.planning import CapturePlan, OpaquePlan, block_identity, bounded
from parkd.store.policy import Evictable, Policy, longest_position
from parkd.store.records import BlockId, CaptureRequest, ParkedCheckpoint, RefusalReason, Refused, StoreConfig
from parkd.store.shelf import Entry, Shelf, superseded

KIN_LIMIT = 64
"""Conversations searched for checkpoints to inherit."""

LEAST_PART = 8
"""A conversation that is worth less than what would be evicted for it is parked as far as it fits without evictions, if
that adds at least one part in this many of it."""

Replaced = tuple[Entry, ...]
"""Conversations that a capture will supersede."""


@dataclass(frozen=True, eq=False)
class Decision:
    """How far to park, and the order in which others are evicted until there is room; None: there is room."""

    position: int
    queue: Queue | None
    prefixes: Sequence[Entry] = ()
    """Parked prefixes of the same conversation."""


@dataclass(frozen=True, eq=False)
class Admission:
    """Decisions about captures, over what is on the shelf now."""

    config: StoreConfig
    shelf: Shelf
    policy: Policy
    has_fixed_state: bool
    admits_all: bool = False
    """True: never refuse for value. For promotions, whose conversation is known to return now."""

    def plan(self, request: CaptureRequest) -> CapturePlan:
        """What a capture of the request would reuse from the store, and what it would copy."""
        if request.sizes is not None:
            return self._opaque_plan(request, request.sizes)
        if not self.has_fixed_state:
            request = replace(request, checkpoints=(), rewindable=True)
        held = self._usable_lineage(request)
        inheritable = self._inheritable(request, held)
        inherited, dropped = bounded(inheritable, request.checkpoints, self.config.checkpoint_limit)
        return CapturePlan(
            request,
            held,
            inherited,
            self.config.block_tokens,
            self.shelf.geometry.slot_bytes,
            self.shelf.checkpoints.checkpoint_bytes,
            dropped,
        )

    def _opaque_plan(self, request: CaptureRequest, sizes: StateSizes) -> OpaquePlan:
        """The plan of an opaque state. Its end is always a checkpoint, whose fixed state is part of the whole state."""
        tokens = len(request.units)
        if not self.has_fixed_state:
            request = replace(request, checkpoints=(), sizes=StateSizes(sizes.whole), rewindable=True)
        elif request.checkpoints[-1:] != (tokens,):
            sizes = StateSizes(sizes.whole, (*sizes.checkpoints, 0))
            request = replace(request, checkpoints=(*request.checkpoints, tokens), sizes=sizes)
        held = self._usable_lineage(request)
        inheritable = self._inheritable_of_segment(request)
        inherited, dropped = bounded(inheritable, request.checkpoints, self.config.checkpoint_limit)
        return OpaquePlan(request, held, inherited, self.config.block_tokens, 0, 0, dropped)

    def decide(
        self, plan: CapturePlan, in_flight: Sequence[Replaced], history: History, costs: Costs, now_s: float
    ) -> Decision | Refused:
        """The position up to which to park, and what to evict for it until `has_room`."""
        request = plan.request
        # Parked state can be resumed only at a checkpoint, even where the live state could be cut elsewhere.
        places = plan.checkpoint_positions(len(request.units)) if self.has_fixed_state else None
        if request.sizes is not None:
            places = (len(request.units),)  # all of it, or nothing
        if places is not None and not places:
            return Refused(RefusalReason.NO_CHECKPOINT, "the engine holds no checkpoint to resume from")
        longest = len(request.units) if places is None else places[-1]
        prefixes = self.shelf.prefixes_of(request.key_digest, request.units, request.prefix_hashes)
        if self.has_room(plan, longest, in_flight, prefixes):
            return Decision(longest, None, prefixes)
        bound = self.config.conversation_slots
        if bound is not None and self._slots_taken(in_flight, replaced(plan, longest, prefixes), evicted=True) > bound:
            return Refused(RefusalReason.SLOTS, f"all {bound} conversation slots are leased, pinned or being written")
        queue = self._queue(plan, longest, prefixes, costs, now_s)
        position = longest
        if not self._surely_fits(plan.need(longest), queue):
            room, freeable = self.shelf.most_room()
            position = longest_position(longest, places, lambda place: self.shelf.fits(plan.need(place), room))
            known = self._known(plan, prefixes)
            if position < longest and position < known + self.config.block_tokens:
                message = f"needs {mib(plan.need_bytes(longest))}, {mib(max(0, freeable))} could be freed"
                if position:
                    message += f"; its first {position} tokens would fit, {known} are parked already"
                return Refused(RefusalReason.BUDGET, message)
            if position < longest:
                queue = self._queue(plan, position, prefixes, costs, now_s)
        is_selective = self.policy.margin > 0 and not self.admits_all
        if is_selective and not self._is_worth(plan, position, in_flight, prefixes, queue, history, costs):
            part = self._free_part(plan, longest, places, in_flight, prefixes)
            if part:
                return Decision(part, None, prefixes)
            return Refused(RefusalReason.VALUE, "what would be evicted for it is expected to save more")
        return Decision(position, queue, prefixes)

    def _free_part(
        self,
        plan: CapturePlan,
        longest: int,
        places: Sequence[int] | None,
        in_flight: Sequence[Replaced],
        prefixes: Sequence[Entry],
    ) -> int:
        """The last resumable position that fits without evictions, if that is worth having; else 0."""
        least = self._known(plan, prefixes) + max(self.config.block_tokens, -(-longest // LEAST_PART))
        room = self.shelf.room()
        # Mostly there is no room at all: one check finds that out, where the search would need one per halving.
        if least > longest or not self.has_room(plan, least, in_flight, prefixes, room):
            return 0
        position = longest_position(longest, places, lambda at: self.has_room(plan, at, in_flight, prefixes, room))
        return position if position >= least else 0

    def _known(self, plan: CapturePlan, prefixes: Sequence[Entry]) -> int:
        """Leading tokens that are parked already. A part that adds less than a block to them is useless: reading so few
        tokens takes no longer than restoring them, and others would be evicted for it."""
        parked = max((entry.parked.position for entry in prefixes), default=0)
        return max(parked, len(plan.held) * self.config.block_tokens)

    def has_room(
        self,
        plan: CapturePlan,
        position: int,
        in_flight: Sequence[Replaced],
        prefixes: Sequence[Entry],
        room: Room | None = None,
    ) -> bool:
        """Whether the plan fits up to `position` now. `room` is the shelf's, if the caller has it already."""
        bound = self.config.conversation_slots
        if bound is not None and self._slots_taken(in_flight, replaced(plan, position, prefixes)) > bound:
            return False
        return self.shelf.fits(plan.need(position), room or self.shelf.room())

    def above_floor(
        self, plan: CapturePlan, outcome: Decision | Refused, free_memory: Callable[[], int] | None
    ) -> Decision | Refused:
        """Turns a decision into a refusal if it would leave the machine less free memory than `min_free_bytes`."""
        if free_memory is None or isinstance(outcome, Refused):
            return outcome
        checkpoints = len(plan.fresh_checkpoints(outcome.position))
        taken, free = self.shelf.untouched_bytes(plan.need(outcome.position), checkpoints), free_memory()
        if taken == 0 or free - taken >= self.config.min_free_bytes:
            return outcome
        floor = mib(self.config.min_free_bytes)
        message = f"needs {mib(taken)} of the machine's free {mib(free)}, of which {floor} must stay free"
        return Refused(RefusalReason.MEMORY_FLOOR, message)

    def _queue(self, plan: CapturePlan, position: int, prefixes: Sequence[Entry], costs: Costs, now_s: float) -> Queue:
        gone = replaced(plan, position, prefixes)
        return Queue(self.shelf, self.policy, costs, now_s, family=prefixes, superseded=gone)

    def _surely_fits(self, need: Need, queue: Queue) -> bool:
        """True if what the candidates free one by one is enough, so that the costly count of what they share is not
        needed."""
        room = self.shelf.room()
        freed = Room(room.open_slots + queue.freed_slots, room.free_bytes + queue.freed_side_bytes)
        return self.shelf.fits(need, freed)

    def _is_worth(
        self,
        plan: CapturePlan,
        position: int,
        in_flight: Sequence[Replaced],
        prefixes: Sequence[Entry],
        queue: Queue,
        history: History,
        costs: Costs,
    ) -> bool:
        """Whether the plan scores more than the policy's margin times the best of what would be evicted for it."""
        room, bound = self.shelf.room(), self.config.conversation_slots
        fresh_bytes = plan.fresh_bytes(position)
        missing = plan.need_bytes(position) - room.open_slots * self.shelf.geometry.slot_bytes - room.free_bytes
        taken = 0 if bound is None else self._slots_taken(in_flight, replaced(plan, position, prefixes)) - bound
        tokens = position - plan.start(position)
        incoming = Evictable("", position, fresh_bytes, queue.now_s, queue.now_s, tokens, history)
        score = self.policy.score(incoming, costs, queue.now_s)
        return score > self.policy.margin * queue.foresee(missing, taken).most_score

    def _usable_lineage(self, request: CaptureRequest) -> tuple[BlockId, ...]:
        """The blocks of the lineage that are still stored and hold only rows of the request."""
        size, tokens = self.config.block_tokens, len(request.units)
        is_opaque = request.sizes is not None
        if is_opaque and request.covered != tokens:
            return ()  # it continued from inside the segment, and equal tokens are not equal state
        held = [] if is_opaque else self.shelf.blocks.lineage(request.lineage, request.prefix_hashes)
        index = len(held)
        tail = self.shelf.blocks.get(request.lineage[index]) if index < len(request.lineage) else None
        if tail is None or tail.sums is None or tail.index != index or index * size + tail.rows != tokens:
            return tuple(held)
        is_cut = tail.rows < size or is_opaque
        if is_cut and tail.identity == block_identity(request, index, tail.rows, size):
            held.append(request.lineage[index])
        return tuple(held)

    def _inheritable_of_segment(self, request: CaptureRequest) -> tuple[ParkedCheckpoint, ...]:
        """Parked checkpoints of the segment that the live state descends from, up to where it does. Not the one at its
        end: that is part of the segment and has no bytes of its own."""
        found: dict[int, ParkedCheckpoint] = {}
        if not request.lineage or not self.has_fixed_state:
            return ()
        for conversation_id, _ in self.shelf.index.find(request.key_digest, request.prefix_hashes, KIN_LIMIT):
            parked = self.shelf.entries[conversation_id].parked
            for checkpoint in parked.checkpoints if parked.blocks == request.lineage else ():
                if checkpoint.position <= request.covered and self.shelf.checkpoints.size_of(checkpoint.id):
                    found.setdefault(checkpoint.position, checkpoint)
        return tuple(found[position] for position in sorted(found))

    def _inheritable(self, request: CaptureRequest, held: tuple[BlockId, ...]) -> tuple[ParkedCheckpoint, ...]:
        """Parked checkpoints of the held blocks. The live rows descend from these blocks, so the checkpoints are valid
        for the new conversation too."""
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

    def _slots_taken(self, in_flight: Sequence[Replaced], incoming: Replaced, *, evicted: bool = False) -> int:
        """Most conversations there can be after all open captures and the incoming one are committed. `evicted`: as if
        everything that may go were evicted. Each capture replaces one ancestor that no other capture counts on, if
        there is one."""
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
    """The prefixes still on the shelf that a capture up to `position` will supersede."""
    there = [entry for entry in prefixes if entry.is_published]
    return tuple(superseded(there, position, (*plan.checkpoint_positions(position), *plan.dropped)))
