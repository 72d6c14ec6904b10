"""Portable conversations out of, and into, a park directory that no server holds."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from parkd.identity.chain import prefix_hashes
from parkd.portable.header import DamagedFile, PortableHeader, header_bytes
from parkd.portable.parts import SourcePart, write
from parkd.state import Bytes, StateFile, StateLayout
from parkd.store.files.disk_jobs import WriteJob
from parkd.store.files.disk_jobs import write as write_files
from parkd.store.files.disk_layout import lay_out
from parkd.store.files.fs import File, FileSystem
from parkd.store.files.manifest import DiskBlock, DiskCheckpoint, DiskPlace, ExtentRef, Manifest
from parkd.store.layouts import keep_layouts
from parkd.store.opening import new_block_epoch, scan
from parkd.store.planning import block_identity
from parkd.types import ConversationKey

ID_BYTES = 8


def steering_of(manifest: Manifest) -> bytes | None:
    """The digest of what steered a conversation, as far as its files tell: empty if nothing did, None if something
    did."""
    key = ConversationKey(manifest.namespace, manifest.fingerprint)
    return b"" if key.digest == manifest.key_digest else None


def export(
    fs: FileSystem, directory: Path, manifest: Manifest, layout: StateLayout, steering: bytes, out: BinaryIO
) -> PortableHeader:
    """Writes a conversation of a park directory to an empty file, and compares it with its checksums. `layout` is the
    one that its manifest names. Raises DamagedFile and OSError."""
    header = PortableHeader(
        model="",
        fingerprint=manifest.fingerprint,
        steering=steering,
        layout=layout,
        block_tokens=manifest.block_tokens,
        units=manifest.units,
        positions=tuple(checkpoint.position for checkpoint in manifest.checkpoints),
        sums=np.zeros((0, 0), dtype=np.uint64),
        sizes=tuple(part.place.bytes for part in _parts_of(manifest)) if layout.is_opaque else (),
    )
    if len(manifest.blocks) != header.blocks or manifest.stages != len(layout.stages):
        raise DamagedFile("its manifest and its layout contradict each other")
    return write(out, header, _sources(fs, directory, manifest, header))


def _parts_of(manifest: Manifest) -> list[DiskBlock | DiskCheckpoint]:
    return [*manifest.blocks, *manifest.checkpoints]


def _sources(fs: FileSystem, directory: Path, manifest: Manifest, header: PortableHeader) -> Iterator[list[SourcePart]]:
    files: dict[int, File] = {}
    names = {ref.id: ref.name for ref in manifest.extents}
    try:
        for number, part in enumerate(_parts_of(manifest)):
            extent = part.place.extent
            if header.kind.is_file and isinstance(part, DiskBlock):
                state = StateFile(directory / names[extent], part.place.bytes)
                yield [SourcePart(state, int(part.sums[0]), state.bytes)]
                continue
            if extent not in files:
                files[extent] = fs.open(names[extent])
            stages = []
            for stage, size in enumerate(header.part_bytes(number)):
                whole = size
                if isinstance(part, DiskBlock) and not header.sizes:
                    whole = header.layout.stages[stage].block_bytes(part.rows)
                buffer = np.empty(max(size, whole), dtype=np.uint8)
                files[extent].read(int(part.place.offsets[stage]), [buffer])
                stages.append(SourcePart(buffer, int(part.sums[stage]), size))
            yield stages
    finally:
        for file in files.values():
            file.close()


def land(fs: FileSystem, path: Path, header: PortableHeader, namespace: str, now_s: float) -> Manifest:
    """Writes the conversation in the file `path`, whose parts were compared with their checksums, to a park directory.
    The next server over it finds it there. Returns its manifest. Raises OSError; nothing is left then."""
    key = ConversationKey(namespace, header.fingerprint, header.steering)
    hashes = prefix_hashes(header.units, key.digest, header.block_tokens)
    found = scan(fs)
    known = {manifest.layout_digest for manifest, _ in found.manifests}
    first = new_block_epoch(block.id for manifest, _ in found.manifests for block in manifest.blocks)
    extent_id, stages, known_as = secrets.randbits(64), header.kind.stages, header.block_tokens
    content = np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
    fresh = list(_placed(content, header, extent_id))
    parts, extent = lay_out(fresh, stages, extent_id, is_summed=False)
    assert extent is not None, "a conversation has a block"
    places = [place for _, place in fresh]
    is_adopted = header.kind.is_file
    if is_adopted:
        extent, parts = _file_written(fs, ExtentRef(extent_id, header.sizes[0]), fresh[0][0]), ()
        places = [replace(place, file_sums=sums) for place, sums in zip(places, header.sums, strict=True)]
    identities = [
        block_identity(key.digest, header.units, hashes, known_as, block, header.rows(block))
        for block in range(header.blocks)
    ]
    manifest = Manifest(
        id=secrets.token_hex(ID_BYTES),
        namespace=namespace,
        key_digest=key.digest,
        fingerprint=header.fingerprint,
        layout_digest=header.layout.digest,
        block_tokens=header.block_tokens,
        stages=stages,
        units=header.units,
        prefix_hashes=hashes,
        parked_at_s=now_s,
        last_used_s=now_s,
        extents=(extent,),
        blocks=tuple(
            DiskBlock(first + block, header.rows(block), identities[block], header.sums[block], places[block])
            for block in range(header.blocks)
        ),
        checkpoints=tuple(
            DiskCheckpoint(position, header.sums[number], places[number])
            for number, position in enumerate(header.positions, header.blocks)
        ),
    )
    keep_layouts(fs, header.layout, known)
    write_files(fs, WriteJob(manifest, extent, parts, is_adopted=is_adopted))
    return manifest


def _file_written(fs: FileSystem, extent: ExtentRef, content: list[Bytes]) -> ExtentRef:
    """A state that is a file: its extent has its length, and is synced with its manifest. Raises OSError."""
    file = fs.create(extent.name)
    try:
        file.write(0, content)
    except BaseException:
        fs.remove(extent.name)
        raise
    finally:
        file.close()
    return extent


def _placed(content: Bytes, header: PortableHeader, extent_id: int) -> Iterator[tuple[list[Bytes], DiskPlace]]:
    """The bytes of each part, by stage, and its place in the extent, which has no offsets yet."""
    at = header_bytes(header)
    for part in range(header.parts):
        buffers = []
        for size in header.part_bytes(part):
            buffers.append(content[at : at + size])
            at += size
        stages = len(buffers)
        own = header.sizes[part] if header.sizes else 0
        yield buffers, DiskPlace(extent_id, np.zeros(stages, np.uint64), np.zeros(stages, np.uint64), own)
