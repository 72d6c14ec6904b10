"""The state of a conversation as an engine lays it out: its bytes, its digest, and where it can be resumed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from hashlib import blake2b

from parkd.state.fields import DIGEST_BYTES, StateField

BLOCK_TOKENS = 256
"""Rows in a block, unless the engine says otherwise. Blocks begin at absolute multiples of this."""


@dataclass(frozen=True, slots=True)
class StageLayout:
    """The state of one stage: its bytes, and where each layer's fields are in them."""

    first_layer: int
    end_layer: int
    """The stage holds layers `[first_layer, end_layer)`."""
    row_bytes: int
    """Bytes one token leaves in this stage."""
    fixed_bytes: int
    """Bytes of state that does not grow with length; 0 when the stage has none."""
    digest: bytes
    """16 bytes over the names, dtypes, shapes and offsets of all fields."""
    row_fields: tuple[StateField, ...] = ()
    """What a row consists of, if the engine tells: then its bytes can be cut for other stages (`recut.py`)."""
    fixed_fields: tuple[StateField, ...] = ()
    head_bytes: int = field(default=0, kw_only=True)
    """Bytes that each block has beside its rows, whole or not: what a library writes in front of them."""

    def block_bytes(self, rows: int, blocks: int = 1) -> int:
        """Bytes of `blocks` adjacent blocks that hold `rows` rows together."""
        return blocks * self.head_bytes + rows * self.row_bytes


class Grain(StrEnum):
    """How an engine exposes a conversation's state."""

    ROWS = "rows"
    """As rows and fixed state of each stage, which can be cut into blocks and shared."""
    OPAQUE = "opaque"
    """As a whole, in bytes that only the engine can read."""
    FILE = "file"
    """The same, in a file that the engine itself writes and reads."""


class Resume(StrEnum):
    """Where a parked conversation can be resumed. The engine's live state can do more: see `last_exact`."""

    ANYWHERE = "anywhere"
    """After any token: the state can be cut."""
    AT_CHECKPOINTS = "at checkpoints"
    """Where a copy of its fixed state was parked with it."""
    AT_END = "at the end"
    """Only after its last token, where it counts as having a checkpoint."""

    @property
    def needs_checkpoints(self) -> bool:
        return self is not Resume.ANYWHERE

    @property
    def floor(self) -> int | None:
        """The lowest position to which parked state can be cut without a checkpoint; None: it cannot be cut."""
        return None if self.needs_checkpoints else 0


def last_exact(limit: int, checkpoints: Iterable[int], floor: int | None) -> int:
    """The last position up to `limit` at which state is exact; 0 if there is none.

    The state can be cut to every position from `floor` on (None: to none), and else to `checkpoints`, in any order.
    """
    if floor is not None and limit >= floor:
        return limit
    return max((position for position in checkpoints if position <= limit), default=0)


@dataclass(frozen=True)
class StateLayout:
    """The state of one conversation over all stages.

    An opaque state has one stage. Its `row_bytes` and `fixed_bytes` are estimates for a token and a checkpoint; each
    capture has its real sizes. Its `fixed_bytes` is 0 if, and only if, the state can be cut at any token (`resume`).
    """

    stages: tuple[StageLayout, ...]
    checksum: str
    """Name of the 64-bit checksum the engine computes over a part's bytes (`xxh3-64`, `weighted-sum-64`)."""
    grain: Grain = Grain.ROWS
    block_tokens: int = BLOCK_TOKENS
    """Rows in a block. More where an engine's copies are too short otherwise."""

    def __post_init__(self) -> None:
        assert self.grain is Grain.ROWS or len(self.stages) == 1, "an opaque state is one part"

    @property
    def is_opaque(self) -> bool:
        return self.grain is not Grain.ROWS

    @property
    def has_fixed_state(self) -> bool:
        """A part of it is true at one position only."""
        return self.fixed_bytes > 0

    @cached_property
    def resume(self) -> Resume:
        if not self.has_fixed_state:
            return Resume.ANYWHERE
        return Resume.AT_END if self.grain is Grain.FILE else Resume.AT_CHECKPOINTS

    @cached_property
    def row_bytes(self) -> int:
        return sum(stage.row_bytes for stage in self.stages)

    def block_bytes(self, rows: int, blocks: int = 1) -> int:
        """As of a stage, of all stages together."""
        return sum(stage.block_bytes(rows, blocks) for stage in self.stages)

    @cached_property
    def fixed_bytes(self) -> int:
        return sum(stage.fixed_bytes for stage in self.stages)

    @cached_property
    def digest(self) -> bytes:
        """16 bytes; two layouts with equal digests hold interchangeable bytes."""
        hasher = blake2b(digest_size=DIGEST_BYTES, person=b"parkd-layout")
        hasher.update(self.checksum.encode())
        if self.is_opaque:
            hasher.update(self.grain.encode())
        if self.block_tokens != BLOCK_TOKENS:
            hasher.update(b"blocks of %d" % self.block_tokens)
        for stage in self.stages:
            for number in (stage.first_layer, stage.end_layer, stage.row_bytes, stage.fixed_bytes):
                hasher.update(number.to_bytes(8, "little"))
            if stage.head_bytes:
                hasher.update(stage.head_bytes.to_bytes(8, "little"))
            hasher.update(stage.digest)
        return hasher.digest()
