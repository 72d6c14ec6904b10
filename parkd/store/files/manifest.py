"""The manifest of a conversation on disk: what it is, and where its bytes are. docs/FORMAT.md describes every byte.

    manifest  ──names──>  extents: parts of blocks and checkpoints, each with its place and two checksums

Pure: from bytes to values and back. Numbers are little-endian. A manifest ends with a checksum of itself, so that a
torn one is detected. It contains the checksums of the parts, so that swapped parts, stages or files are detected too.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from parkd.state import Bytes, Sums
from parkd.store.files.fs import GRAIN_BYTES
from parkd.store.records import BlockId, ConversationId
from parkd.types import HASH_BYTES, Units

MAGIC = b"parkdMAN"
VERSION = 1
SIZED_VERSION = 2
"""The version of manifests of opaque states, whose parts have sizes of their own."""
EXTENT_SUFFIX = ".extent"
MANIFEST_SUFFIX = ".manifest"
TEMPORARY_SUFFIX = ".tmp"
_HEADER = struct.Struct("<8s I I Q d d Q I I I I I I 16s 16s 16s H H")
_U64 = np.dtype("<u8")
_U32 = np.dtype("<u4")
SIZED = 2
"""Flag: the size of each part is stored."""
NARROW_UNITS = 1
"""Flag: units are stored in 32 bits each, because all of them fit."""


class DamagedManifest(ValueError):
    """These bytes are not a complete manifest."""


@dataclass(frozen=True, eq=False)
class ExtentRef:
    """A file of parts, written once."""

    id: int
    size: int

    @property
    def name(self) -> str:
        return f"{self.id:016x}{EXTENT_SUFFIX}"

    @property
    def taken_bytes(self) -> int:
        """Bytes of disk that the file takes."""
        return -(-self.size // GRAIN_BYTES) * GRAIN_BYTES


@dataclass(frozen=True, slots=True, eq=False)
class DiskPlace:
    """Where the parts of a block or of a checkpoint are on disk."""

    extent: int
    offsets: Sums
    """`[stages]`"""
    file_sums: Sums
    """`[stages]`, xxh3-64 of the parts' bytes."""
    bytes: int = 0
    """Bytes of an opaque state or checkpoint, which has one stage; 0: by the layout, or part of the block."""


@dataclass(frozen=True, slots=True, eq=False)
class DiskBlock:
    """A block as a manifest names it, all stages of it."""

    id: BlockId
    rows: int
    identity: bytes
    sums: Sums
    """`[stages]`, computed by the engine."""
    place: DiskPlace


@dataclass(frozen=True, slots=True, eq=False)
class DiskCheckpoint:
    """The fixed state at `position` as a manifest names it."""

    position: int
    sums: Sums
    place: DiskPlace


@dataclass(frozen=True, eq=False)
class Manifest:
    """A conversation on disk."""

    id: ConversationId
    namespace: str
    key_digest: bytes
    fingerprint: bytes
    layout_digest: bytes
    block_tokens: int
    stages: int
    units: Units
    prefix_hashes: tuple[bytes, ...]
    parked_at_s: float
    """Seconds since the epoch, as `last_used_s`."""
    last_used_s: float
    extents: tuple[ExtentRef, ...]
    blocks: tuple[DiskBlock, ...]
    checkpoints: tuple[DiskCheckpoint, ...]

    @property
    def name(self) -> str:
        return manifest_name(self.id)

    @property
    def is_sized(self) -> bool:
        """An opaque state's."""
        return any(block.place.bytes for block in self.blocks)


def manifest_name(conversation_id: ConversationId) -> str:
    """Any id makes a file name: what may not stand in one is never there."""
    return xxhash.xxh3_128_hexdigest(conversation_id.encode()) + MANIFEST_SUFFIX


def encode(manifest: Manifest) -> bytes:
    stages, blocks, checkpoints = manifest.stages, manifest.blocks, manifest.checkpoints
    narrow = int(manifest.units.max()) < 1 << 32
    places = {extent.id: index for index, extent in enumerate(manifest.extents)}
    width = len(manifest.prefix_hashes[0]) if manifest.prefix_hashes else HASH_BYTES
    parts: list[DiskBlock | DiskCheckpoint] = [*blocks, *checkpoints]
    pieces = [
        _array([value for extent in manifest.extents for value in (extent.id, extent.size)], _U64),
        _array([block.id for block in blocks], _U64),
        _array([checkpoint.position for checkpoint in checkpoints], _U64),
        _table([part.place.offsets for part in parts], stages),
        _table([part.sums for part in parts], stages),
        _table([part.place.file_sums for part in parts], stages),
        _array([places[part.place.extent] for part in parts], _U32),
        _array([block.rows for block in blocks], _U32),
        manifest.units.astype(_U32 if narrow else _U64).tobytes(),
        b"".join(block.identity.ljust(HASH_BYTES, b"\0") for block in blocks),
        b"".join(manifest.prefix_hashes),
        _array([part.place.bytes for part in parts] if manifest.is_sized else [], _U64),
        manifest.id.encode(),
        manifest.namespace.encode(),
    ]
    body = b"".join(pieces)
    header = _HEADER.pack(
        MAGIC,
        SIZED_VERSION if manifest.is_sized else VERSION,
        (NARROW_UNITS if narrow else 0) | (SIZED if manifest.is_sized else 0),
        _HEADER.size + len(body) + _U64.itemsize,
        manifest.parked_at_s,
        manifest.last_used_s,
        len(manifest.units),
        manifest.block_tokens,
        stages,
        len(manifest.extents),
        len(blocks),
        len(checkpoints),
        width,
        manifest.key_digest,
        manifest.layout_digest,
        manifest.fingerprint,
        len(manifest.id.encode()),
        len(manifest.namespace.encode()),
    )
    return header + body + struct.pack("<Q", checksum(header + body))


