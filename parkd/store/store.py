"""The store of parked conversations, over RAM and, if there is a disk, over both.

Synchronous, and used from one task only. Nothing here waits, copies rows or touches a file: the engine copies, into and
out of the buffers that it is given, and the caller runs the jobs that `next_job` and `promote` hand out.

A conversation is parked in three steps, so that no byte is copied before there is room for all of them, and the
conversation is not visible before all stages are complete:

    begin_capture   reserves every byte, evicting for it      (engine copies)      commit   publishes, supersedes
                                                                                   abort    gives everything back

With a disk, RAM is a cache of what is parked:

    commit ──> RAM, waiting ──write──> RAM and disk ──evicted from RAM──> disk ──promote──> RAM and disk

Conversations, blocks and checkpoints are in one table each, whatever places they have, so live rows still descend from
blocks that leave RAM and return. A conversation that waits for its write is leased by the write queue: until its bytes
are on disk it is restored from RAM, and not evicted.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

from parkd.state import Checksums, Costs, StateLayout
from parkd.store.admission import Admission, Decision, Replaced, replaced
from parkd.store.blocks import BlockTable, Owner, RowPlaces, StateKind, WholePlaces
from parkd.store.budget import Room, mib
from parkd.store.checkpoints import CheckpointTable
from parkd.store.conversations import Conversation, Conversations, InRam, Waiter, superseded
from parkd.store.disk import NO_DISK, Disk, DiskSetup, file_bytes, index_limit_bytes
from parkd.store.disk_policy import worth_writing
from parkd.store.files.disk_jobs import MarkJob, ReadJob, RecutJob, RemoveJob, WriteJob
from parkd.store.files.disk_layout import read_job, recut_job
from parkd.store.files.manifest import ExtentRef
from parkd.store.flights import (
    Flight,
    GivenUp,
    Promotion,
    capture_transfer,
    held_in_ram,
    lease_transfer,
    lineage_of,
    open_flight,
    release_flight,
)
from parkd.store.history import GHOST_BYTES, GHOST_LIMIT, GONE_BYTES, GONE_LIMIT, History
from parkd.store.inspection import Inspection, disk_stats, inspect, ram_stats
from parkd.store.listing import Listed, listed
from parkd.store.memory import Memory
from parkd.store.planning import Plan, check_request, plan_capture, plan_promotion, plan_recut
from parkd.store.policy import LruPolicy, Policy
from parkd.store.records import (
    NAME_END,
    Capture,
    CaptureRequest,
    ConversationGone,
    ConversationId,
    DiskStats,
    Held,
    Lease,
    Name,
    Parked,
    RefusalReason,
    Refused,
    StoreConfig,
    StoreStats,
    Tier,
    name_of,
)
from parkd.store.slabs import SlabHooks
from parkd.store.write_queue import QUEUE_SHARE, WriteQueue
from parkd.types import Units

CANDIDATE_LIMIT = 64
"""Most conversations that one look-up returns by default."""
EXPIRY_STEP_S = 60.0


class ConversationStore:
    """Parked conversations under one budget of memory, and one of disk."""

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
        disk: DiskSetup | None = None,
    ) -> None:
        """`clock` returns seconds. `new_id` returns a name that was never used before, without a dot; by default names
        are numbers.
        `observer` is called after each change of what is charged to the budget. `free_memory` returns the bytes that
        the machine can still give; without it, `config.min_free_bytes` is not enforced. What describes conversations on
        `disk` is charged to the memory budget at once."""
        if disk is not None:
            config = replace(config, budget_bytes=max(0, config.budget_bytes - disk.config.index_bytes))
        self.config = config
        self.layout = layout
        self._clock = clock
        numbers = count(1)
        self._new_id = new_id or (lambda: f"c{next(numbers)}")
        kind = StateKind(layout, config.block_tokens)
        memory = Memory(config, layout, slab_hooks, observer)
        places = WholePlaces(memory.budget) if kind.is_whole else RowPlaces(layout, config.block_tokens, memory.slabs)
        blocks = BlockTable(places, kind.stages, memory.budget, (disk or NO_DISK).first_block)
        checkpoints = CheckpointTable(layout, memory.idle)
        self.has_disk = disk is not None
        self.disk = Disk(disk or NO_DISK, blocks, checkpoints)
        self.table = Conversations(kind, memory, blocks, checkpoints, self.disk, clock)
        self.queue = WriteQueue(self.table, self.disk, config.budget_bytes // QUEUE_SHARE)
        self._admission = Admission(config, self.table, policy or LruPolicy())
        self._owners = count(1)
        self._flights: dict[Owner, Flight] = {}
        self._costs = Costs()
        self._free_memory = free_memory
        self._expire_at_s = float("-inf")
        self._totals: Counter[str] = Counter()
        self._refusals: Counter[str] = Counter()

    # Look-up

    def candidates(
        self, key_digest: bytes, prefix_hashes: tuple[bytes, ...], limit: int = CANDIDATE_LIMIT
    ) -> list[tuple[Parked, int]]:
        """At most `limit` conversations of the key, each with the number of full blocks whose hashes it shares with the
        prompt, most first. Those that share none come last, since they may share less than a block."""
        return [(each.parked, shared) for each, shared in self.table.find(key_digest, prefix_hashes, limit)]

    def get(self, conversation_id: ConversationId) -> Parked | None:
        conversation = self.table.get(conversation_id)
        return None if conversation is None else conversation.parked

    def named(self, name: Name) -> list[Parked]:
        """What is parked of a conversation, the longest first; empty if there is none of that name."""
        return [each.parked for each in self.table.named(name)]

    def continued(self, key_digest: bytes, units: Units, prefix_hashes: tuple[bytes, ...]) -> Name | None:
        """The name of the parked conversation that these units continue; None if they continue none."""
        blocks = len(units) // self.config.block_tokens
        return self.table.continued(key_digest, units, prefix_hashes[:blocks])

    def touch(self, conversation_id: ConversationId) -> None:
        """Marks a conversation as used now. Raises ConversationGone, as `pin` and `unpin` do."""
        self.table.used(self.table.known(conversation_id))

    def pin(self, conversation_id: ConversationId) -> None:
        """Keeps a conversation from being evicted until it is unpinned. What supersedes it is pinned instead."""
        self.table.known(conversation_id).is_pinned = True

    def unpin(self, conversation_id: ConversationId) -> None:
        self.table.known(conversation_id).is_pinned = False

    def keep(self, conversation_id: ConversationId) -> Callable[[], None]:
        """Keeps a conversation for a paused turn: it is not superseded, and leaves RAM only for the disk. The returned
        function, which is idempotent, ends that. Raises ConversationGone."""
        conversation = self.table.known(conversation_id)
        conversation.keepers += 1
        kept = [conversation]

        def release() -> None:
            if kept:
                kept.pop().keepers -= 1

        return release

    def measured(self, costs: Costs) -> None:
        """Sets the costs that the eviction policy calculates with."""
        self._costs = costs

    def expect(self, key_digest: bytes, prefix_hashes: tuple[bytes, ...]) -> Callable[[], None]:
        """Keeps in RAM what a queued prompt would start from. The returned function, which is idempotent, releases
        it."""
        found = self.table.find_in_ram(key_digest, prefix_hashes, 1)
        if not found or found[0][1] == 0:
            return lambda: None
        waiter = Waiter(None)
        waiter.move(found[0][0].ram)
        return lambda: waiter.move(None)

    def lease(self, conversation_id: ConversationId, stop: int, start: int = 0) -> Lease:
        """What an engine needs to make `[0, stop)` live, if its rows before `start` are already those of the
        conversation.

        `start` is 0 or a multiple of the block size. With fixed state, `stop` must be one of the checkpoints. The
        buffers are read-only. Raises ConversationGone, also for a conversation that is only on disk: promote it first.
        Raises ValueError for positions that cannot be restored.
        """
        conversation = self.table.known(conversation_id)
        if conversation.ram is None:
            raise ConversationGone(conversation_id)
        file = conversation.disk if self.table.kind.is_file else None
        transfer = lease_transfer(self.table, conversation.parked, start, stop)
        end = self.table.lease(conversation)
        parked = conversation.parked
        conversation.parked = replace(parked, tier=Tier.RAM)
        self._totals["leases"] += 1
        self._totals["reused_tokens"] += stop - start
        if file is not None:
            file.readers += 1

        def release() -> None:
            if file is not None:
                file.readers -= 1
            end()

        return Lease(parked, start, stop, transfer, lineage_of(self.table, parked, stop), release)

    def hold(self, conversation_id: ConversationId) -> Held:
        """All bytes of a conversation, for a copy of it elsewhere, which is no use of it. They stay until they are
        released. Raises ConversationGone, also for one that is only on disk."""
        conversation = self.table.known(conversation_id)
        if conversation.ram is None:
            raise ConversationGone(conversation_id)
        return held_in_ram(self.table, conversation)

    @property
    def histories_bytes(self) -> tuple[int, int]:
        """Bytes that the memory of conversations that are gone takes outside the budget, about, and the most it may
        take."""
        held = len(self.table.ghosts) * GHOST_BYTES + len(self.table.gone) * GONE_BYTES
        return held, GHOST_LIMIT * GHOST_BYTES + GONE_LIMIT * GONE_BYTES

    def why_gone(self, key_digest: bytes, prefix_hashes: tuple[bytes, ...]) -> str:
        """What happened to the conversation that shared most blocks with this prompt and is no longer parked; or
        empty."""
        return self.table.gone.why(key_digest, prefix_hashes, self._clock())

    def grow_ahead(self) -> None:
        """Allocates as much memory as the budget allows, because page-locking memory later would delay captures.

        Raises OSError or MemoryError; what was allocated until then stays.
        """
        self.table.memory.grow_ahead()

    # Captures

    def begin_capture(self, request: CaptureRequest) -> Capture | Refused:
        """Reserves room for a live conversation. Evicts for it by the policy, but never what is leased or pinned.

        If the conversation does not fit whole, reserves up to the last resumable position that fits; if nothing fits,
        refuses and changes nothing. Raises ValueError on a request that contradicts itself.
        """
        if self.config.budget_bytes == 0:
            return self._refused(request, Refused(RefusalReason.OFF, "parking is off"))
        check_request(request, self.layout.digest, self.config.block_tokens)
        file: ExtentRef | None = None
        state_file = None
        if self.table.kind.is_file:
            assert request.sizes is not None
            file = self.disk.new_extent(request.sizes.whole)
            state_file = self.disk.state_file(file)
            # No lineage: a file belongs to one conversation and is always written whole. Nothing is written twice: a
            # state that cannot be cut descends from a parked one only at its end, and then its id shows that it is
            # parked.
            request = replace(request, lineage=(), covered=0)
        plan = plan_capture(self.table, request, self.config.checkpoint_limit, state_file)
        flight = self._reserve(plan, file=file, is_returning=request.is_returning)
        if isinstance(flight, Refused):
            return self._refused(request, flight)
        start = plan.start(flight.position)
        transfer = capture_transfer(self.table, start, flight.position, flight.fresh_blocks, flight.fresh_checkpoints)
        return Capture(flight.owner, request, flight.position, transfer)

    def commit(self, capture: Capture, checksums: Checksums) -> Parked:
        """Publishes a capture that is copied completely, and removes what it supersedes.

        From now on the lineage of the live conversation is the result's `blocks`. Raises ValueError if the capture is
        not open, if there is not one checksum per part, or if its file is empty or longer than was reserved; an open
        capture then stays open.
        """
        flight = self._flights.get(capture.serial)
        if flight is None:
            raise ValueError("the capture was committed or aborted before")
        stages = len(self.layout.stages)
        expected = (len(flight.fresh_blocks), stages), (len(flight.fresh_checkpoints), stages)
        if (checksums.rows.shape, checksums.fixed.shape) != expected:
            raise ValueError(f"checksums {checksums.rows.shape}, {checksums.fixed.shape}; expected {expected}")
        file = None if flight.file is None else self._written_file(flight, flight.file, checksums.file_bytes)
        self._drop_unlike(flight, checksums)
        request, now_s = capture.request, self._clock()
        units = request.units[: capture.position].copy()  # the caller may change its own
        units.flags.writeable = False
        parked = Parked(
            id=self._id_after(self.continued(request.key_digest, units, request.prefix_hashes)),
            key_digest=request.key_digest,
            units=units,
            prefix_hashes=request.prefix_hashes[: capture.position // self.config.block_tokens],
            blocks=flight.blocks,
            checkpoints=flight.checkpoints,
            layout_digest=request.layout_digest,
            parked_at_s=now_s,
            last_used_s=now_s,
            namespace=request.namespace,
        )
        self.table.blocks.seal(flight.fresh_blocks, checksums.rows)
        self.table.checkpoints.seal(flight.fresh_checkpoints, checksums.fixed)
        conversation = Conversation(parked)
        ram = self._publish(flight, conversation, parked)
        self._totals["partial"] += not capture.is_whole
        if file is not None:
            self.queue.adopt(conversation, file)
        elif self.has_disk:
            self.queue.offer(conversation, ram)
        return parked

    def abort(self, capture: Capture) -> None:
        """Frees everything that the capture reserved. Does nothing if it was committed or aborted before.

        The engine must no longer use the buffers.
        """
        self._abort(capture.serial)

    def drop(self, conversation_id: ConversationId, reason: str) -> bool:
        """Removes a conversation from RAM and disk. Leases keep its bytes until they end. False if it was not there."""
        conversation = self.table.get(conversation_id)
        if conversation is not None and conversation.ram is not None:
            self.table.forget_in_ram(conversation, "dropped", reason)
            self._totals["dropped"] += 1
        self.queue.cancel(conversation_id)
        if conversation is not None and conversation.disk is not None:
            self.table.leave_disk(conversation)
        return conversation is not None

    def move_to_disk(self, name: Name) -> Refused | None:
        """Empties the place in RAM of a conversation, after it was written to disk if it is not there yet. None if that
        is done or under way. Raises ConversationGone."""
        if not self.has_disk:
            return Refused(RefusalReason.OFF, "there is no disk for parked conversations")
        rows = self.table.named(name)
        if not rows:
            raise ConversationGone(name)
        refused: Refused | None = None
        for each in rows:
            if each.ram is None:
                continue
            if each.ram.awaited_by:
                refused = Refused(RefusalReason.BUSY, "a request that waits will start from it")
            elif each.is_on_disk:
                self.table.leave_ram(each)
            else:
                refused = self.queue.ask(each) or refused
        return refused

    # Promotions

    def promote(self, conversation_id: ConversationId, stop: int, *, is_ahead: bool = False) -> Promotion | Refused:
        """Reserves room in RAM for the blocks of `[0, stop)` that are only on disk.

        Reserves less than that if no more fits; the whole conversation if its state cannot be cut. Run the promotion's
        job, then call `promoted`. `is_ahead`: it is only expected to return, so nothing is evicted for it that is worth
        as much, and it does not count as used. Raises ConversationGone.
        """
        source = self.table.known(conversation_id)
        place = source.disk
        if place is None or place.is_foreign:
            raise ConversationGone(conversation_id)
        if self.config.budget_bytes == 0:
            return Refused(RefusalReason.OFF, "parking is off")
        file = self.disk.state_file(place.extents[0]) if self.table.kind.is_file else None
        plan: Plan | None
        if place.recut is not None:
            plan = None if self._is_recut(source) else plan_recut(self.table, source.parked)
        else:
            plan = None if source.ram is not None else plan_promotion(self.table, source.parked, stop, file)
        if plan is None:
            return Refused(RefusalReason.BUSY, "it is being read from disk, or copied")
        flight = self._reserve(plan, source=source, is_ahead=is_ahead)
        if isinstance(flight, Refused):
            return flight
        fresh = flight.fresh_blocks, flight.fresh_checkpoints
        job = (
            read_job(self.table, self.disk, *fresh)
            if place.recut is None
            else recut_job(self.table, place, place.recut, *fresh)
        )
        place.readers += 1
        self.disk.hold(ref for ref, _ in job.extents)
        return Promotion(flight.owner, job, is_ahead)

    def promoted(self, promotion: Promotion, error: Exception | None) -> Parked | None:
        """Ends a promotion whose job ended with `error`. Returns what is now in RAM.

        None if the read failed; what it showed to be damaged is dropped.
        """
        flight = self._flights[promotion.serial]
        source = flight.source
        assert source is not None
        place = source.disk
        if place is not None:
            place.readers -= 1
        self.disk.let_go(ref for ref, _ in promotion.job.extents)
        if error is None and place is not None:
            self._totals["reads"] += 1
            self._totals["read_bytes"] += promotion.job.bytes
            if isinstance(promotion.job, RecutJob):
                return self._publish_recut(flight, source, promotion.job)
            return self._publish_read(flight, source, is_used=not promotion.is_ahead)
        self._abort(promotion.serial)
        if error is not None and not isinstance(error, GivenUp):
            self._totals["read_failures"] += 1
            self._read_failed(promotion.job, error)
        return None

    # File work

    def next_job(self) -> WriteJob | RemoveJob | None:
        """The next job, if there is one. Run it and call `finished`, before the next call of this."""
        self._expire()
        return self.queue.next_job()

    def finished(self, job: WriteJob | RemoveJob, error: Exception | None, left: Sequence[str] = ()) -> None:
        """Ends a job; `left` are the files that a removal could not remove."""
        if isinstance(job, RemoveJob):
            self.disk.removed(job, left)
        else:
            self.queue.finished(job, error)

    def next_marks(self, *, stops: bool = False) -> MarkJob | None:
        """A job that writes down when conversations were last used, if one is due; `stops`: the process ends, so all of
        them. Nothing is to be reported about it."""
        return self.table.next_marks(self.disk.setup.wall() - self._clock(), stops=stops)

    @property
    def has_writes(self) -> bool:
        """True while conversations wait for their write. The room in RAM that they hold becomes free."""
        return len(self.queue) > 0

    @property
    def frees_room(self) -> bool:
        """True while file work is under way that frees room, in RAM or on disk."""
        return (self.has_writes and not self.queue.is_paused) or self.disk.has_removals

    # What is there

    def stats(self) -> StoreStats:
        """What is in RAM."""
        return ram_stats(self.config, self.table, self._flights.values(), self._totals, self._refusals)

    def disk_stats(self) -> DiskStats:
        """What is on disk."""
        return disk_stats(self.table, self.disk, self.queue, self._totals)

    def room(self) -> Room:
        """What a capture could take without an eviction."""
        return self.table.memory.room()

    def listed(self) -> list[Listed]:
        """What is parked, a value for each conversation and each earlier row of it that is still there."""
        return [
            listed(self.table, each, self._admission.policy, self._costs, self._clock()) for each in self.table.all()
        ]

    def inspect(self) -> Inspection:
        """All that the store holds now, down to its blocks. Takes time with each of them: for tests and for
        diagnosis."""
        return inspect(self.table, self._flights, self.queue.waiting)

    def close(self) -> None:
        """Removes everything from RAM and frees all memory. No lease and no capture may be open."""
        assert not self._flights, "a capture is in flight"
        self.table.close()

    # Room

    def _reserve(
        self,
        plan: Plan,
        *,
        source: Conversation | None = None,
        file: ExtentRef | None = None,
        is_returning: bool = False,
        is_ahead: bool = False,
    ) -> Flight | Refused:
        """Reserves room for a plan: of a promotion from `source`, or of a capture, to `file` if its state stays in
        one."""
        owner, table, now_s = next(self._owners), self.table, self._clock()
        history = table.ghosts.next(plan.prefix_hashes, len(plan.units), now_s)
        table.ghosts.note(plan.prefix_hashes, len(plan.units), history, now_s)
        # Held from here on, so that evictions cannot free what the capture builds on.
        table.blocks.hold(owner, plan.held)
        table.checkpoints.hold(checkpoint.id for checkpoint in plan.inherited)
        with contextlib.ExitStack() as undo:
            undo.callback(self._release_plan, owner, plan)
            returns = source is not None
            in_flight = self._replaced_in_flight()
            outcome = self._admission.decide(
                plan,
                in_flight,
                history,
                self._costs,
                now_s,
                is_returning=(returns and not is_ahead) or is_returning,
                expected_since_s=source.parked.last_used_s if source is not None and is_ahead else None,
            )
            outcome = self._at_block(plan, outcome) if returns else outcome
            outcome = self._admission.above_floor(plan, outcome, self._free_memory)
            if isinstance(outcome, Decision) and file is not None:
                outcome = self._refused_by_disk(plan, file, history) or outcome
            if isinstance(outcome, Refused):
                return outcome
            self._evict_for(plan, outcome)
            replaces = replaced(plan, outcome.position, outcome.prefixes)
            try:
                flight = open_flight(table, owner, plan, outcome.position, replaces, history, source, file)
            except (MemoryError, OSError) as error:
                message = f"the machine has no memory for {mib(plan.need_bytes(outcome.position))}: {error}"
                return Refused(RefusalReason.MEMORY, message)
            undo.pop_all()
        if file is not None:
            self.disk.charge(file.taken_bytes)
        self._flights[owner] = flight
        return flight

    def _at_block(self, plan: Plan, outcome: Decision | Refused) -> Decision | Refused:
        """A checksum covers a whole block, so a block that fits only in part cannot be read."""
        if isinstance(outcome, Refused) or outcome.position == len(plan.units):
            return outcome
        size = self.config.block_tokens
        return replace(outcome, position=outcome.position // size * size)

    def _refused_by_disk(self, plan: Plan, file: ExtentRef, history: History) -> Refused | None:
        """Makes the room on disk that a file may take, or says why there is none."""
        disk, queue, size = self.disk, self.queue, file_bytes(file.size)
        queue.allowance.refill(self._clock())
        returned = history.turns > 1
        if not worth_writing(size, queue.allowance.left_bytes, queue.allowance.share, has_returned=returned):
            return Refused(RefusalReason.VALUE, "what may be written to disk today is nearly used up")
        if queue.is_paused:
            return Refused(RefusalReason.BUSY, "the disk failed a moment ago")
        index_bytes = index_limit_bytes(len(plan.units), self.config.block_tokens)
        if not self.table.make_disk_room(size, index_bytes, self._clock()):
            return Refused(RefusalReason.BUDGET, f"needs {mib(size)} on disk, of {mib(disk.config.budget_bytes)}")
        if not disk.has_room(size):
            queue.on_work()
            return Refused(RefusalReason.BUSY, f"needs {mib(size)} on disk, where files are being removed for it")
        return None

    def _evict_for(self, plan: Plan, decision: Decision) -> None:
        reason = "its room was needed for another conversation"  # not of how many tokens: it may be another key's
        in_flight = self._replaced_in_flight()
        while not self._admission.has_room(plan, decision.position, in_flight, decision.prefixes):
            assert decision.queue is not None, "there was room"
            self.table.evict(decision.queue.pop(), reason)
            self._totals["evictions"] += 1

    def _replaced_in_flight(self) -> list[Replaced]:
        return [flight.replaces for flight in self._flights.values()]

    def _release_plan(self, owner: Owner, plan: Plan) -> None:
        """Releases what a plan holds, when it is refused or fails."""
        self.table.blocks.release(owner, plan.held)
        self.table.checkpoints.release(checkpoint.id for checkpoint in plan.inherited)

    def _refused(self, request: CaptureRequest, refused: Refused) -> Refused:
        self._refusals[refused.reason.value] += 1
        if refused.reason is not RefusalReason.OFF:
            known = request.key_digest, request.prefix_hashes
            self.table.gone.remember(*known, "not parked", refused.message, self._clock())
        return refused

    # Ends

    def _id_after(self, name: Name | None) -> ConversationId:
        """A new id, of the conversation with that name if it continues one."""
        return self._new_id() if name is None else f"{name}{NAME_END}{self._new_id()}"

    def _publish(self, flight: Flight, conversation: Conversation, parked: Parked) -> InRam:
        """Makes what was filled visible, and empties the places in RAM of what it supersedes."""
        ram = InRam(parked, flight.owner, flight.history, floor=self.table.floor)
        places = [*(checkpoint.position for checkpoint in parked.checkpoints), *flight.plan.dropped]
        prefixes = self.table.prefixes_of(parked.key_digest, parked.units, parked.prefix_hashes)
        for ancestor in superseded((each for each in prefixes if each.ram is not None), places):
            assert ancestor.ram is not None
            conversation.is_pinned |= ancestor.is_pinned
            for waiter in tuple(ancestor.ram.awaited_by):
                waiter.move(ram)
            self.table.leave_ram(ancestor)
            self._totals["superseded"] += 1
        del self._flights[flight.owner]
        self.table.enter_ram(conversation, ram)
        self.queue.cancel_superseded()
        self._totals["captures"] += 1
        self._totals["captured_tokens"] += flight.position
        self._totals["kept_tokens"] += flight.plan.start(flight.position)
        return ram

    def _publish_read(self, flight: Flight, source: Conversation, *, is_used: bool) -> Parked:
        """Publishes what was read: the conversation itself, or its beginning as one of its own."""
        table, known, end = self.table, source.parked, flight.position
        table.blocks.seal(flight.fresh_blocks, None)
        table.checkpoints.seal(flight.fresh_checkpoints, None)
        parked = replace(known, tier=Tier.PROMOTED, last_used_s=self._clock() if is_used else known.last_used_s)
        conversation = source
        if end < known.position:
            units = known.units[:end].copy()
            units.flags.writeable = False
            parked = replace(
                parked,
                id=self._id_after(name_of(known.id)),
                units=units,
                prefix_hashes=known.prefix_hashes[: end // self.config.block_tokens],
                blocks=flight.blocks,
                checkpoints=flight.checkpoints,
            )
            conversation = Conversation(parked, source=source)
        self._publish(flight, conversation, parked)
        return parked

    def _publish_recut(self, flight: Flight, source: Conversation, job: RecutJob) -> Parked:
        """Publishes what was read and cut for this layer split, as a row of its own: it shares no bytes with the
        source, which stays on disk until this is written in its place."""
        table, known, end = self.table, source.parked, flight.position
        table.blocks.seal(flight.fresh_blocks, job.sums)
        table.checkpoints.seal(flight.fresh_checkpoints, job.fixed_sums)
        units = known.units[:end].copy()
        units.flags.writeable = False
        parked = replace(
            known,
            id=self._id_after(name_of(known.id)),
            units=units,
            prefix_hashes=known.prefix_hashes[: end // self.config.block_tokens],
            blocks=flight.blocks,
            checkpoints=flight.checkpoints,
            tier=Tier.PROMOTED,
            last_used_s=self._clock(),
        )
        conversation = Conversation(parked, source=source)
        ram = self._publish(flight, conversation, parked)
        if end == known.position:
            self.queue.offer(conversation, ram)
        return parked

    def _is_recut(self, source: Conversation) -> bool:
        """Whether a conversation of another layer split is in RAM in this one, or on its way there."""
        flying = any(flight.source is source for flight in self._flights.values())
        return flying or any(each.source is source for each in self.table.in_ram.values())

    def _written_file(self, flight: Flight, reserved: ExtentRef, size: int) -> ExtentRef:
        """The file of a capture at its true length. Raises ValueError if it is empty or longer than was reserved."""
        if not 0 < size <= reserved.size:
            raise ValueError(f"a file of {size} bytes where {reserved.size} were reserved")
        file = ExtentRef(reserved.id, size)
        self.disk.uncharge(reserved.taken_bytes - file.taken_bytes)
        self.table.blocks[flight.fresh_blocks[0]].file = self.disk.state_file(file)
        return file

    def _drop_unlike(self, flight: Flight, checksums: Checksums) -> None:
        """Drops from disk what differs from blocks that were captured again under the id they have there.

        Such a block must have the same bytes. If it has not, the live rows were not what they were taken for, and
        nothing may build on the copy on disk.
        """
        for block_id, sums in zip(flight.fresh_blocks, checksums.rows, strict=True):
            block = self.table.blocks[block_id]
            if block.disk is not None and block.sums != sums.tobytes():
                self.table.leave_damaged(block.disk.extent)

    def _abort(self, serial: Owner) -> None:
        flight = self._flights.pop(serial, None)
        if flight is None:
            return
        if flight.file is not None:
            self.disk.condemn(flight.file.name, flight.file.taken_bytes)
            self.queue.on_work()
        release_flight(self.table, flight)
        self._totals["aborts"] += 1

    def _read_failed(self, job: ReadJob, error: Exception) -> None:
        """Removes the conversations that a failed read shows to be lost."""
        lost = self.disk.lost_extents(job, error)
        for each in (conversation for extent in lost for conversation in self.table.leave_damaged(extent)):
            if each.ram is None:
                known = each.parked.key_digest, each.parked.prefix_hashes
                self.table.gone.remember(*known, "dropped", f"it could not be read: {error}", self._clock())

    def _expire(self) -> None:
        """Drops conversations that were not used for the maximum age, in RAM and on disk."""
        age_s, now_s = self.disk.config.max_age_s, self._clock()
        if age_s is None or now_s < self._expire_at_s:
            return
        self._expire_at_s = now_s + EXPIRY_STEP_S
        for each in self.table.all():
            if each.parked.last_used_s < now_s - age_s and not (each.is_pinned or each.keepers):
                self.drop(each.id, f"it was not used for {age_s / 3600:.0f} hours")
