"""All that a store holds at one instant, as plain values, for tests and for whoever looks for a fault.

    Inspection ── conversations ──name──> blocks, checkpoints      each with its places in RAM and on disk
               ── captures ───────name──> blocks, checkpoints      what is being copied, or read from disk
               ── ram, disk                                        what is charged for all of it

Taking one changes nothing, and a value stays as it is when the store goes on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from parkd.store.budget import Kind
from parkd.store.captures import Flight
from parkd.store.disk import DiskTier
from parkd.store.records import BlockId, CheckpointId, ConversationId, Parked, ParkedCheckpoint
from parkd.store.shelf import Entry, Shelf
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
    """A block that somebody owns; of an opaque state, the whole of it."""

    id: BlockId
    owners: int
    """Conversations, each once whichever tiers it is in, fading ones and captures in flight that name it."""
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
    """A checkpoint that somebody owns. One that is only on disk may have the id 0, and is in no table then."""

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
    """Conversations on disk, writes and reads that need it."""


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


def inspect_ram(shelf: Shelf, flights: Mapping[int, Flight]) -> Inspection:
    """What is in RAM."""
    captures = tuple(
        InspectedCapture(serial, flight.position, flight.blocks, flight.checkpoints)
        for serial, flight in flights.items()
    )
    kinds = {kind.name.lower(): shelf.budget[kind] for kind in Kind}
    return Inspection(
        conversations=MappingProxyType({known: _in_ram(entry) for known, entry in shelf.entries.items()}),
        fading=tuple(map(_in_ram, shelf.fading.values())),
        blocks=MappingProxyType({i: _block(shelf, i, owners) for i, owners in shelf.blocks.recount().items()}),
        checkpoints=MappingProxyType(
            {
                i: InspectedCheckpoint(i, owners, is_in_ram=True, ram_bytes=shelf.checkpoints.bytes_of(i))
                for i, owners in shelf.checkpoints.recount().items()
            }
        ),
        captures=captures,
        ram=InspectedRam(
            shelf.budget.limit_bytes,
            MappingProxyType(kinds),
            MappingProxyType(_held_bytes(shelf)),
            shelf.slabs.used_slots,
            shelf.geometry.slot_bytes,
        ),
    )


def with_disk(
    ram: Inspection, disk: DiskTier, sources: Mapping[int, ConversationId], waiting: Iterable[ConversationId]
) -> Inspection:
    """The same with what is on disk. `sources` are the conversations on disk that captures in flight read."""
    conversations = dict(ram.conversations)
    for known in waiting:
        if known in conversations:  # else it is fading, and is taken out of the queue next
            conversations[known] = replace(conversations[known], is_waiting=True)
    block_owners: Counter[BlockId] = Counter()
    checkpoint_owners: Counter[CheckpointId] = Counter()
    for known, entry in disk.entries.items():
        seen, files = conversations.get(known), (entry.manifest.name, *(ref.name for ref in entry.manifest.extents))
        if seen is not None:
            conversations[known] = replace(seen, files=files, is_pinned=seen.is_pinned or entry.is_pinned)
            continue
        conversations[known] = replace(
            _described(entry.parked), files=files, is_foreign=entry.is_foreign, is_pinned=entry.is_pinned
        )
        if not entry.is_foreign:
            block_owners.update(entry.parked.blocks)
            checkpoint_owners.update(checkpoint.id for checkpoint in entry.parked.checkpoints if checkpoint.id)
    blocks, checkpoints = dict(ram.blocks), dict(ram.checkpoints)
    for block_id, owners in block_owners.items():
        block = blocks.get(block_id, InspectedBlock(block_id, 0))
        blocks[block_id] = replace(block, owners=block.owners + owners)
    for checkpoint_id, owners in checkpoint_owners.items():
        checkpoint = checkpoints.get(checkpoint_id, InspectedCheckpoint(checkpoint_id, 0))
        checkpoints[checkpoint_id] = replace(checkpoint, owners=checkpoint.owners + owners)
    for block_id in blocks.keys() & disk.blocks.keys():
        blocks[block_id] = replace(blocks[block_id], extent=disk.blocks[block_id].extent)
    for checkpoint_id in checkpoints.keys() & disk.checkpoints.keys():
        extent = disk.checkpoints[checkpoint_id].extent
        checkpoints[checkpoint_id] = replace(checkpoints[checkpoint_id], extent=extent)
    return replace(
        ram,
        conversations=MappingProxyType(conversations),
        blocks=MappingProxyType(blocks),
        checkpoints=MappingProxyType(checkpoints),
        captures=tuple(replace(capture, source=sources.get(capture.serial)) for capture in ram.captures),
        disk=InspectedDisk(
            limit_bytes=disk.config.budget_bytes,
            file_bytes=disk.bytes_in_use,
            condemned_bytes=disk.condemned,
            index_limit_bytes=disk.config.index_bytes,
            index_bytes=disk.index_bytes,
            extents=MappingProxyType(
                {ref.id: InspectedExtent(ref.id, ref.name, ref.taken_bytes, holders) for ref, holders in disk.extents()}
            ),
        ),
    )


def _held_bytes(shelf: Shelf) -> dict[str, int]:
    segments = shelf.blocks.segment_bytes
    checkpoints, idle = shelf.checkpoints.held_bytes
    held = {Kind.SLABS: shelf.slabs.held_bytes, Kind.SEGMENTS: segments, Kind.CHECKPOINTS: checkpoints, Kind.IDLE: idle}
    return {kind.name.lower(): size for kind, size in held.items()}


def _described(parked: Parked) -> InspectedConversation:
    return InspectedConversation(parked.id, parked.key_digest, parked.units, parked.blocks, parked.checkpoints)


def _in_ram(entry: Entry) -> InspectedConversation:
    return replace(
        _described(entry.parked),
        is_in_ram=True,
        is_pinned=entry.is_pinned,
        leases=entry.leases,
        awaited=len(entry.awaited_by),
    )


def _block(shelf: Shelf, block_id: BlockId, owners: int) -> InspectedBlock:
    block = shelf.blocks.get(block_id)
    assert block is not None, "it was listed"
    is_sealed, ram_bytes = block.sums is not None, shelf.blocks.bytes_of([block_id])
    return InspectedBlock(block_id, owners, block.slot, ram_bytes, is_sealed)
