"""One move of a conversation's state between an engine and host memory or a file, and its checksums."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Sums = npt.NDArray[np.uint64]


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
    """`[(stop - start) * row_bytes]`, contiguous, row `start` first; and `head_bytes` for each block, which the engine
    puts where it likes inside the block. For an opaque state, all its bytes; empty if it is in a file."""
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
    checksums: Sums | None = None
    """`[blocks, stages]` for the blocks that overlap `[start, stop)`, in order."""
    fixed_checksums: Sums | None = None
    """`[fixed parts, stages]`."""
    resume_at: int | None = None
    """Only for a restore: the position that becomes live, in the last block; None means `stop`. Rows after it are
    copied too, because a block's checksum covers the whole block, but are not live afterwards."""

    @property
    def position(self) -> int:
        """The engine's position after a restore, which is also that of the fixed state, if there is any."""
        return self.stop if self.resume_at is None else self.resume_at

    @property
    def blocks(self) -> int:
        """Blocks of each stage that overlap `[start, stop)`."""
        return -(-(self.stop - self.start) // self.block_tokens)

    @property
    def bytes(self) -> int:
        """Bytes moved, all stages."""
        rows = sum(run.bytes for stage in self.stages for run in stage.rows)
        return rows + sum(part.buffer.nbytes for stage in self.stages for part in stage.fixed)


@dataclass(frozen=True, slots=True, eq=False)
class Checksums:
    """What a capture returns."""

    rows: Sums
    """`[blocks, stages]`."""
    fixed: Sums
    """`[fixed parts, stages]`."""
    file_bytes: int = 0
    """Length of the file, for a state in a file."""
