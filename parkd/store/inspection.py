"""What a store holds at one instant: as numbers for metrics, and down to its blocks for tests and whoever looks for a
fault.

    Inspection ── conversations ──name──> blocks, checkpoints      each with its places in RAM and on disk
               ── captures ───────name──> blocks, checkpoints      what is being copied, or read from disk
               ── ram, disk                                        what is charged for all of it

Taking one changes nothing, and a value stays as it is when the store goes on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from parkd.store.budget import Kind
from parkd.store.conversations import Conversation, Conversations, InRam
from parkd.store.disk import Disk
from parkd.store.flights import Flight
from parkd.store.records import (
    BlockId,
    CheckpointId,
    ConversationId,
    DiskStats,
    Parked,
    ParkedCheckpoint,
    StoreConfig,
    StoreStats,
)
from parkd.store.write_queue import WriteQueue
from parkd.types import Units


@dataclass(frozen=True, eq=False)
class InspectedConversation:
    """A conversation, once, whichever tiers it is in."""

    id: ConversationId
    key_digest: bytes
    units: Units
    """`[position]`, read-only."""
    blocks: tuple[BlockId, ...]
    checkpoints: tuple[ParkedCheckpoint, ...]
    """Ascending; as in RAM, if it is there."""
    is_in_ram: bool = False
    """All its bytes are in RAM."""
    files: tuple[str, ...] = ()
    """The names of its files on disk, the manifest first; empty if it is not on disk."""
    is_foreign: bool = False
    """On disk, of other weights or another layer split: what it names is in no table."""
    is_pinned: bool = False
    is_waiting: bool = False
    """It waits for its write to disk. Then it is leased by the store itself."""
    leases: int = 0
    """Open leases, that of a waiting conversation or of the write under way among them."""
    awaited: int = 0
    """Queued prompts that would start from it."""

    @property
    def position(self) -> int:
        return len(self.units)

    @property
    def is_on_disk(self) -> bool:
        return bool(self.files)


@dataclass(frozen=True, slots=True)
class InspectedBlock:
    """A block; of an opaque state, the whole of it."""

    id: BlockId
    owners: int
    """Of its place in RAM, as the table counts them: conversations in RAM, fading ones and captures in flight; 0 if it
    is not in RAM. Its place on disk is kept by the `holders` of its extent."""
    slot: int | None = None
    """Its place in RAM, which no other block has; None: it is not in RAM."""
    ram_bytes: int = 0
    """Bytes of the memory budget that its rows take."""
    is_sealed: bool = True
    """False while it is being copied or read: nobody may start from it."""
    extent: int | None = None
    """The extent that holds it on disk; None: it is not on disk."""


@dataclass(frozen=True, slots=True)
class InspectedCheckpoint:
    """A checkpoint."""

    id: CheckpointId
    owners: int
    """As of a block."""
    is_in_ram: bool = False
    ram_bytes: int = 0
    """Bytes of the memory budget that it takes."""
    extent: int | None = None
    """The extent that holds it on disk; None: it is not known to be on disk."""


@dataclass(frozen=True, slots=True)
class InspectedCapture:
    """What is reserved and neither committed nor aborted yet."""

    serial: int
    position: int
    blocks: tuple[BlockId, ...]
    """All of `[0, position)`, those that were stored before among them."""
    checkpoints: tuple[ParkedCheckpoint, ...]
    source: ConversationId | None = None
    """The conversation whose bytes are being read from disk; None: the engine copies its own."""


@dataclass(frozen=True, slots=True)
class InspectedRam:
    limit_bytes: int
    charged_bytes: Mapping[str, int]
    """By what for: the names of `budget.Kind` in small letters."""
    held_bytes: Mapping[str, int]
    """Bytes of the buffers that there are, by the same names; metadata has none."""
    used_slots: int
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class InspectedExtent:
    id: int
    name: str
    taken_bytes: int
    holders: int
    """Conversations on disk, writes and reads that need it, as the disk counts them."""


@dataclass(frozen=True, slots=True)
class InspectedDisk:
    limit_bytes: int
    file_bytes: int
    """Charged for files, those being written and those to be removed among them."""
    condemned_bytes: Mapping[str, int]
    """By name, the files to be removed, and how many of `file_bytes` each removal frees."""
    index_limit_bytes: int
    index_bytes: int
    """Charged for what describes conversations on disk; within the memory that was set aside for it."""
    extents: Mapping[int, InspectedExtent]


@dataclass(frozen=True, slots=True)
class Inspection:
    conversations: Mapping[ConversationId, InspectedConversation]
    """Those in RAM first, the most recently used last."""
    fading: tuple[InspectedConversation, ...]
    """Conversations that were taken out of RAM while they were leased: what they name stays until their last lease
    ends."""
    blocks: Mapping[BlockId, InspectedBlock]
    checkpoints: Mapping[CheckpointId, InspectedCheckpoint]
    captures: tuple[InspectedCapture, ...]
    ram: InspectedRam
    disk: InspectedDisk | None = None
    """None for a store of RAM alone."""


def inspect(table: Conversations, flights: Mapping[int, Flight], waiting: Iterable[ConversationId]) -> Inspection:
    """`waiting` are the conversations that wait for their write."""
    waits = set(waiting)
    rest = [each for each in table.all() if each.ram is None]
    conversations = {
        each.id: _conversation(each, is_waiting=each.id in waits) for each in (*table.in_ram.values(), *rest)
    }
    fading = tuple(_fading(ram) for ram in table.fading.values())
    captures = tuple(
        InspectedCapture(
            serial,
            flight.position,
            flight.blocks,
            flight.checkpoints,
            None if flight.source is None else flight.source.id,
        )
        for serial, flight in flights.items()
    )
    return Inspection(
        conversations=MappingProxyType(conversations),
        fading=fading,
        blocks=MappingProxyType({known: _block(table, known) for known, _ in table.blocks.items()}),
        checkpoints=MappingProxyType({known: _checkpoint(table, known) for known, _ in table.checkpoints.items()}),
        captures=captures,
        ram=_ram(table),
        disk=_disk(table.disk) if table.disk.is_there else None,
    )


def _described(parked: Parked) -> InspectedConversation:
    return InspectedConversation(parked.id, parked.key_digest, parked.units, parked.blocks, parked.checkpoints)


def _conversation(conversation: Conversation, *, is_waiting: bool) -> InspectedConversation:
    ram, disk = conversation.ram, conversation.disk
    return replace(
        _described(conversation.parked),
        is_in_ram=ram is not None,
        files=() if disk is None else (disk.name, *(ref.name for ref in disk.extents)),
        is_foreign=conversation.is_foreign,
        is_pinned=conversation.is_pinned,
        is_waiting=is_waiting,
        leases=0 if ram is None else ram.leases,
        awaited=0 if ram is None else len(ram.awaited_by),
    )


def _fading(ram: InRam) -> InspectedConversation:
    return replace(_described(ram.parked), is_in_ram=True, leases=ram.leases, awaited=len(ram.awaited_by))


def _block(table: Conversations, block_id: BlockId) -> InspectedBlock:
    block = table.blocks[block_id]
    return InspectedBlock(
        block_id,
        block.owners,
        slot=block.ram,
        ram_bytes=0 if block.ram is None else table.blocks.bytes_of([block_id]),
        is_sealed=block.is_sealed or block.ram is None,
        extent=None if block.disk is None else block.disk.extent,
    )


def _checkpoint(table: Conversations, checkpoint_id: CheckpointId) -> InspectedCheckpoint:
    checkpoint = table.checkpoints[checkpoint_id]
    return InspectedCheckpoint(
        checkpoint_id,
        checkpoint.owners,
        is_in_ram=checkpoint.ram is not None,
        ram_bytes=table.checkpoints.bytes_of(checkpoint_id),
        extent=None if checkpoint.disk is None else checkpoint.disk.extent,
    )


def _ram(table: Conversations) -> InspectedRam:
    memory = table.memory
    held = {
        Kind.SLABS: memory.slabs.held_bytes,
        Kind.SEGMENTS: table.blocks.places.held_bytes,
        Kind.CHECKPOINTS: table.checkpoints.held_bytes,
        Kind.IDLE: memory.idle.held_bytes,
    }
    return InspectedRam(
        memory.budget.limit_bytes,
        MappingProxyType({kind.name.lower(): memory.budget[kind] for kind in Kind}),
        MappingProxyType({kind.name.lower(): size for kind, size in held.items()}),
        memory.slabs.used_slots,
        memory.geometry.slot_bytes,
    )


def _disk(disk: Disk) -> InspectedDisk:
    return InspectedDisk(
        limit_bytes=disk.config.budget_bytes,
        file_bytes=disk.bytes_in_use,
        condemned_bytes=disk.condemned,
        index_limit_bytes=disk.config.index_bytes,
        index_bytes=disk.index_bytes,
        extents=MappingProxyType(
            {ref.id: InspectedExtent(ref.id, ref.name, ref.taken_bytes, holders) for ref, holders in disk.extents()}
        ),
    )


def ram_stats(
    config: StoreConfig,
    table: Conversations,
    flights: Collection[Flight],
    totals: Mapping[str, int],
    refusals: Mapping[str, int],
) -> StoreStats:
    memory, budget = table.memory, table.memory.budget
    there = [(each, each.ram) for each in table.in_ram.values() if each.ram is not None]
    flying_row_bytes = sum(table.blocks.bytes_of(flight.fresh_blocks) for flight in flights)
    flying_checkpoint_bytes = sum(table.checkpoints.bytes_of(i) for flight in flights for i in flight.fresh_checkpoints)
    return StoreStats(
        conversations=len(there),
        conversation_slots=config.conversation_slots,
        pinned=sum(each.is_pinned for each, _ in there),
        leased=sum(ram.leases > 0 for _, ram in there) + len(table.fading),
        captures_in_flight=len(flights),
        blocks=table.blocks.in_ram,
        shared_blocks=table.blocks.shared,
        budget_bytes=config.budget_bytes,
        bytes_in_use=memory.bytes_in_use,
        bytes_allocated=budget.allocated_bytes,
        peak_bytes_allocated=budget.peak_bytes,
        row_bytes=memory.row_bytes - flying_row_bytes,
        checkpoint_bytes=budget[Kind.CHECKPOINTS] - flying_checkpoint_bytes,
        in_flight_bytes=flying_row_bytes + flying_checkpoint_bytes,
        metadata_bytes=budget[Kind.METADATA],
        captures_total=totals["captures"],
        partial_captures_total=totals["partial"],
        aborts_total=totals["aborts"],
        leases_total=totals["leases"],
        evictions_total=totals["evictions"],
        superseded_total=totals["superseded"],
        dropped_total=totals["dropped"],
        captured_tokens_total=totals["captured_tokens"],
        kept_tokens_total=totals["kept_tokens"],
        reused_tokens_total=totals["reused_tokens"],
        refusals_total=MappingProxyType(dict(refusals)),
    )


def disk_stats(table: Conversations, disk: Disk, queue: WriteQueue, totals: Mapping[str, int]) -> DiskStats:
    there = table.on_disk()
    return DiskStats(
        conversations=len(there),
        extents=disk.extent_count,
        budget_bytes=disk.config.budget_bytes,
        bytes_in_use=disk.bytes_in_use,
        foreign_conversations=sum(place.is_foreign for _, place in there),
        index_bytes=disk.index_bytes,
        waiting_conversations=len(queue),
        allowance_bytes=int(queue.allowance.left_bytes),
        writes_total=queue.writes,
        written_bytes_total=queue.written_bytes,
        write_failures_total=queue.failures,
        reads_total=totals["reads"],
        read_bytes_total=totals["read_bytes"],
        read_failures_total=totals["read_failures"],
        evictions_total=disk.evictions,
        not_written_total=queue.not_written,
    )
