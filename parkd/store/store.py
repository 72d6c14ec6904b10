"""The store of parked conversations, as the proxy uses it.

Synchronous, and used from one task only. Nothing here waits or copies rows: the engine copies, into and out of the
buffers that it is given.

A conversation is parked in three steps, so that no byte is copied before there is room for all of them, and the
conversation is not visible before all stages are complete:

    begin_capture   reserves every byte, evicting for it      (engine copies)      commit   publishes, supersedes
                                                                                   abort    gives everything back
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count

from parkd.state import Checksums, Costs, StateLayout
from parkd.store.admission import Admission, Decision, Replaced, replaced
from parkd.store.blocks import Owner
from parkd.store.budget import mib
from parkd.store.captures import Flight, Fresh, open_flight, release_flight
from parkd.store.gone import GoneMemory
from parkd.store.history import History
from parkd.store.inspection import Inspection, inspect_ram
from parkd.store.planning import CapturePlan, check_request
from parkd.store.policy import LruPolicy, Policy
from parkd.store.records import (
    BlockId,
    Capture,
    CaptureRequest,
    ConversationId,
    Lease,
    Parked,
    RefusalReason,
    Refused,
    StoreConfig,
    StoreStats,
)
from parkd.store.shelf import Entry, Shelf, Waiter, superseded
from parkd.store.slabs import SlabHooks
from parkd.store.stats import ram_stats
from parkd.store.transfers import lease_transfer, lineage_of

CANDIDATE_LIMIT = 64
"""Most conversations that one look-up returns by default."""


class ConversationStore:
    """Parked conversations in RAM under one budget."""

    def __init__(
        self,
        config: StoreConfig,
        layout: StateLayout,
        clock: Callable[[], float],
        *,
        new_id: Callable[[], ConversationId] | None = None,
        policy: Policy | None = None,
        slab_hooks: SlabHooks | None = None,
        observer: Callable[[], None] | None = None,
        free_memory: Callable[[], int] | None = None,
    ) -> None:
        """`clock` returns seconds. `new_id` returns an id that was never used before; by default ids are numbers.
        `observer` is called after each change of what is charged to the budget. `free_memory` returns the bytes that
        the machine can still give; without it, `config.min_free_bytes` is not enforced."""
        self.config = config
        self.layout = layout
        self._clock = clock
        numbers = count(1)
        self._new_id = new_id or (lambda: f"c{next(numbers)}")
        self._shelf = Shelf(config, layout, slab_hooks, observer)
        self._admission = Admission(config, self._shelf, policy or LruPolicy(), layout.fixed_bytes > 0)
        self._owners = count(1)
        self._captures: dict[Owner, Flight] = {}
        self._gone = GoneMemory()
        self._costs = Costs()
        self._free_memory = free_memory
        self._totals: Counter[str] = Counter()
        self._refusals: Counter[str] = Counter()

    def candidates(
        self, key_digest: bytes, prefix_hashes: tuple[bytes, ...], limit: int = CANDIDATE_LIMIT
    ) -> list[tuple[Parked, int]]:
        """At most `limit` conversations of the key, each with the number of full blocks whose hashes it shares with the
        prompt, most first. Those that share none come last, since they may share less than a block."""
        found = self._shelf.index.find(key_digest, prefix_hashes, limit)
        return [(self._shelf.entries[conversation_id].parked, shared) for conversation_id, shared in found]

    def get(self, conversation_id: ConversationId) -> Parked | None:
        entry = self._shelf.entries.get(conversation_id)
        return None if entry is None else entry.parked

    def touch(self, conversation_id: ConversationId) -> None:
        """Marks a conversation as used now. Raises ConversationGone, as `pin` and `unpin` do."""
        self._shelf.used(self._shelf.entry(conversation_id), self._clock())

    def pin(self, conversation_id: ConversationId) -> None:
        """Keeps a conversation from being evicted until it is unpinned. What supersedes it is pinned instead."""
        self._shelf.entry(conversation_id).is_pinned = True

    def unpin(self, conversation_id: ConversationId) -> None:
        self._shelf.entry(conversation_id).is_pinned = False

    def measured(self, costs: Costs) -> None:
        """Sets the costs that the eviction policy calculates with."""
        self._costs = costs

    def expect(self, key_digest: bytes, prefix_hashes: tuple[bytes, ...]) -> Callable[[], None]:
        """Keeps what a queued prompt would start from. The returned function, which is idempotent, releases it."""
        found = self._shelf.index.find(key_digest, prefix_hashes, 1)
        if not found or found[0][1] == 0:
            return lambda: None
        waiter = Waiter(None)
        waiter.move(self._shelf.entry(found[0][0]))
        return lambda: waiter.move(None)

    def lease(self, conversation_id: ConversationId, stop: int, start: int = 0) -> Lease:
        """What an engine needs to make `[0, stop)` live, if its rows before `start` are already those of the
        conversation.

        `start` is 0 or a multiple of the block size. With fixed state, `stop` must be one of the checkpoints. The
        buffers are read-only. Raises ConversationGone, and ValueError for positions that cannot be restored.
        """
        entry = self._shelf.entry(conversation_id)
        transfer = lease_transfer(self._shelf, self.layout, entry.parked, start, stop)
        release = self._shelf.lease(entry, self._clock())
        self._totals["leases"] += 1
        return Lease(entry.parked, start, stop, transfer, lineage_of(self._shelf, entry.parked, stop), release)

    def grow_ahead(self) -> None:
        """Allocates as much memory as the budget allows, because page-locking memory later would delay captures.

        Raises OSError or MemoryError; what was allocated until then stays.
        """
        self._shelf.grow_ahead()

    def begin_capture(self, request: CaptureRequest) -> Capture | Refused:
        """Reserves room for a live conversation. Evicts for it by the policy, but never what is leased or pinned.

        If the conversation does not fit whole, reserves up to the last resumable position that fits; if nothing fits,
        refuses and changes nothing. Raises ValueError on a request that contradicts itself.
        """
        if self.config.budget_bytes == 0:
            return self._refused(request, Refused(RefusalReason.OFF, "parking is off"))
        check_request(request, self.layout.digest, self.config.block_tokens)
        owner = next(self._owners)
        plan = self._admission.plan(request)
        now_s, tokens = self._clock(), len(request.units)
        history = self._shelf.ghosts.next(request.prefix_hashes, tokens, now_s)
        self._shelf.ghosts.note(request.prefix_hashes, tokens, history, now_s)
        # Held from here on, so that evictions cannot free what the capture builds on.
        self._shelf.blocks.hold(owner, plan.held)
        self._shelf.checkpoints.hold(checkpoint.id for checkpoint in plan.inherited)
        with contextlib.ExitStack() as undo:
            undo.callback(self._release_plan, owner, plan)
            outcome = self._admission.decide(plan, self._replaced_in_flight(), history, self._costs, now_s)
            outcome = self._admission.above_floor(plan, outcome, self._free_memory)
            if isinstance(outcome, Decision):
                outcome = self._reserve_elsewhere(plan, history) or outcome
            if isinstance(outcome, Decision):
                self._evict_for(plan, outcome)
                try:
                    capture = self._open(owner, plan, outcome, history)
                except (MemoryError, OSError) as error:
                    message = f"the machine has no memory for {mib(plan.need_bytes(outcome.position))}: {error}"
                    outcome = Refused(RefusalReason.MEMORY, message)
                else:
                    undo.pop_all()
                    return capture
        return self._refused(request, outcome)

    def commit(self, capture: Capture, checksums: Checksums) -> Parked:
        """Publishes a capture that is copied completely, and removes what it supersedes.

        From now on the lineage of the live conversation is the result's `blocks`. Raises ValueError if the capture is
        not open, or if there is not one checksum per part; an open capture then stays open.
        """
        flight = self._captures.get(capture.serial)
        if flight is None:
            raise ValueError("the capture was committed or aborted before")
        stages = len(self.layout.stages)
        expected = (len(flight.fresh_blocks), stages), (len(flight.fresh_checkpoints), stages)
        if (checksums.rows.shape, checksums.fixed.shape) != expected:
            raise ValueError(f"checksums {checksums.rows.shape}, {checksums.fixed.shape}; expected {expected}")
        self._shelf.blocks.seal(flight.fresh_blocks, checksums.rows)
        self._shelf.checkpoints.seal(flight.fresh_checkpoints, checksums.fixed)
        parked = self._parked(capture, flight)
        entry = Entry(parked, capture.serial, history=flight.history, floor=self._shelf.floor)
        places = [*(checkpoint.position for checkpoint in parked.checkpoints), *flight.plan.dropped]
        known = flight.replaces  # found to be prefixes at the reservation
        prefixes = self._shelf.prefixes_of(parked.key_digest, parked.units, parked.prefix_hashes, known)
        for ancestor in superseded(prefixes, parked.position, places):
            entry.is_pinned |= ancestor.is_pinned
            for waiter in tuple(ancestor.awaited_by):
                waiter.move(entry)
            self._shelf.take_off(ancestor)
            self._totals["superseded"] += 1
        del self._captures[capture.serial]
        self._shelf.put(entry)
        self._totals["captures"] += 1
        self._totals["partial"] += not capture.is_whole
        self._totals["captured_tokens"] += capture.position
        self._totals["reused_tokens"] += capture.transfer.start
        return parked

    def abort(self, capture: Capture) -> None:
        """Frees everything that the capture reserved. Does nothing if it was committed or aborted before.

        The engine must no longer use the buffers.
        """
        flight = self._captures.pop(capture.serial, None)
        if flight is None:
            return
        release_flight(self._shelf, capture, flight)
        self._totals["aborts"] += 1

    def drop(self, conversation_id: ConversationId, reason: str) -> bool:
        """Removes a conversation. Leases keep its bytes until they end. False if it was not there."""
        entry = self._shelf.entries.get(conversation_id)
        if entry is None:
            return False
        self._forget(entry, "dropped", reason)
        self._totals["dropped"] += 1
        return True

    def why_gone(self, key_digest: bytes, prefix_hashes: tuple[bytes, ...]) -> str:
        """What happened to the conversation that shared most blocks with this prompt and is no longer parked; or
        empty."""
        return self._gone.why(key_digest, prefix_hashes, self._clock())

    def stats(self) -> StoreStats:
        return ram_stats(self.config, self._shelf, self._captures.values(), self._totals, self._refusals)

    def inspect(self) -> Inspection:
        """All that the store holds now, down to its blocks. Takes time with each of them: for tests and for
        diagnosis."""
        return inspect_ram(self._shelf, self._captures)

    def close(self) -> None:
        """Removes everything and frees all memory. No lease and no capture may be open."""
        assert not self._captures, "a capture is in flight"
        for entry in list(self._shelf.entries.values()):
            self._shelf.take_off(entry)
        self._shelf.close()

    def _open(self, owner: Owner, plan: CapturePlan, decision: Decision, history: History) -> Capture:
        """Takes the room that was made. If it raises OSError or MemoryError, only what the plan holds is left to
        release."""
        position = decision.position
        shapes = self._shapes(plan, position)
        fresh = Fresh(shapes, self._names(plan.request, shapes))
        replaces = replaced(plan, position, decision.prefixes)
        capture, flight = open_flight(self._shelf, self.layout, owner, plan, position, fresh, replaces, history)
        self._captures[owner] = flight
        return capture

    def _reserve_elsewhere(
        self,
        plan: CapturePlan,  # noqa: ARG002 - used by FileStore
        history: History,  # noqa: ARG002
    ) -> Refused | None:
        """For subclasses: reserves the room that an admitted capture needs outside memory, or refuses."""
        return None

    def _release_plan(self, owner: Owner, plan: CapturePlan) -> None:
        """Releases what a plan holds, when its capture is refused or fails."""
        self._shelf.blocks.release(owner, plan.held)
        self._shelf.checkpoints.release(checkpoint.id for checkpoint in plan.inherited)

    def _parked(self, capture: Capture, flight: Flight) -> Parked:
        request, now = capture.request, self._clock()
        units = request.units
        if not capture.is_whole or units.flags.writeable or not units.flags.owndata:
            units = units[: capture.position].copy()  # the caller may change its own
            units.flags.writeable = False
        return Parked(
            id=self._new_id(),
            key_digest=request.key_digest,
            units=units,
            prefix_hashes=request.prefix_hashes[: capture.position // self.config.block_tokens],
            blocks=flight.blocks,
            checkpoints=flight.checkpoints,
            layout_digest=request.layout_digest,
            parked_at_s=now,
            last_used_s=now,
            namespace=request.namespace,
        )

    def _shapes(self, plan: CapturePlan, position: int) -> Sequence[tuple[int, int, bytes]]:
        """`(index, rows, identity)` of each block to be copied."""
        return plan.fresh_shapes(position)

    def _names(
        self,
        request: CaptureRequest,  # noqa: ARG002 - used by TieredStore
        shapes: Sequence[tuple[int, int, bytes]],  # noqa: ARG002
    ) -> Sequence[BlockId | None]:
        """The ids that blocks to be copied already have on disk, None for a new block; empty if all are new."""
        return ()

    def _forget(self, entry: Entry, verb: str, reason: str) -> None:
        self._gone.remember(entry.parked.key_digest, entry.parked.prefix_hashes, verb, reason, self._clock())
        self._shelf.take_off(entry)

    def _evict_for(self, plan: CapturePlan, decision: Decision) -> None:
        if decision.queue is None:
            return
        reason = f"its room was needed for a conversation of {decision.position} tokens"
        in_flight = self._replaced_in_flight()
        while not self._admission.has_room(plan, decision.position, in_flight, decision.prefixes):
            self._forget(decision.queue.pop(), "evicted", reason)
            self._totals["evictions"] += 1

    def _replaced_in_flight(self) -> list[Replaced]:
        return [flight.replaces for flight in self._captures.values()]

    def _refused(self, request: CaptureRequest, refused: Refused) -> Refused:
        self._refusals[refused.reason.value] += 1
        if refused.reason is not RefusalReason.OFF:
            self._gone.remember(request.key_digest, request.prefix_hashes, "not parked", refused.message, self._clock())
        return refused
