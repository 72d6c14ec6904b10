"""The values that go in and out of the store.

request ──begin_capture──> Capture (or Refused) ──commit──> Parked ──lease──> Lease
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType, TracebackType
from typing import Literal, Self

from parkd.state import FixedPart, RowRun, StateSizes, Sums, Transfer
from parkd.types import Units

BlockId = int
"""Never used twice by a store, so the id of a freed block cannot name another one."""
CheckpointId = int
ConversationId = str
"""`NAME`, or `NAME.REVISION` of a conversation that continues one with that name. Never used twice by a store."""
Name = str
"""What people and the API call a conversation: it stays the same while the conversation grows."""
NAME_END = "."


def name_of(conversation_id: ConversationId) -> Name:
    return conversation_id.partition(NAME_END)[0]


class ConversationGone(LookupError):
    """The conversation was evicted, dropped or superseded since the caller saw it. The turn looks up again."""


@dataclass(frozen=True, slots=True)
class StoreConfig:
    budget_bytes: int
    """Limit of everything that the store holds; 0 turns parking off."""
    block_tokens: int
    conversation_slots: int | None = None
    """Most parked conversations; None: no limit but the budget."""
    slab_bytes: int = 256 << 20
    """Host memory is taken in pieces of at most this size."""
    min_free_bytes: int = 0
    """Memory of the machine that stays free: a capture that would leave less is refused."""
    checkpoint_limit: int = 16
    """Most checkpoints of a parked conversation, unless the engine itself holds more."""


@dataclass(frozen=True, slots=True)
class DiskConfig:
    budget_bytes: int
    """Most bytes of all files together, each rounded up to pages."""
    fingerprint: bytes
    """Of the loaded model, 16 bytes."""
    index_bytes: int
    """Most memory of the index of what is on disk; reserved from the memory budget."""
    write_bytes_per_day: int
    max_age_s: float | None = None
    """Conversations not used for this long are forgotten; None: never."""


class Tier(StrEnum):
    """Where a conversation's bytes are."""

    RAM = "ram"
    PROMOTED = "promoted"
    """In RAM, read from disk and not used since."""
    DISK = "disk"
    """On disk only: it must be promoted before it can be leased."""


@dataclass(frozen=True, slots=True)
class ParkedCheckpoint:
    """The fixed state of all stages at `position`; it belongs to the first `ceil(position / block_tokens)` blocks."""

    position: int
    id: CheckpointId


@dataclass(frozen=True, eq=False)
class Parked:
    """A conversation in the store, all stages of it. Immutable; a touch replaces the value."""

    id: ConversationId
    key_digest: bytes
    units: Units
    """`[position]`, read-only."""
    prefix_hashes: tuple[bytes, ...]
    """One a full block of units."""
    blocks: tuple[BlockId, ...]
    """Block i holds the rows from `i * block_tokens`; together they hold at least `[0, position)`."""
    checkpoints: tuple[ParkedCheckpoint, ...]
    """Ascending."""
    layout_digest: bytes
    parked_at_s: float
    last_used_s: float
    tier: Tier = Tier.RAM
    namespace: str = ""
    """The namespace it belongs to, for `parkd forget`."""

    @property
    def position(self) -> int:
        return len(self.units)


@dataclass(frozen=True, eq=False)
class CaptureRequest:
    """A live conversation that is to be parked."""

    key_digest: bytes
    units: Units
    """`[n]`, n > 0: the live rows `[0, n)`."""
    prefix_hashes: tuple[bytes, ...]
    """`n // block_tokens` of them."""
    lineage: tuple[BlockId, ...]
    """`lineage[i]` is the block that the live rows from `i * block_tokens` were restored from or captured into, and
    that they still equal. Only the last may be a partial block, and it counts only if it ends at n."""
    layout_digest: bytes
    checkpoints: tuple[int, ...] = ()
    """Ascending positions in (0, n] at which the engine holds the fixed state of all stages."""
    namespace: str = ""
    """The cache namespace of the key, for `parkd forget`."""
    sizes: StateSizes | None = None
    """Only for an opaque state: the bytes of the whole and of each of `checkpoints`."""
    covered: int = 0
    """Only for an opaque state: the tokens `[0, covered)` descend from the segment in `lineage`."""
    is_indivisible: bool = False
    """It is parked whole or not at all."""
    is_returning: bool = False
    """It is known to return soon, since its turn is paused: whatever others are worth, it is not refused for them."""
    passing: tuple[int, ...] = ()
    """Positions at which this turn was paused before. Nothing else resumes there, so their checkpoints are left out."""


