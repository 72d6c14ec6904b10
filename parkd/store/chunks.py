"""The disk half of the store alone, for an engine that keeps state in memory of its own, as chunks that it names.

A chunk is a piece of state of one fixed size, under a key that stands for all tokens up to its end and for whatever
else the engine puts into it. The chunks of a conversation, in order, are its chain. On disk a conversation is what it
is elsewhere in the store, with one chunk for a row: a manifest over extents, so that it exists whole or not at all.

    offer ──waits in the engine's memory──> write job ──finished──> a conversation on disk, what it supersedes is gone
    begin_read ──> read job into the engine's memory ──finished_read──> filled and compared, or damaged and dropped

Synchronous and used from one thread: it hands out jobs (`files/disk_jobs.py`) and is told how they ended, as
`ConversationStore` does. The engine keeps the bytes of a chunk unchanged from `offer` until its offer is among `done`.
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from parkd.state import Bytes, StageLayout, StateLayout
from parkd.state.sums import XXH3
from parkd.store.blocks import BlockTable, RowPlaces, StateKind
from parkd.store.budget import mib
from parkd.store.checkpoints import CheckpointTable
from parkd.store.conversations import Conversation, Conversations, superseded
from parkd.store.disk import Disk, DiskSetup, index_bytes_of, job_bytes, manifest_limit_bytes
from parkd.store.disk_policy import WriteAllowance, WritePause, worth_writing
from parkd.store.files.disk_jobs import MarkJob, Part, ReadJob, RemoveJob, WriteJob, leftovers
from parkd.store.files.disk_layout import lay_out
from parkd.store.files.fs import FileSystem
from parkd.store.files.manifest import DiskBlock, DiskPlace, Manifest
from parkd.store.memory import Memory
from parkd.store.opening import new_block_epoch, parked_of, recover, scan, written_last_day
from parkd.store.records import NAME_END, BlockId, DiskConfig, StoreConfig
from parkd.types import HASH_BYTES, Units

log = logging.getLogger(__name__)

Key = bytes
"""The engine's name of a chunk. All keys of a store have the same length."""
BATCH_BYTES = 64 << 20
"""A conversation that still runs is written once so much of it waits: each write syncs, and replaces its manifest."""
STALE_KEYS = 1024
"""About how many keys of chunks that are gone may stay in the look-up table beside as many as there are others."""


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    key: Key
    buffer: Bytes
    """`[chunk_bytes]`, in the engine's memory."""


@dataclass(frozen=True, slots=True)
class Done:
    """The end of an offer: its memory is no longer needed."""

    offer: int
    bytes: int
    """What was written for it; 0 if it was there already, or was not kept."""
    why_not: str = ""
    """Why it was not kept; empty if it was."""


@dataclass(frozen=True)
class ChunkOptions:
    """The operator's settings. Sizes are of files, rounded up to pages."""

    budget_bytes: int
    index_bytes: int
    """Most memory for what describes the files."""
    write_bytes_per_day: int
    waiting_bytes: int
    """Most bytes of the engine's memory that wait for their write."""
    batch_bytes: int = BATCH_BYTES


@dataclass(eq=False)
class _Talk:
    """A conversation that runs in the engine."""

    chain: dict[Key, None] = field(default_factory=dict)
    waiting: dict[int, Sequence[Chunk]] = field(default_factory=dict)
    """Chunks by offer."""
    bytes: int = 0
    is_ready: bool = False
    """What waits is to be written, however little it is."""
    has_ended: bool = False


@dataclass(eq=False)
class _Writing:
    job: WriteJob
    offers: dict[int, int]
    """Bytes that are written for each."""
    conversation: Conversation
    reused: tuple[int, ...]
    """Extents that are held for it."""
    is_charged: bool = False
    """It was handed out; before that it waits for room that removals free."""


