"""The parts of a portable file: stage after stage of each block, then of each checkpoint, without gaps.

    | header | block 0: stage 0, stage 1 | block 1: ... | checkpoint 0: stage 0, stage 1 | ...

All stages of a block are side by side, so that a reader needs to hold no more than one part to cut it for other stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import BinaryIO

import numpy as np
import xxhash

from parkd.portable.header import FIXED_BYTES, DamagedFile, PortableHeader, decode, encode, header_bytes, lengths
from parkd.private_files import private_opener
from parkd.state import Bytes, StateFile, part_sum

PIECE_BYTES = 4 << 20
"""What is only passed on is read in pieces of this size."""


@dataclass(frozen=True, slots=True, eq=False)
class SourcePart:
    """The bytes of one stage of a block or checkpoint."""

    bytes: Bytes | StateFile
    sum: int
    """As it is known of all of `bytes`."""
    size: int
    """The bytes that go into the file, which are the first."""


def write(out: BinaryIO, header: PortableHeader, parts: Iterable[Sequence[SourcePart]]) -> PortableHeader:
    """Writes a conversation to an empty file, its header last. `header` has no sums yet; returns the one with them.

    The bytes are compared with the sums that are known of them while they are written. Raises DamagedFile, and OSError.
    """
    out.seek(header_bytes(header))
    can_cut = not any(stage.head_bytes for stage in header.layout.stages)
    sums = [[_written(out, header.layout.checksum, part, can_cut=can_cut) for part in stages] for stages in parts]
    shape = header.parts, header.kind.stages
    whole = replace(header, sums=np.array(sums, dtype=np.uint64).reshape(shape))
    out.seek(0)
    out.write(encode(whole))
    return whole


def _written(out: BinaryIO, checksum: str, part: SourcePart, *, can_cut: bool) -> int:
    """Writes a part. Returns the sum of what was written."""
    if isinstance(part.bytes, StateFile):
        known = written = _passed_on(out, part.bytes)
    else:
        known = written = part_sum(checksum, part.bytes)
        if part.size != part.bytes.nbytes:
            if not can_cut:
                raise DamagedFile("its last block reaches further than it does, and its engine's blocks cannot be cut")
            written = part_sum(checksum, part.bytes[: part.size])
        out.write(part.bytes[: part.size].data)
    if known != part.sum:
        raise DamagedFile("what is parked differs from its checksum")
    return written


def _passed_on(out: BinaryIO, file: StateFile) -> int:
    """Copies a state that is in a file. Returns its XXH3-64."""
    hasher, left = xxhash.xxh3_64(), file.bytes
    with open(file.path, "rb", opener=private_opener) as source:
        while left:
            piece = source.read(min(PIECE_BYTES, left))
            if not piece:
                raise DamagedFile("what is parked ends too early")
            hasher.update(piece)
            out.write(piece)
            left -= len(piece)
    return hasher.intdigest()


def read_header(file: BinaryIO, size: int) -> PortableHeader:
    """The header of a file of `size` bytes. Raises DamagedFile, also if the file is cut or has anything behind its
    parts."""
    file.seek(0)
    known = lengths(file.read(FIXED_BYTES))
    if known.file_bytes != size:
        raise DamagedFile(f"it has {size} bytes of {known.file_bytes}")
    file.seek(0)
    data = file.read(known.header_bytes)
    if len(data) != known.header_bytes:
        raise DamagedFile("it ends within its header")
    return decode(data)


class PartReader:
    """Reads the parts of a file in order, and compares each with its checksum."""

    def __init__(self, file: BinaryIO, header: PortableHeader) -> None:
        self._file = file
        self._header = header
        file.seek(header_bytes(header))

    def into(self, part: int, stage: int, buffer: Bytes) -> None:
        """Reads the next part, which is that one, into `buffer`, which has its size. Raises DamagedFile."""
        view, at = buffer.data.cast("B"), 0
        while at < buffer.nbytes:
            count = self._file.readinto(view[at:])  # type: ignore[attr-defined]
            if not count:
                raise DamagedFile("it ends within its parts")
            at += count
        if part_sum(self._header.layout.checksum, buffer) != int(self._header.sums[part, stage]):
            raise DamagedFile(_differs(self._header, part, stage))

    def pieces(self, part: int) -> Iterator[bytes]:
        """The next part, that of a state with one stage, piece by piece. Compared at its end. Raises DamagedFile."""
        [left] = self._header.part_bytes(part)
        hasher = xxhash.xxh3_64()
        while left:
            piece = self._file.read(min(PIECE_BYTES, left))
            if not piece:
                raise DamagedFile("it ends within its parts")
            hasher.update(piece)
            left -= len(piece)
            yield piece
        if hasher.intdigest() != int(self._header.sums[part, 0]):
            raise DamagedFile(_differs(self._header, part, 0))


def scratch_for(header: PortableHeader) -> Bytes:
    """Memory for the largest part of one stage. Raises MemoryError."""
    largest = max((size for part in range(header.parts) for size in header.part_bytes(part)), default=0)
    return np.empty(largest, dtype=np.uint8)


def verify(file: BinaryIO, header: PortableHeader) -> None:
    """Compares every part with its checksum. Raises DamagedFile, OSError and MemoryError."""
    reader = PartReader(file, header)
    if header.kind.is_whole:
        for part in range(header.parts):
            for _ in reader.pieces(part):
                pass
        return
    scratch = scratch_for(header)
    for part in range(header.parts):
        for stage, size in enumerate(header.part_bytes(part)):
            reader.into(part, stage, scratch[:size])


def _differs(header: PortableHeader, part: int, stage: int) -> str:
    which = f"block {part}" if part < header.blocks else f"the checkpoint at {header.positions[part - header.blocks]}"
    return f"{which} of stage {stage} differs from its checksum"
