"""The header of a portable conversation: what it is, how its bytes are laid out, and their checksums.

    | fixed | layout | positions | sums | sizes | units | model | sum of all before |  parts ...

Pure: from bytes to values and back. A header is read only in the one form in which it would be written, so nothing in
it goes unread, and every count is compared with the length of what it counts before anything is made of it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import xxhash

from parkd.state import LAYOUT_LIMIT_BYTES, DamagedLayout, StateLayout, Sums, describe, layout_from
from parkd.store.blocks import StateKind
from parkd.store.files.manifest import Reader
from parkd.types import HASH_BYTES, Units

MAGIC = b"parkdCNV"
VERSION = 1
NARROW_UNITS = 1
"""Flag: units are stored in 32 bits each, because all of them fit."""
SIZED = 2
"""Flag: the size of each part is stored, because the layout does not tell it: an opaque state's."""
STEERED = 4
"""Flag: control vectors steered the model."""
HEADER_LIMIT_BYTES = 16 << 20
"""A header is no longer: about 2 million tokens, or 4 million as plain ids."""
BLOCK_TOKENS_LIMIT = 1 << 20
MODEL_LIMIT_BYTES = 256
SIZE_LIMIT_BYTES = 1 << 48
"""No file is longer."""
_FIXED = struct.Struct("<8s I I Q I I Q I I I I 16s 16s 16s I")
FIXED_BYTES = _FIXED.size
_SUM = struct.Struct("<Q")
_U64 = np.dtype("<u8")
_U32 = np.dtype("<u4")


class DamagedFile(ValueError):
    """The file is not a complete portable conversation. The message says where it is not."""


