"""The values that go in and out of the store.

request ──begin_capture──> Capture (or Refused) ──commit──> Parked ──lease──> Lease
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType, TracebackType
from typing import Literal, Self

from parkd.types import StateFile, StateSizes, Transfer, Units

BlockId = int
"""Never used twice in a store's life, so an id whose block is gone can't name another one."""
CheckpointId = int
ConversationId = str


class ConversationGone(LookupError):
    """The conversation was evicted, dropped or superseded since the caller saw it. The turn looks up again."""


@dataclass(frozen=True, slots=True)
class StoreConfig:
    budget_bytes: int
    """Everything the store holds stays under this; 0 turns parking off."""
    block_tokens: int
    conversation_slots: int | None = None
    """Most parked conversations; None has no bound but the budget."""
    slab_bytes: int = 256 << 20
    """Host memory is taken in pieces of at most this size."""
    min_free_bytes: int = 0
    """Of the machine's memory, left free: a capture that would take more is refused."""
    checkpoint_limit: int = 16
    """Checkpoints that a conversation is parked with at most, unless the engine holds more of its own."""


class Tier(StrEnum):
    """Where a conversation's bytes are."""

    RAM = "ram"
    PROMOTED = "promoted"
    """In RAM, read from disk, and not used since."""
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
    """Whose it is, so that it can be forgotten by name."""

    @property
    def position(self) -> int:
        return len(self.units)


@dataclass(frozen=True, eq=False)
class CaptureRequest:
    """What is live and may be parked."""

    key_digest: bytes
    units: Units
    """`[n]`, n > 0: the live rows `[0, n)`."""
    prefix_hashes: tuple[bytes, ...]
    """`n // block_tokens` of them."""
    lineage: tuple[BlockId, ...]
    """`lineage[i]` is the stored block that the live rows from `i * block_tokens` descend from: restored from it or
    captured into it, and not overwritten since. A partial block may only be last, and counts only if it ends at n."""
    layout_digest: bytes
    checkpoints: tuple[int, ...] = ()
    """Ascending positions in (0, n] at which the engine holds the fixed state of all stages."""
    rewindable: bool = True
    """True: any token is a resumable position. False: only checkpoints are."""
    namespace: str = ""
    """The cache namespace of the key, for those who later want to forget what is parked under it."""
    sizes: StateSizes | None = None
    """Of an opaque state, whose only segment is `lineage`: of the whole, and of each of `checkpoints`."""
    covered: int = 0
    """Of an opaque state: the tokens `[0, covered)` descend from the lineage's segment."""
    file: StateFile | None = None
    """Where an opaque state that is a file goes; the store's own to give."""


class RefusalReason(StrEnum):
    OFF = "off"
    BUDGET = "budget"
    SLOTS = "slots"
    NO_CHECKPOINT = "no-checkpoint"
    VALUE = "value"
    """What would have to go is expected to save more."""
    MEMORY = "memory"
    BUSY = "busy"
    """A part of it is being read or written; in a moment it won't be."""
    MEMORY_FLOOR = "memory-floor"


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a conversation was not parked. Nothing was evicted for it, unless memory itself ran out."""

    reason: RefusalReason
    message: str
    """For people: `needs 18.2 MiB, 12.0 MiB could be freed`."""


@dataclass(frozen=True, eq=False)
class Capture:
    """Reserved room for a conversation that is being copied. Visible to nobody until it is committed.

    Its buffers go back to the pool at abort: abort only when the engine no longer writes to them.
    """

    serial: int
    request: CaptureRequest
    position: int
    """The conversation is parked up to here; less than `len(request.units)` if it does not fit whole."""
    transfer: Transfer
    """Rows `[start, position)`; what lies before `start` is already held, in blocks the live rows descend from."""

    @property
    def is_whole(self) -> bool:
        return self.position == len(self.request.units)


@dataclass(eq=False)
class Lease:
    """While held, none of the conversation's blocks is evicted or overwritten. A context manager; release is
    idempotent."""

    parked: Parked
    start: int
    stop: int
    """The live position after the restore."""
    transfer: Transfer
    lineage: tuple[BlockId, ...]
    """What the live rows `[0, stop)` descend from once the restore is done: the lineage of the next capture. A partial
    last block must be taken off as soon as a token is added."""
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


@dataclass(frozen=True, slots=True)
class StoreStats:
    """A view of the store at one instant. Counts since the start end in `_total`."""

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
    """What the store takes from the machine: slabs, checkpoints, metadata. In use <= allocated <= budget."""
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
    reused_tokens_total: int
    """Tokens of committed captures that were already held and not copied again."""
    refusals_total: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """By `RefusalReason` value."""
