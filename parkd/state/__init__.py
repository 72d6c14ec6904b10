"""The state of a conversation as the engine lays it out, and how parts of it are moved."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt

from parkd.types.identity import HASH_BYTES

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class StageLayout:
    """The state of one stage in bytes, which is all that the store knows of it."""

    first_layer: int
    end_layer: int
    """The stage holds layers `[first_layer, end_layer)`."""
    row_bytes: int
    """Bytes one token leaves in this stage; a multiple of 8."""
    fixed_bytes: int
    """Bytes of state that does not grow with length; 0 when the stage has none."""
    digest: bytes
    """16 bytes over the names, dtypes, shapes and offsets of all fields."""


class Grain(StrEnum):
    """How an engine exposes a conversation's state."""

    ROWS = "rows"
    """As rows and fixed state of each stage, which can be cut into blocks and shared."""
    OPAQUE = "opaque"
    """As a whole, in bytes that only the engine can read."""
    FILE = "file"
    """The same, in a file that the engine itself writes and reads."""


@dataclass(frozen=True)
class StateLayout:
    """The state of one conversation over all stages.

    An opaque state has one stage. Its `row_bytes` and `fixed_bytes` are estimates for a token and a checkpoint; each
    capture has its real sizes. Its `fixed_bytes` is 0 if, and only if, the state can be cut at any token.
    """

    stages: tuple[StageLayout, ...]
    checksum: str
    """Name of the 64-bit checksum the engine computes over a part's bytes (`xxh3-64`, `weighted-sum-64`)."""
    grain: Grain = Grain.ROWS

    def __post_init__(self) -> None:
        assert self.grain is Grain.ROWS or len(self.stages) == 1, "an opaque state is one part"

    @property
    def is_opaque(self) -> bool:
        return self.grain is not Grain.ROWS

    @cached_property
    def row_bytes(self) -> int:
        return sum(stage.row_bytes for stage in self.stages)

    @cached_property
    def fixed_bytes(self) -> int:
        return sum(stage.fixed_bytes for stage in self.stages)

    @cached_property
    def digest(self) -> bytes:
        """16 bytes; two layouts with equal digests hold interchangeable bytes."""
        hasher = blake2b(digest_size=HASH_BYTES, person=b"parkd-layout")
        hasher.update(self.checksum.encode())
        if self.is_opaque:
            hasher.update(self.grain.encode())
        for stage in self.stages:
            for number in (stage.first_layer, stage.end_layer, stage.row_bytes, stage.fixed_bytes):
                hasher.update(number.to_bytes(8, "little"))
            hasher.update(stage.digest)
        return hasher.digest()


@dataclass(frozen=True, slots=True)
class StateSizes:
    """Bytes of an opaque conversation."""

    whole: int
    """For a state in a file: at least as many as it will have, since this much is reserved."""
    checkpoints: tuple[int, ...] = ()
    """One for each position asked for."""


@dataclass(frozen=True, slots=True)
class StateFile:
    """A state in a file instead of a buffer."""

    path: Path
    bytes: int
    """For a capture, the most it may have; for a restore, its length."""


@dataclass(frozen=True, slots=True, eq=False)
class RowRun:
    """Rows `[start, stop)` of one stage and the host bytes that hold them (or will).

    A run spans several blocks if they are adjacent in host memory, so that one copy moves them all. An opaque state is
    one run from 0.
    """

    start: int
    stop: int
    buffer: Bytes
    """`[(stop - start) * row_bytes]`, contiguous, row `start` first. For an opaque state, all its bytes; empty if it is
    in a file."""
    file: StateFile | None = None

    @property
    def bytes(self) -> int:
        return self.buffer.nbytes if self.file is None else self.file.bytes


@dataclass(frozen=True, slots=True, eq=False)
class FixedPart:
    """The fixed state of one stage at one position, in host bytes."""

    position: int
    buffer: Bytes
    """`[fixed_bytes]`, contiguous. For an opaque state, the bytes of the checkpoint; empty if the whole state is of the
    same position, and so includes it."""


@dataclass(frozen=True, slots=True, eq=False)
class StageTransfer:
    """What one stage copies out of its arena, or into it."""

    rows: tuple[RowRun, ...]
    """Ascending and without gaps inside the transfer's `[start, stop)`."""
    fixed: tuple[FixedPart, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """One atomic move of a conversation's state between the arenas and host memory, for all stages.

    The rows `[start, stop)` consist of blocks of `block_tokens` at absolute multiples. Each block of each stage has a
    checksum. `start` is such a multiple, unless only fixed state moves. For a capture, `checksums` is None and the
    engine returns them; for a restore, the engine recomputes and compares them before it commits.
    """

    layout_digest: bytes
    start: int
    stop: int
    block_tokens: int
    stages: tuple[StageTransfer, ...]
    checksums: npt.NDArray[np.uint64] | None = None
    """`[blocks, stages]` for the blocks that overlap `[start, stop)`, in order."""
    fixed_checksums: npt.NDArray[np.uint64] | None = None
    """`[fixed parts, stages]`."""
    resume_at: int | None = None
    """Only for a restore: the position that becomes live, in the last block; None means `stop`. Rows after it are
    copied too, because a block's checksum covers the whole block, but are not live afterwards."""

    @property
    def position(self) -> int:
        """The engine's position after a restore, which is also that of the fixed state, if there is any."""
        return self.stop if self.resume_at is None else self.resume_at

    @property
    def bytes(self) -> int:
        """Bytes moved, all stages."""
        rows = sum(run.bytes for stage in self.stages for run in stage.rows)
        return rows + sum(part.buffer.nbytes for stage in self.stages for part in stage.fixed)


@dataclass(frozen=True, slots=True, eq=False)
class Checksums:
    """What a capture returns."""

    rows: npt.NDArray[np.uint64]
    """`[blocks, stages]`."""
    fixed: npt.NDArray[np.uint64]
    """`[fixed parts, stages]`."""
    file_bytes: int = 0
    """Length of the file, for a state in a file."""