@dataclass(frozen=True, eq=False)
class PortableHeader:
    """A conversation as its file describes it."""

    model: str
    """Name of the model, for people; may be empty."""
    fingerprint: bytes
    """Of the engine that computed the state, 16 bytes."""
    steering: bytes
    """Digest of the control vectors that steered, 16 bytes; empty if nothing did."""
    layout: StateLayout
    block_tokens: int
    units: Units
    """`[n]`, n > 0."""
    positions: tuple[int, ...]
    """Of the checkpoints, ascending."""
    sums: Sums
    """`[blocks + checkpoints, stages]`, by the layout's checksum."""
    sizes: tuple[int, ...] = ()
    """Bytes of each part of an opaque state; empty if the layout tells them."""

    @cached_property
    def kind(self) -> StateKind:
        return StateKind(self.layout, self.block_tokens)

    @property
    def tokens(self) -> int:
        return len(self.units)

    @property
    def blocks(self) -> int:
        return self.kind.blocks(self.tokens)

    def rows(self, block: int) -> int:
        """Rows of a block: as many as the conversation has there."""
        return self.tokens if self.kind.is_whole else min(self.block_tokens, self.tokens - block * self.block_tokens)

    def part_bytes(self, part: int) -> tuple[int, ...]:
        """Bytes of each stage's share of a part: blocks are counted first, then checkpoints."""
        if self.sizes:
            return (self.sizes[part],)
        stages = self.layout.stages
        if part < self.blocks:
            return tuple(stage.block_bytes(self.rows(part)) for stage in stages)
        return tuple(stage.fixed_bytes for stage in stages)

    @property
    def parts(self) -> int:
        return self.blocks + len(self.positions)

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of all parts together."""
        return sum(sum(self.part_bytes(part)) for part in range(self.parts))

    @cached_property
    def file_bytes(self) -> int:
        """Bytes of the whole file."""
        return header_bytes(self) + self.state_bytes


def header_bytes(header: PortableHeader) -> int:
    """How long it is when it is encoded. It does not depend on the sums."""
    width = _U32.itemsize if _is_narrow(header.units) else _U64.itemsize
    arrays = len(header.positions) + header.parts * header.kind.stages + len(header.sizes)
    texts = len(describe(header.layout)) + len(header.model.encode())
    return FIXED_BYTES + texts + arrays * _U64.itemsize + header.tokens * width + _SUM.size


def _is_narrow(units: Units) -> bool:
    return int(units.max()) < 1 << 32


def encode(header: PortableHeader) -> bytes:
    """Raises ValueError if it would be longer than `HEADER_LIMIT_BYTES`."""
    narrow, layout, model = _is_narrow(header.units), describe(header.layout), header.model.encode()
    flags = NARROW_UNITS * narrow | SIZED * bool(header.sizes) | STEERED * bool(header.steering)
    size = header_bytes(header)
    if size > HEADER_LIMIT_BYTES:
        raise ValueError(f"a header of {size} bytes is longer than {HEADER_LIMIT_BYTES}")
    fixed = _FIXED.pack(
        MAGIC,
        VERSION,
        flags,
        header.file_bytes,
        size,
        len(layout),
        header.tokens,
        header.block_tokens,
        header.blocks,
        len(header.positions),
        header.kind.stages,
        header.fingerprint,
        header.layout.digest,
        header.steering.ljust(HASH_BYTES, b"\0"),
        len(model),
    )
    pieces = (
        fixed,
        layout,
        np.array(header.positions, dtype=_U64).tobytes(),
        header.sums.astype(_U64).tobytes(),
        np.array(header.sizes, dtype=_U64).tobytes(),
        header.units.astype(_U32 if narrow else _U64).tobytes(),
        model,
    )
    body = b"".join(pieces)
    return body + _SUM.pack(xxhash.xxh3_64_intdigest(body))


@dataclass(frozen=True, slots=True)
class Lengths:
    """What the first bytes of a file tell of its lengths."""

    file_bytes: int
    header_bytes: int


def lengths(fixed: bytes) -> Lengths:
    """From the first `FIXED_BYTES` of a file. Raises DamagedFile."""
    if len(fixed) < FIXED_BYTES:
        raise DamagedFile("it is shorter than a header")
    magic, version, flags, size, header_size, *_ = _FIXED.unpack_from(fixed)
    if magic != MAGIC:
        raise DamagedFile("it is no conversation that parkd exported")
    if version != VERSION:
        raise DamagedFile(f"it has format {version}, and this parkd reads {VERSION}")
    if flags & ~(NARROW_UNITS | SIZED | STEERED):
        raise DamagedFile("it has flags that this parkd does not know")
    if not FIXED_BYTES + _SUM.size <= header_size <= min(HEADER_LIMIT_BYTES, size) or size > SIZE_LIMIT_BYTES:
        raise DamagedFile(f"its header says that it has {header_size} bytes, of {size} in all")
    return Lengths(size, header_size)


def decode(data: bytes) -> PortableHeader:
    """The header in `data`, which is all of it. Raises DamagedFile."""
    if lengths(data).header_bytes != len(data):
        raise DamagedFile(f"its header has {len(data)} bytes, and says another number")
    if _SUM.unpack_from(data, len(data) - _SUM.size)[0] != xxhash.xxh3_64_intdigest(data[: -_SUM.size]):
        raise DamagedFile("the checksum of its header does not match")
    _, _, flags, size, _, layout_bytes, tokens, block_tokens, blocks, count, stages, *rest = _FIXED.unpack_from(data)
    fingerprint, _, steering, model_bytes = rest
    if not tokens or not 0 < block_tokens <= BLOCK_TOKENS_LIMIT or layout_bytes > LAYOUT_LIMIT_BYTES:
        raise DamagedFile("it has no tokens, or blocks or a layout of an impossible size")
    width = _U32 if flags & NARROW_UNITS else _U64
    parts = blocks + count
    arrays = count + parts * stages + (parts if flags & SIZED else 0)
    needed = FIXED_BYTES + layout_bytes + arrays * _U64.itemsize + tokens * width.itemsize + model_bytes + _SUM.size
    if needed != len(data) or model_bytes > MODEL_LIMIT_BYTES:
        raise DamagedFile("the numbers in its header contradict its length")
    reader = Reader(data, FIXED_BYTES)
    try:
        layout = layout_from(reader.take(layout_bytes))
    except DamagedLayout as error:
        raise DamagedFile(f"its layout cannot be used: {error}") from None
    if len(layout.stages) != stages:
        raise DamagedFile("its layout has another number of stages")
    positions = tuple(reader.array(_U64, count).tolist())
    sums = reader.array(_U64, parts * stages).reshape(parts, stages).astype(np.uint64)
    sizes = tuple(reader.array(_U64, parts).tolist()) if flags & SIZED else ()
    units = reader.array(width, tokens).astype(np.uint64)
    units.flags.writeable = False
    try:
        model = reader.take(model_bytes).decode()
    except UnicodeDecodeError:
        raise DamagedFile("the name of its model is no text") from None
    steered = steering if flags & STEERED else b""
    header = PortableHeader(model, fingerprint, steered, layout, block_tokens, units, positions, sums, sizes)
    _check(header, blocks, size)
    if encode(header) != data:
        raise DamagedFile("its header is not in the form in which parkd writes it")
    return header


def _check(header: PortableHeader, blocks: int, size: int) -> None:
    """Raises DamagedFile unless blocks, checkpoints and sizes are those of one conversation."""
    kind, positions = header.kind, header.positions
    if blocks != header.blocks or bool(header.sizes) != kind.is_whole:
        raise DamagedFile("its blocks are not those of its tokens")
    ascending = all(earlier < later for earlier, later in zip((0, *positions), positions, strict=False))
    if not ascending or positions[-1:] > (header.tokens,):
        raise DamagedFile("its checkpoints are not in order")
    if kind.needs_checkpoints != bool(positions) or (positions and positions[-1] != header.tokens):
        raise DamagedFile("it has no checkpoint at its end, or checkpoints of a state that needs none")
    if any(each > SIZE_LIMIT_BYTES for each in header.sizes) or (header.sizes and not header.sizes[0]):
        raise DamagedFile("a part has an impossible size")
    if header.sizes and positions and header.sizes[-1]:
        raise DamagedFile("its last checkpoint is not part of the whole state")
    if header.file_bytes != size:
        raise DamagedFile("its parts do not make up its length")