class ChunkStore:
    """Conversations on disk, under one budget. `fingerprint`, 16 bytes, says whose chunks these are and what their
    bytes mean: what was written under another is never read, and makes room first."""

    def __init__(
        self,
        fs: FileSystem,
        options: ChunkOptions,
        chunk_bytes: int,
        fingerprint: bytes,
        *,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        """Opens what the directory holds, and removes what is damaged, half-written or beyond the budget. Raises
        OSError if the directory cannot be read."""
        layout = StateLayout((StageLayout(0, 1, chunk_bytes, 0, fingerprint),), XXH3, block_tokens=1)
        found = scan(fs)
        config = DiskConfig(options.budget_bytes, fingerprint, options.index_bytes, options.write_bytes_per_day)
        self.allowance = WriteAllowance.full(options.write_bytes_per_day, clock(), written_last_day(found, wall()))
        first = new_block_epoch(block.id for manifest, _ in found.manifests for block in manifest.blocks)
        setup = DiskSetup(config, self.allowance, wall, lambda: secrets.randbits(64), first)
        memory = Memory(StoreConfig(0, 1), layout, None, None)  # of none: the bytes are the engine's
        self._blocks = BlockTable(RowPlaces(layout, 1, memory.slabs), 1, memory.budget, first)
        checkpoints = CheckpointTable(layout, memory.idle)
        self.disk = Disk(setup, self._blocks, checkpoints)
        self.table = Conversations(StateKind(layout, 1), memory, self._blocks, checkpoints, self.disk, clock)
        self.options = options
        self.chunk_bytes = chunk_bytes
        self.counts: Counter[str] = Counter()
        self._key_digest = fingerprint
        self._digest = layout.digest
        self._clock = clock
        self._pause = WritePause()
        self._ids: dict[Key, BlockId] = {}
        self._sweep_at = STALE_KEYS
        self._talks: dict[str, _Talk] = {}
        self._waiting_bytes = 0
        self._writing: _Writing | None = None
        self._reading: dict[ReadJob, None] = {}
        self._done: list[Done] = []
        recover(self.table, fs, found)
        for conversation, _ in self.table.on_disk():
            if not conversation.is_foreign:
                self._enter(conversation)

    # Look-up

    def has(self, key: Key) -> bool:
        """Whether a chunk can be read."""
        block = self._blocks.get(self._ids.get(key, 0))
        return block is not None and block.disk is not None

    def touch(self, keys: Sequence[Key]) -> None:
        """Notes that the conversation that shares most with this chain is used now."""
        for conversation, shared in self.table.find(self._key_digest, tuple(keys), 1):
            if shared:
                self.table.used(conversation)

    # Writes

    def follow(self, talk: str, chain: Iterable[Key]) -> None:
        """Says what the chain of a conversation that runs is by now. Chunks that were offered and are not in it come
        after it."""
        running = self._talks.setdefault(talk, _Talk())
        running.chain = dict.fromkeys(chain) | running.chain

    def offer(self, number: int, talk: str, chunks: Sequence[Chunk]) -> None:
        """Offers chunks of a conversation that runs, under a number of the caller's. Whether they are kept or not, the
        number will be among `done`."""
        running = self._talks.setdefault(talk, _Talk())
        running.chain.update(dict.fromkeys(chunk.key for chunk in chunks))
        size = sum(chunk.buffer.nbytes for chunk in chunks if not self.has(chunk.key))
        if self._pause.is_on(self._clock()):
            self._give_up({number: chunks}, "the disk failed a moment ago")
        elif size and self._waiting_bytes + size > self.options.waiting_bytes:
            self._give_up({number: chunks}, f"{mib(self._waiting_bytes)} wait to be written already")
            self.write_all()
        else:
            running.waiting[number] = chunks
            running.bytes += size
            self._waiting_bytes += size
            running.is_ready |= running.bytes >= self.options.batch_bytes

    @property
    def running(self) -> int:
        """Conversations that run, or wait for their last write."""
        return len(self._talks)

    def ended(self, talk: str) -> None:
        """The conversation does not go on in the engine: what waits of it is written now."""
        running = self._talks.get(talk)
        if running is None:
            return
        running.has_ended = running.is_ready = True
        if not running.waiting:
            self.touch(tuple(running.chain))
            del self._talks[talk]

    def write_all(self) -> None:
        """What waits of any conversation is written now."""
        for running in self._talks.values():
            running.is_ready = bool(running.waiting)

    def next_job(self) -> WriteJob | RemoveJob | None:
        """The next job on files, if there is one: run it and call `finished` before the next call of this."""
        removal = self.disk.next_removal_job()
        if removal is not None or self.disk.is_removing:
            return removal
        while self._writing is None and self._prepare_next():
            pass
        writing = self._writing
        if writing is None or writing.is_charged:
            return None
        removal, size = self.disk.next_removal_job(), job_bytes(writing.job)
        if removal is not None:
            return removal
        if not self.disk.has_room(size):
            self._end(writing, "files that are in its place could not be removed")
            return None
        writing.is_charged = True
        self.allowance.spend(size)
        self.disk.charge(size)
        return writing.job

    def finished(self, job: WriteJob | RemoveJob, error: Exception | None, left: Sequence[str] = ()) -> None:
        """Ends a job; `left` are the files that a removal could not remove."""
        if isinstance(job, RemoveJob):
            self.disk.removed(job, left)
            return
        writing = self._writing
        assert writing is not None
        assert writing.job is job
        if error is None:
            self._pause.succeeded()
            self._written(writing)
            self._end(writing)
            return
        log.warning("state could not be written to disk: %s", error)
        self.counts["write_failures"] += 1
        self.disk.write_failed(job, leftovers(job))
        self._pause.failed(self._clock())
        self._end(writing, f"the disk failed: {error}")
        for name, running in list(self._talks.items()):  # a broken disk holds no memory
            self._give_up(self._taken(name, running), "the disk failed a moment ago")

    def take_done(self) -> list[Done]:
        """The offers that ended since the last call."""
        done, self._done = self._done, []
        return done

    # Reads

    def begin_read(self, chunks: Sequence[Chunk]) -> ReadJob | None:
        """The job that fills these buffers; None if one of the chunks is not there any more. Run it, then call
        `finished_read`."""
        parts: dict[int, list[Part]] = {}
        for chunk in chunks:
            block = self._blocks.get(self._ids.get(chunk.key, 0))
            if block is None or block.disk is None:
                return None
            place = block.disk
            parts.setdefault(place.extent, []).append(Part(int(place.offsets[0]), chunk.buffer, place.file_sums, 0))
        job = ReadJob(
            tuple(
                (self.disk.ref(extent), tuple(sorted(found, key=lambda part: part.offset)))
                for extent, found in parts.items()
            )
        )
        self.disk.hold(ref for ref, _ in job.extents)
        return job

    def finished_read(self, job: ReadJob, error: Exception | None) -> None:
        """Ends a read. What it showed to be lost is dropped, so that a second look-up misses it."""
        self.disk.let_go(ref for ref, _ in job.extents)
        if error is None:
            self.counts["reads"] += 1
            self.counts["read_bytes"] += job.bytes
            return
        lost = self.disk.lost_extents(job, error)
        dropped = {each.id for extent in lost for each in self.table.leave_damaged(extent)}
        self.counts["read_failures"] += 1
        self.counts["dropped"] += len(dropped)
        log.warning("state on disk could not be used, and will be computed again: %s", error)

    def next_marks(self, *, stops: bool = False) -> MarkJob | None:
        """As of `ConversationStore`."""
        return self.table.next_marks(self.disk.setup.wall() - self._clock(), stops=stops)

    # How a write is made

    def _prepare_next(self) -> bool:
        """Prepares the write of the next conversation that is ready. False if none is."""
        ready = next(((name, running) for name, running in self._talks.items() if running.is_ready), None)
        if ready is None:
            return False
        chain = tuple(ready[1].chain)
        self._writing = self._prepared(chain, self._taken(*ready))
        return True

    def _taken(self, name: str, running: _Talk) -> dict[int, Sequence[Chunk]]:
        """What waits of a conversation, which waits no more. One that runs on comes after the others."""
        offers, running.waiting = running.waiting, {}
        self._waiting_bytes -= running.bytes
        running.bytes, running.is_ready = 0, False
        del self._talks[name]
        if not running.has_ended:
            self._talks[name] = running
        return offers

    def _prepared(self, whole: tuple[Key, ...], offers: dict[int, Sequence[Chunk]]) -> _Writing | None:
        """The write of what was offered of a chain, with the extents it reuses held and others condemned to make room;
        None if there is nothing to write, which ends the offers."""
        waiting = {chunk.key: chunk for chunks in offers.values() for chunk in chunks}
        fresh = {key: chunk for key, chunk in waiting.items() if not self.has(key)}
        chain = tuple(key for key in whole if key in fresh or self.has(key))
        if chain[:1] != whole[:1]:
            self._give_up(offers, "its beginning is not on disk")
            return None
        if not fresh and any(shared == len(chain) for _, shared in self.table.find(self._key_digest, chain, 1)):
            self.touch(chain)
            self._done += [Done(number, 0) for number in offers]
            return None
        size = len(fresh) * self.chunk_bytes
        self.allowance.refill(self._clock())
        returned = len(fresh) < len(chain)
        if not worth_writing(size, self.allowance.left_bytes, self.allowance.share, has_returned=returned):
            self._give_up(offers, "what may be written to disk today is nearly used up")
            return None
        job, reused = self._job(chain, fresh)
        conversation = Conversation(
            parked_of(job.manifest, self._clock(), self.disk.setup.wall(), job.manifest.last_used_s)
        )
        self.disk.hold(self.disk.ref(number) for number in reused)
        taken, index_bytes, ancestors = job_bytes(job), index_bytes_of(job.manifest), self._superseded(conversation)
        if not self.table.make_disk_room(taken, index_bytes, self._clock(), ancestors):
            self.disk.let_go([self.disk.ref(number) for number in reused])
            self._give_up(offers, f"needs {mib(taken)} on disk, of {mib(self.disk.config.budget_bytes)}")
            return None
        written, new = {}, set(fresh)
        for number, chunks in offers.items():
            mine = new & {chunk.key for chunk in chunks}
            new -= mine
            written[number] = len(mine) * self.chunk_bytes
        return _Writing(job, written, conversation, reused)

    def _end(self, writing: _Writing, why_not: str = "") -> None:
        """Ends a write and its offers."""
        self.disk.let_go([self.disk.ref(number) for number in writing.reused])
        self._done += [Done(number, 0 if why_not else size, why_not) for number, size in writing.offers.items()]
        self.counts["not_written"] += len(writing.offers) if why_not else 0
        self._writing = None

    def _job(self, chain: tuple[Key, ...], fresh: dict[Key, Chunk]) -> tuple[WriteJob, tuple[int, ...]]:
        """The write of a chain, and the extents that it reuses."""
        extent = self.disk.setup.new_extent()
        laid: list[tuple[list[Bytes], DiskPlace]] = []
        blocks: list[DiskBlock] = []
        for key in chain:
            if key in fresh:
                sums = np.zeros(1, dtype=np.uint64)  # filled in by the write, before the manifest is encoded
                place = DiskPlace(extent, np.zeros(1, dtype=np.uint64), sums)
                laid.append(([fresh[key].buffer], place))
                blocks.append(DiskBlock(self._blocks.new_id(), 1, _identity(key), sums, place))
            else:
                name = self._ids[key]
                block = self._blocks[name]
                assert block.disk is not None
                assert block.sums is not None
                blocks.append(DiskBlock(name, 1, block.identity, np.frombuffer(block.sums, "<u8"), block.disk))
        parts, new = lay_out(laid, 1, extent, is_summed=False)
        reused = tuple(dict.fromkeys(each.place.extent for each in blocks if each.place.extent != extent))
        now_s, units = self.disk.setup.wall(), _units(chain)
        manifest = Manifest(
            id=self._new_id(units, chain),
            namespace="",
            key_digest=self._key_digest,
            fingerprint=self.disk.config.fingerprint,
            layout_digest=self._digest,
            block_tokens=1,
            stages=1,
            units=units,
            prefix_hashes=chain,
            parked_at_s=now_s,
            last_used_s=now_s,
            extents=tuple(map(self.disk.ref, reused)) + ((new,) if new is not None else ()),
            blocks=tuple(blocks),
            checkpoints=(),
        )
        return WriteJob(manifest, new, parts), reused

    def _new_id(self, units: Units, chain: tuple[Key, ...]) -> str:
        name = self.table.continued(self._key_digest, units, chain)
        fresh = secrets.token_hex(8)
        return fresh if name is None else f"{name}{NAME_END}{fresh}"

    def _superseded(self, conversation: Conversation) -> list[Conversation]:
        parked = conversation.parked
        return superseded(self.table.prefixes_of(parked.key_digest, parked.units, parked.prefix_hashes), ())

    def _written(self, writing: _Writing) -> None:
        job, parked = writing.job, writing.conversation.parked
        self.counts["writes"] += 1
        self.counts["written_bytes"] += job_bytes(job)
        ancestors = self._superseded(writing.conversation)
        self.table.found_on_disk(job.manifest, manifest_limit_bytes(job.manifest), parked, is_foreign=False)
        conversation = self.table.known(parked.id)
        self._enter(conversation)
        for each in ancestors:
            self.table.leave_disk(each)

    def _enter(self, conversation: Conversation) -> None:
        """Makes the chunks of a conversation on disk known by their keys."""
        self._ids.update(zip(conversation.parked.prefix_hashes, conversation.parked.blocks, strict=True))
        if len(self._ids) > self._sweep_at:
            self._ids = {key: name for key, name in self._ids.items() if self.has(key)}
            self._sweep_at = 2 * len(self._ids) + STALE_KEYS

    def _give_up(self, offers: dict[int, Sequence[Chunk]], why_not: str) -> None:
        self.counts["not_written"] += len(offers)
        self._done += [Done(number, 0, why_not) for number in offers]


def _identity(key: Key) -> bytes:
    return blake2b(key, digest_size=HASH_BYTES, person=b"parkd-chunk").digest()


def _units(chain: Sequence[Key]) -> Units:
    """`[chunks]`: a number for each chunk, of all of its key."""
    units = np.frombuffer(b"".join(_identity(key)[:8] for key in chain), dtype="<u8").astype(np.uint64)
    units.flags.writeable = False
    return units