def checksum(data: bytes) -> int:
    return int(xxhash.xxh3_64_intdigest(data))


def decode(data: bytes) -> Manifest:
    """Raises DamagedManifest."""
    if len(data) < _HEADER.size + _U64.itemsize:
        raise DamagedManifest("shorter than a header")
    (
        magic,
        version,
        flags,
        size,
        parked_at_s,
        last_used_s,
        tokens,
        block_tokens,
        stages,
        extent_count,
        block_count,
        checkpoint_count,
        width,
        key_digest,
        layout_digest,
        fingerprint,
        id_bytes,
        namespace_bytes,
    ) = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise DamagedManifest("not a manifest")
    if version != (SIZED_VERSION if flags & SIZED else VERSION):
        raise DamagedManifest(f"format {version}, and this program reads {VERSION} and {SIZED_VERSION}")
    if size != len(data):
        raise DamagedManifest(f"{len(data)} bytes of {size}")
    if struct.unpack_from("<Q", data, size - _U64.itemsize)[0] != checksum(data[: -_U64.itemsize]):
        raise DamagedManifest("its checksum does not match")
    reader = Reader(data, _HEADER.size)
    part_count = block_count + checkpoint_count
    pairs = reader.array(_U64, 2 * extent_count).tolist()
    extents = tuple(ExtentRef(pairs[at], pairs[at + 1]) for at in range(0, len(pairs), 2))
    ids = reader.array(_U64, block_count).tolist()
    positions = reader.array(_U64, checkpoint_count).tolist()
    tables = [reader.array(_U64, part_count * stages).reshape(part_count, stages) for _ in range(3)]
    owners = [extents[index].id for index in reader.array(_U32, part_count).tolist()]
    rows = reader.array(_U32, block_count).tolist()
    units = reader.array(_U32 if flags & NARROW_UNITS else _U64, tokens).astype(np.uint64)
    units.flags.writeable = False
    identities = reader.slices(HASH_BYTES, block_count)
    hashes = reader.slices(width, tokens // block_tokens)
    sizes = reader.array(_U64, part_count).tolist() if flags & SIZED else [0] * part_count
    offsets, sums, file_sums = tables
    spots = [DiskPlace(owners[i], offsets[i], file_sums[i], sizes[i]) for i in range(part_count)]
    return Manifest(
        id=reader.take(id_bytes).decode(),
        namespace=reader.take(namespace_bytes).decode(),
        key_digest=key_digest,
        fingerprint=fingerprint,
        layout_digest=layout_digest,
        block_tokens=block_tokens,
        stages=stages,
        units=units,
        prefix_hashes=tuple(hashes),
        parked_at_s=parked_at_s,
        last_used_s=last_used_s,
        extents=extents,
        blocks=tuple(DiskBlock(ids[i], rows[i], identities[i], sums[i], spots[i]) for i in range(block_count)),
        checkpoints=tuple(
            DiskCheckpoint(positions[i - block_count], sums[i], spots[i]) for i in range(block_count, part_count)
        ),
    )


def encoded_bytes(tokens: int, blocks: int, checkpoints: int, stages: int, extents: int) -> int:
    """No less than a manifest of this many parts takes, with any id and namespace of up to 64 bytes each."""
    per_part = 3 * stages * 8 + 4 + 8
    body = extents * 16 + blocks * (8 + 4 + HASH_BYTES) + checkpoints * 8 + (blocks + checkpoints) * per_part
    return _HEADER.size + body + tokens * 8 + blocks * HASH_BYTES + 128 + 8


class Reader:
    """Takes one field after another."""

    def __init__(self, data: Bytes | bytes, at: int) -> None:
        self._data = data
        self._at = at

    def array(self, dtype: np.dtype[np.uint64] | np.dtype[np.uint32], count: int) -> npt.NDArray[Any]:
        array = np.frombuffer(self._data, dtype, count, self._at)
        self._at += array.nbytes
        return array

    def take(self, size: int) -> bytes:
        piece = bytes(self._data[self._at : self._at + size])
        self._at += size
        return piece

    def slices(self, size: int, count: int) -> list[bytes]:
        piece = self.take(size * count)
        return [piece[at : at + size] for at in range(0, size * count, size)]


def _array(values: list[int], dtype: np.dtype[np.uint64] | np.dtype[np.uint32]) -> bytes:
    return np.array(values, dtype=dtype).tobytes()


def _table(rows: list[Sums], stages: int) -> bytes:
    return np.array(rows, dtype=_U64).reshape(len(rows), stages).tobytes()
