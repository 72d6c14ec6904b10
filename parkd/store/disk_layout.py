"""Where parts are in an extent, and the jobs that move them between files and memory.

    extent  | stage 0: block, block, ..., checkpoint, ... | stage 1: block, block, ..., checkpoint, ... | ...
              each part begins on a page, and is padded with zeros to the next

Stage by stage, so that a conversation is read with few, long, ascending reads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from parkd.state import Bytes, Checksums, StateLayout, Transfer
from parkd.store.disk import DiskTier
from parkd.store.disk_jobs import Part, ReadJob, WriteJob
from parkd.store.fs import GRAIN_BYTES
from parkd.store.manifest import DiskBlock, DiskCheckpoint, ExtentRef, Manifest, Sums
from parkd.store.records import BlockId, Parked
from parkd.store.shelf import Shelf
from parkd.store.slabs import round_up

FILE_SUM = "xxh3-64"
"""The checksum of files. If the engine computes the same, it need not be computed again."""


def block_buffers(shelf: Shelf, block_id: BlockId, *, writeable: bool) -> list[Bytes]:
    """The rows of one block in RAM, `[rows * row_bytes]` for each stage."""
    block = shelf.blocks.get(block_id)
    assert block is not None
    stop = block.index * shelf.block_tokens + block.rows
    return [runs[0].buffer for runs in shelf.blocks.runs([block_id], stop, writeable=writeable)]


def write_job(
    shelf: Shelf,
    disk: DiskTier,
    layout: StateLayout,
    parked: Parked,
    extent_id: int,
    wall_shift_s: float,
    adopted: ExtentRef | None = None,
) -> tuple[WriteJob, tuple[ExtentRef, ...]]:
    """The job that writes a conversation from RAM to disk, and the extents on disk that it reuses.

    New parts go to the extent `extent_id`. `wall_shift_s` is added to the store's clock to get seconds since the epoch.
    `adopted` is the extent, if the engine has written its file already.
    """
    stages = len(layout.stages)
    is_summed = layout.checksum == FILE_SUM
    blocks: list[DiskBlock] = []
    checkpoints: list[DiskCheckpoint] = []
    fresh: list[tuple[list[Bytes], DiskBlock | DiskCheckpoint]] = []
    for block_id in parked.blocks:
        known = disk.blocks.get(block_id)
        if known is None:
            held = shelf.blocks.get(block_id)
            assert held is not None
            sums = held.checksums
            buffers = block_buffers(shelf, block_id, writeable=False)
            file_sums = _file_sums(sums, known=is_summed)
            size = buffers[0].nbytes if layout.is_opaque else 0
            size = size if adopted is None else adopted.size
            known = DiskBlock(block_id, extent_id, held.rows, held.identity, _blank(stages), sums, file_sums, size)
            fresh.append((buffers, known))
        blocks.append(known)
    for checkpoint in parked.checkpoints:
        place = disk.checkpoints.get(checkpoint.id)
        if place is None:
            sums = shelf.checkpoints.checksums(checkpoint.id)
            file_sums = _file_sums(sums, known=is_summed)
            buffers = [part.buffer for part in shelf.checkpoints.parts(checkpoint.id, writeable=False)]
            size = buffers[0].nbytes if layout.is_opaque else 0
            place = DiskCheckpoint(checkpoint.position, extent_id, _blank(stages), sums, file_sums, size)
            fresh.append((buffers, place))
        assert place.position == checkpoint.position, "a checkpoint was taken for another"
        checkpoints.append(place)
    parts: tuple[Part, ...] = ()
    new = adopted
    if adopted is None:
        parts, new = _lay_out(fresh, stages, extent_id, is_summed=is_summed)
    used = dict.fromkeys([block.extent for block in blocks] + [place.extent for place in checkpoints])
    reused = tuple(disk.ref(number) for number in used if number != extent_id)
    manifest = Manifest(
        id=parked.id,
        namespace=parked.namespace,
        key_digest=parked.key_digest,
        fingerprint=disk.config.fingerprint,
        layout_digest=parked.layout_digest,
        block_tokens=shelf.block_tokens,
        stages=stages,
        units=parked.units,
        prefix_hashes=parked.prefix_hashes,
        parked_at_s=parked.parked_at_s + wall_shift_s,
        last_used_s=parked.last_used_s + wall_shift_s,
        extents=reused + ((new,) if new is not None else ()),
        blocks=tuple(blocks),
        checkpoints=tuple(checkpoints),
    )
    return WriteJob(manifest, new, parts, is_adopted=adopted is not None), reused


def read_job(
    shelf: Shelf, manifest: Manifest, transfer: Transfer, fresh: Sequence[BlockId]
) -> tuple[ReadJob, Checksums]:
    """The job that reads the blocks `fresh`, which begin at the transfer's start, and the transfer's checkpoints from
    the manifest's extents. Also returns the engine's checksums of all of them."""
    first = transfer.start // shelf.block_tokens
    places: list[DiskBlock | DiskCheckpoint] = list(manifest.blocks[first : first + len(fresh)])
    buffers = [block_buffers(shelf, block_id, writeable=True) for block_id in fresh]
    block_sums = _table([place.sums for place in places], manifest.stages)
    at = {checkpoint.position: checkpoint for checkpoint in manifest.checkpoints}
    fixed = [at[part.position] for part in transfer.stages[0].fixed]
    places += fixed
    buffers += [[stage.fixed[index].buffer for stage in transfer.stages] for index in range(len(fixed))]
    parts: dict[int, list[Part]] = {}
    for place, stage_buffers in zip(places, buffers, strict=True):
        for stage, buffer in enumerate(stage_buffers):
            streamed = place.bytes if not buffer.nbytes else 0
            part = Part(int(place.offsets[stage]), buffer, place.file_sums, stage, streamed_bytes=streamed)
            parts.setdefault(place.extent, []).append(part)
    refs = {ref.id: ref for ref in manifest.extents}
    job = ReadJob(
        tuple((refs[number], tuple(sorted(found, key=lambda part: part.offset))) for number, found in parts.items())
    )
    return job, Checksums(block_sums, _table([place.sums for place in fixed], manifest.stages))


def _lay_out(
    fresh: list[tuple[list[Bytes], DiskBlock | DiskCheckpoint]], stages: int, extent_id: int, *, is_summed: bool
) -> tuple[tuple[Part, ...], ExtentRef | None]:
    """Lays out new parts in a file: sets the offsets in their places. Returns the parts in order, and the extent, None
    if there are no new parts."""
    parts, at = [], 0
    for stage in range(stages):
        for buffers, place in fresh:
            place.offsets[stage] = at
            parts.append(Part(at, buffers[stage], place.file_sums, stage, is_summed))
            at += round_up(buffers[stage].nbytes, GRAIN_BYTES)
    return tuple(parts), ExtentRef(extent_id, at) if fresh else None


def _blank(stages: int) -> Sums:
    return np.zeros(stages, dtype=np.uint64)


def _file_sums(sums: Sums, *, known: bool) -> Sums:
    return sums.copy() if known else np.zeros_like(sums)


def _table(rows: list[Sums], stages: int) -> Sums:
    return np.array(rows, dtype=np.uint64).reshape(len(rows), stages)
