"""Where parts are in an extent, and the jobs that move them between files and memory.

    extent  | stage 0: block, block, ..., checkpoint, ... | stage 1: block, block, ..., checkpoint, ... | ...
              each part begins on a page, and is padded with zeros to the next

Stage by stage, so that a conversation is read with few, long, ascending reads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from parkd.state import Bytes, Recut, Sums
from parkd.state.sums import XXH3
from parkd.store.conversations import Conversation, Conversations
from parkd.store.disk import Disk, OnDisk
from parkd.store.files.disk_jobs import Part, ReadJob, RecutJob, WriteJob
from parkd.store.files.fs import GRAIN_BYTES
from parkd.store.files.manifest import DiskBlock, DiskCheckpoint, DiskPlace, ExtentRef, Manifest
from parkd.store.records import BlockId, CheckpointId
from parkd.store.slabs import round_up

FILE_SUM = XXH3
"""The checksum of files. If the engine computes the same, it need not be computed again."""


def write_job(
    table: Conversations,
    disk: Disk,
    conversation: Conversation,
    extent_id: int,
    wall_shift_s: float,
    adopted: ExtentRef | None = None,
) -> tuple[WriteJob, tuple[ExtentRef, ...]]:
    """The job that writes a conversation from RAM to disk, and the extents on disk that it reuses.

    New parts go to the extent `extent_id`. `wall_shift_s` is added to the store's clock to get seconds since the epoch.
    `adopted` is the extent, if the engine has written its file already.
    """
    parked, kind = conversation.parked, table.kind
    is_summed = kind.layout.checksum == FILE_SUM
    fresh: list[tuple[list[Bytes], DiskPlace]] = []

    def placed(buffers: list[Bytes], sums: Sums, size: int) -> DiskPlace:
        file_sums = sums.copy() if is_summed else np.zeros_like(sums)
        place = DiskPlace(extent_id, np.zeros(kind.stages, dtype=np.uint64), file_sums, size if kind.is_whole else 0)
        fresh.append((buffers, place))
        return place

    blocks: list[DiskBlock] = []
    for block_id, sums in zip(parked.blocks, table.blocks.checksums(parked.blocks), strict=True):
        block = table.blocks[block_id]
        place = block.disk
        if place is None:
            buffers = table.blocks.buffers(block_id, kind.block_tokens, writeable=False)
            place = placed(buffers, sums, buffers[0].nbytes if adopted is None else adopted.size)
        blocks.append(DiskBlock(block_id, block.rows, block.identity, sums, place))
    checkpoints: list[DiskCheckpoint] = []
    for checkpoint in parked.checkpoints:
        sums, place = table.checkpoints.checksums(checkpoint.id), table.checkpoints[checkpoint.id].disk
        if place is None:
            buffers = [part.buffer for part in table.checkpoints.parts(checkpoint.id, writeable=False)]
            place = placed(buffers, sums, buffers[0].nbytes)
        checkpoints.append(DiskCheckpoint(checkpoint.position, sums, place))
    parts: tuple[Part, ...] = ()
    new = adopted
    if adopted is None:
        parts, new = lay_out(fresh, kind.stages, extent_id, is_summed=is_summed)
    used = dict.fromkeys([*(each.place.extent for each in blocks), *(each.place.extent for each in checkpoints)])
    reused = tuple(disk.ref(number) for number in used if number != extent_id)
    manifest = Manifest(
        id=parked.id,
        namespace=parked.namespace,
        key_digest=parked.key_digest,
        fingerprint=disk.config.fingerprint,
        layout_digest=parked.layout_digest,
        block_tokens=kind.block_tokens,
        stages=kind.stages,
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
    table: Conversations, disk: Disk, blocks: Sequence[BlockId], checkpoints: Sequence[CheckpointId]
) -> ReadJob:
    """The job that fills the places in RAM of blocks and checkpoints from their places on disk."""
    parts: dict[int, list[Part]] = {}

    def add(place: DiskPlace | None, buffers: Sequence[Bytes]) -> None:
        assert place is not None, "what is promoted is on disk"
        for stage, buffer in enumerate(buffers):
            streamed = place.bytes if not buffer.nbytes else 0
            part = Part(int(place.offsets[stage]), buffer, place.file_sums, stage, streamed_bytes=streamed)
            parts.setdefault(place.extent, []).append(part)

    for block_id in blocks:
        buffers = table.blocks.buffers(block_id, table.kind.block_tokens, writeable=True)
        add(table.blocks[block_id].disk, buffers)
    for checkpoint_id in checkpoints:
        fixed = table.checkpoints.parts(checkpoint_id, writeable=True)
        add(table.checkpoints[checkpoint_id].disk, [part.buffer for part in fixed])
    return ReadJob(
        tuple((disk.ref(number), tuple(sorted(found, key=lambda part: part.offset))) for number, found in parts.items())
    )


def recut_job(
    table: Conversations, source: OnDisk, recut: Recut, blocks: Sequence[BlockId], checkpoints: Sequence[CheckpointId]
) -> RecutJob:
    """The job that fills the places in RAM of blocks and checkpoints from a conversation of another layer split."""
    stages = table.kind.stages
    fixed = [table.checkpoints.parts(checkpoint_id, writeable=True) for checkpoint_id in checkpoints]
    return RecutJob(
        tuple((ref, ()) for ref in source.extents),
        source.name,
        recut,
        tuple(tuple(table.blocks.buffers(each, table.kind.block_tokens, writeable=True)) for each in blocks),
        tuple((parts[0].position, tuple(part.buffer for part in parts)) for parts in fixed),
        np.zeros((len(blocks), stages), dtype=np.uint64),
        np.zeros((len(checkpoints), stages), dtype=np.uint64),
    )


def lay_out(
    fresh: list[tuple[list[Bytes], DiskPlace]], stages: int, extent_id: int, *, is_summed: bool
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