class RefusalReason(StrEnum):
    OFF = "off"
    BUDGET = "budget"
    SLOTS = "slots"
    NO_CHECKPOINT = "no-checkpoint"
    VALUE = "value"
    """What would be evicted is expected to save more."""
    MEMORY = "memory"
    BUSY = "busy"
    """A part of it is being read or written. Try again when that has ended."""
    MEMORY_FLOOR = "memory-floor"


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a conversation was not parked. Nothing was evicted for it, unless the machine ran out of memory."""

    reason: RefusalReason
    message: str
    """For people: `needs 18.2 MiB, 12.0 MiB could be freed`."""


@dataclass(frozen=True, eq=False)
class Capture:
    """Reserved room for a conversation that is being copied. Not visible until it is committed.

    An abort frees its buffers: abort only when the engine no longer writes to them.
    """

    serial: int
    request: CaptureRequest
    position: int
    """The conversation is parked up to here; less than `len(request.units)` if it does not fit whole."""
    transfer: Transfer
    """Moves the rows `[start, position)`. Those before `start` are stored already, in blocks that the live rows descend
    from."""

    @property
    def is_whole(self) -> bool:
        return self.position == len(self.request.units)


@dataclass(eq=False)
class Lease:
    """While it is held, no block of the conversation is freed or overwritten. A context manager; `release` is
    idempotent."""

    parked: Parked
    start: int
    stop: int
    """The live position after the restore."""
    transfer: Transfer
    lineage: tuple[BlockId, ...]
    """The blocks that the live rows `[0, stop)` descend from after the restore, for the next capture. A partial last
    block no longer counts once a token is added."""
    _release: Callable[[], None] = field(repr=False)
    _held: bool = True

    def release(self) -> None:
        if self._held:
            self._held = False
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        self.release()
        return False


@dataclass(frozen=True, eq=False)
class Held:
    """All bytes of a conversation in RAM, read-only, until `release` is called."""

    parked: Parked
    blocks: tuple[tuple[RowRun, ...], ...]
    """Each block whole, a run for every stage."""
    block_sums: Sums
    """`[blocks, stages]`"""
    checkpoints: tuple[tuple[FixedPart, ...], ...]
    """Each checkpoint, a part for every stage."""
    checkpoint_sums: Sums
    """`[checkpoints, stages]`"""
    release: Callable[[], None]
    """Call it once."""


@dataclass(frozen=True, slots=True)
class StoreStats:
    """The store at one instant. Names of counters end in `_total`."""

    conversations: int
    conversation_slots: int | None
    pinned: int
    leased: int
    captures_in_flight: int
    blocks: int
    shared_blocks: int
    """Blocks that more than one conversation or capture holds."""
    budget_bytes: int
    bytes_in_use: int
    """Rows, checkpoints, captures in flight and metadata."""
    bytes_allocated: int
    """What the store takes from the machine: slabs, checkpoints, metadata. bytes_in_use <= this <= budget_bytes."""
    peak_bytes_allocated: int
    row_bytes: int
    checkpoint_bytes: int
    in_flight_bytes: int
    metadata_bytes: int
    captures_total: int
    partial_captures_total: int
    aborts_total: int
    leases_total: int
    evictions_total: int
    superseded_total: int
    dropped_total: int
    captured_tokens_total: int
    kept_tokens_total: int
    """Tokens of committed captures that were stored before and not copied again."""
    reused_tokens_total: int
    """Tokens that were leased to be made live."""
    refusals_total: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """By `RefusalReason` value."""


@dataclass(frozen=True, slots=True)
class DiskStats:
    """The disk tier at one instant. Names of counters end in `_total`."""

    conversations: int
    extents: int
    budget_bytes: int
    bytes_in_use: int
    """Of all files, including those being written and those to be removed."""
    foreign_conversations: int
    """Conversations of other weights, or of a layout that nothing describes."""
    index_bytes: int
    waiting_conversations: int
    """Conversations that wait for their write."""
    allowance_bytes: int
    """What is left of the daily write allowance."""
    writes_total: int
    written_bytes_total: int
    write_failures_total: int
    reads_total: int
    read_bytes_total: int
    read_failures_total: int
    evictions_total: int
    not_written_total: int
    """Conversations that were not worth a write, or for which there was no room."""
