"""RAM and disk as one store: RAM is a cache of what is parked.

    commit ──> RAM, waiting ──write──> RAM and disk ──evicted from RAM──> disk ──promote──> RAM and disk

Conversations and blocks keep their ids in both tiers, so live rows still descend from blocks that leave RAM and return.
A conversation that waits for its write is leased by the write queue: until its bytes are on disk it is restored from
RAM, and not evicted.

Like the store that it extends, this class never waits: `next_job` hands out file work, and the caller reports to
`finished` how it ended. A promotion (a read from disk into RAM) is a capture whose bytes come from a file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from parkd.state import Checksums, StateFile, StateLayout
from parkd.store.disk import DiskTier
from parkd.store.disk_jobs import MarkJob, RemoveJob, WriteJob
from parkd.store.disk_layout import read_job
from parkd.store.disk_policy import WriteAllowance
from parkd.store.disk_records import DiskEntry, DiskStats, touched
from parkd.store.inspection import Inspection, with_disk
from parkd.store.planning import CapturePlan
from parkd.store.promotions import (
    Loading,
    Promotion,
    drop_unlike,
    end_of_read,
    give_up,
    know_checkpoints,
    load_request,
    sizes_on_disk,
)
from parkd.store.records import (
    BlockId,
    Capture,
    CaptureRequest,
    ConversationGone,
    ConversationId,
    Lease,
    Parked,
    RefusalReason,
    Refused,
    StoreConfig,
    Tier,
)
from parkd.store.shelf import Entry
from parkd.store.stats import disk_stats
from parkd.store.store import CANDIDATE_LIMIT, ConversationStore
from parkd.store.write_queue import QUEUE_SHARE, DiskSources, WriteQueue

EXPIRY_STEP_S = 60.0
MARK_STEP_S = 300.0
"""How often last uses are written to disk: a crash loses about this much of them."""


class TieredStore(ConversationStore):
    """`ConversationStore` over RAM and disk. `stats` describes RAM, `disk_stats` the disk."""

    def __init__(
        self,
        config: StoreConfig,
        layout: StateLayout,
        clock: Callable[[], float],
        *,
        disk: DiskTier,
        sources: DiskSources,
        allowance: WriteAllowance,
        **options: object,
    ) -> None:
        """The disk's index is charged to the memory budget. `options` are passed on to ConversationStore."""
        memory = replace(config, budget_bytes=max(0, config.budget_bytes - disk.config.index_bytes))
        super().__init__(memory, layout, clock, **options)  # type: ignore[arg-type]
        self.disk = disk
        self._shelf.blocks.number_from(sources.first_block)
        limit_bytes = memory.budget_bytes // QUEUE_SHARE
        self.queue = WriteQueue(self._shelf, disk, layout, clock, sources, allowance, limit_bytes)
        self._sources = sources
        self._loading: DiskEntry | None = None
        """The conversation whose promotion is being reserved, while `begin_capture` runs for it."""
        self._promotions: dict[int, Loading] = {}
        self._sources_of: dict[ConversationId, ConversationId] = {}
        """Conversations in RAM that are the beginning of a longer one on disk, by id, with the id of that one."""
        self._shelf.is_on_disk = lambda known: self._sources_of.get(known, known) in disk.entries
        disk.on_moved = self._shelf.moved
        self._reads: Counter[str] = Counter()
        self._expire_at_s = float("-inf")

    # Look-up

    def candidates(
        self, key_digest: bytes, prefix_hashes: tuple[bytes, ...], limit: int = CANDIDATE_LIMIT
    ) -> list[tuple[Parked, int]]:
        found = super().candidates(key_digest, prefix_hashes, limit)
        known = {parked.id for parked, _ in found}
        for conversation_id, shared in self.disk.index.find(key_digest, prefix_hashes, limit):
            if conversation_id not in known and conversation_id not in self._shelf.entries:
                found.append((self.disk.entries[conversation_id].parked, shared))
        found.sort(key=lambda pair: -pair[1])  # stable: what is in RAM stays before what is not
        return found[:limit]

    def get(self, conversation_id: ConversationId) -> Parked | None:
        parked = super().get(conversation_id)
        if parked is None and conversation_id in self.disk.entries:
            return self.disk.entries[conversation_id].parked
        return parked

    def touch(self, conversation_id: ConversationId) -> None:
        self._touch_disk(conversation_id)
        if conversation_id in self._shelf.entries or conversation_id not in self.disk.entries:
            super().touch(conversation_id)

    def pin(self, conversation_id: ConversationId) -> None:
        self._set_pinned(conversation_id, is_pinned=True)

    def unpin(self, conversation_id: ConversationId) -> None:
        self._set_pinned(conversation_id, is_pinned=False)

    def lease(self, conversation_id: ConversationId, stop: int, start: int = 0) -> Lease:
        """As in RAM. Raises ConversationGone for a conversation that is only on disk: promote it first."""
        lease = super().lease(conversation_id, stop, start)
        entry = self._shelf.entries[conversation_id]
        entry.parked = replace(entry.parked, tier=Tier.RAM)
        self._touch_disk(conversation_id)
        return lease

    def drop(self, conversation_id: ConversationId, reason: str) -> bool:
        self.queue.cancel(conversation_id)
        was_in_ram = super().drop(conversation_id, reason)
        entry = self.disk.entries.get(conversation_id)
        if entry is not None:
            self.disk.forget(entry)
        return was_in_ram or entry is not None

    # Captures and promotions

    def commit(self, capture: Capture, checksums: Checksums) -> Parked:
        loading = self._promotions.get(capture.serial)
        if loading is None:
            flight = self._captures.get(capture.serial)
            drop_unlike(self.disk, () if flight is None else flight.fresh_blocks, checksums)
        parked = super().commit(capture, checksums)
        self._promotions.pop(capture.serial, None)
        self.queue.cancel_superseded()
        if loading is None:
            self._offer(capture, parked)
        return parked

    def abort(self, capture: Capture) -> None:
        self._promotions.pop(capture.serial, None)
        super().abort(capture)

    def promote(self, conversation_id: ConversationId, stop: int) -> Promotion | Refused:
        """Reserves room in RAM for the blocks of `[0, stop)` that are only on disk.

        Reserves less than that if no more fits; the whole conversation if its state cannot be cut. Run the promotion's
        job, then call `promoted`. Raises ConversationGone.
        """
        entry = self.disk.entries.get(conversation_id)
        if entry is None or entry.is_foreign:
            raise ConversationGone(conversation_id)
        parked, size = entry.parked, self.config.block_tokens
        end = end_of_read(parked, stop, size, self.layout)
        blocks = parked.blocks[: -(-end // size)]
        held = [self._shelf.blocks.get(block_id) for block_id in blocks]
        if conversation_id in self._shelf.entries or any(b is not None and b.sums is None for b in held):
            return Refused(RefusalReason.BUSY, "it is being read from disk, or copied")
        capture = self._load(entry, end)
        if isinstance(capture, Capture) and capture.position < end:
            # A checksum covers a whole block, so a block that fits only in part cannot be read.
            self.abort(capture)
            end = capture.position // size * size
            if self.layout.fixed_bytes or end == 0:
                return Refused(RefusalReason.BUDGET, f"no more than {capture.position} of its tokens would fit")
            capture = self._load(entry, end)
        if isinstance(capture, Refused):
            return capture
        return self._promotion(entry, capture)

    def promoted(self, promotion: Promotion, error: Exception | None) -> Parked | None:
        """Ends a promotion whose job ended with `error`. Returns what is now in RAM.

        None if the read failed; what it showed to be damaged is dropped.
        """
        entry = self.disk.entries.get(promotion.source)
        if entry is not None:
            entry.readers -= 1
        self.disk.let_go(ref for ref, _ in promotion.job.extents)
        if error is None and entry is not None:
            self._reads["reads"] += 1
            self._reads["bytes"] += promotion.job.bytes
            parked = self.commit(promotion.capture, promotion.sums)
            if not promotion.is_whole:
                self._sources_of[parked.id] = promotion.source
            know_checkpoints(self.disk, self._shelf, entry.manifest, parked)
            return parked
        self.abort(promotion.capture)
        if error is not None:
            self._reads["failures"] += 1
            self._read_failed(promotion, error)
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
        return self.disk.marks(self._sources.wall() - self._clock(), 0.0 if stops else MARK_STEP_S)

    @property
    def has_writes(self) -> bool:
        """True while conversations wait for their write. The room in RAM that they hold becomes free."""
        return len(self.queue) > 0

    @property
    def frees_room(self) -> bool:
        """True while file work is under way that frees room, in RAM or on disk."""
        return (self.has_writes and not self.queue.is_paused) or self.disk.has_removals

    def disk_stats(self) -> DiskStats:
        return disk_stats(self.disk, self.queue, self._reads)

    def inspect(self) -> Inspection:
        sources = {serial: loading.parked.id for serial, loading in self._promotions.items()}
        return with_disk(super().inspect(), self.disk, sources, self.queue.waiting)

    # What differs from a store of RAM alone

    def _parked(self, capture: Capture, flight: object) -> Parked:
        parked = super()._parked(capture, flight)  # type: ignore[arg-type]
        loading = self._promotions.get(capture.serial)
        if loading is None:
            return parked
        parked = replace(parked, tier=Tier.PROMOTED, parked_at_s=loading.parked.parked_at_s)
        is_whole = loading.is_whole and capture.position == loading.parked.position
        return replace(parked, id=loading.parked.id) if is_whole else parked

    def _shapes(self, plan: CapturePlan, position: int) -> Sequence[tuple[int, int, bytes]]:
        """A block is read with all rows it was written with. These may reach further than the conversation, if it was
        parked in part because no more fitted."""
        shapes = super()._shapes(plan, position)
        if self._loading is None:
            return shapes
        places = self._loading.manifest.blocks
        return [(index, places[index].rows, places[index].identity) for index, _, _ in shapes]

    def _names(self, request: CaptureRequest, shapes: Sequence[tuple[int, int, bytes]]) -> list[BlockId | None]:
        names: list[BlockId | None] = []
        if self.layout.is_opaque and self._loading is None:
            return [None] * len(shapes)  # the same tokens computed again need not give the same bytes
        for index, rows, identity in shapes:
            known = request.lineage[index] if index < len(request.lineage) else None
            place = self.disk.blocks.get(known) if known is not None else None
            is_same = place is not None and (place.rows, place.identity) == (rows, identity)
            names.append(known if is_same and known is not None and self._shelf.blocks.get(known) is None else None)
        return names

    def _forget(self, entry: Entry, verb: str, reason: str) -> None:
        source = self._sources_of.pop(entry.parked.id, entry.parked.id)
        if source in self.disk.entries and verb == "evicted":
            self._shelf.take_off(entry)  # not gone: it is still on disk
        else:
            super()._forget(entry, verb, reason)

    def _refused(self, request: CaptureRequest, refused: Refused) -> Refused:
        return refused if self._loading is not None else super()._refused(request, refused)

    def _offer(self, capture: Capture, parked: Parked) -> None:  # noqa: ARG002 - for a store of files
        """Offers what was captured to the write queue."""
        self.queue.offer(self._shelf.entries[parked.id])

    def _file_on_disk(self, entry: DiskEntry) -> StateFile | None:  # noqa: ARG002
        """The file of a state that stays in its file; None if its bytes are read into RAM."""
        return None

    # Reading

    def _load(self, entry: DiskEntry, end: int) -> Capture | Refused:
        """Reserves room for `[0, end)`. Never refused for value: the conversation is known to return now."""
        selective = self._admission
        self._admission = replace(selective, admits_all=True)
        self._loading = entry
        try:
            request = load_request(
                entry.parked,
                end,
                self.config.block_tokens,
                rewindable=not self.layout.fixed_bytes,
                sizes=sizes_on_disk(entry.manifest),
                file=self._file_on_disk(entry),
            )
            return self.begin_capture(request)
        finally:
            self._loading = None
            self._admission = selective

    def _promotion(self, entry: DiskEntry, capture: Capture) -> Promotion:
        flight = self._captures[capture.serial]
        whole = capture.position == entry.parked.position
        self._promotions[capture.serial] = Loading(entry.parked, whole)
        job, sums = read_job(self._shelf, entry.manifest, capture.transfer, flight.fresh_blocks)
        entry.readers += 1
        self.disk.hold(ref for ref, _ in job.extents)
        return Promotion(entry.manifest.id, capture, job, sums, whole)

    def _read_failed(self, promotion: Promotion, error: Exception) -> None:
        reason = f"it could not be read: {error}"
        for entry in give_up(self.disk, promotion, error):
            if entry.manifest.id not in self._shelf.entries:
                parked = entry.parked
                self._gone.remember(parked.key_digest, parked.prefix_hashes, "dropped", reason, self._clock())

    # Bookkeeping of both tiers

    def _touch_disk(self, conversation_id: ConversationId) -> None:
        for known in (conversation_id, self._sources_of.get(conversation_id)):
            if known is not None and known in self.disk.entries:
                touched(self.disk.entries[known], self._clock())

    def _set_pinned(self, conversation_id: ConversationId, *, is_pinned: bool) -> None:
        on_disk = self.disk.entries.get(conversation_id)
        if on_disk is not None:
            on_disk.is_pinned = is_pinned
        if conversation_id in self._shelf.entries or on_disk is None:
            self._shelf.entry(conversation_id).is_pinned = is_pinned

    def _expire(self) -> None:
        """Drops conversations that were not used for the maximum age, in both tiers."""
        age_s, now_s = self.disk.config.max_age_s, self._clock()
        if age_s is None or now_s < self._expire_at_s:
            return
        self._expire_at_s = now_s + EXPIRY_STEP_S
        entries: list[Entry | DiskEntry] = [*self._shelf.entries.values(), *self.disk.entries.values()]
        old = {e.parked.id for e in entries if e.parked.last_used_s < now_s - age_s and not e.is_pinned}
        for conversation_id in old:
            self.drop(conversation_id, f"it was not used for {age_s / 3600:.0f} hours")
