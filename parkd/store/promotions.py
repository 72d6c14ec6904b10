"""What it takes to read a conversation from disk into RAM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from parkd.store.disk import DiskTier
from parkd.store.disk_jobs import DamagedPart, ReadJob
from parkd.store.disk_records import DiskEntry
from parkd.store.manifest import Manifest
from parkd.store.records import BlockId, Capture, CaptureRequest, ConversationId, Parked
from parkd.types import Checksums, StateFile, StateSizes

READ_FAILURES = 2
"""Reads that the device does not answer before what lies there is given up."""


@dataclass(frozen=True, eq=False)
class Promotion:
    """Blocks of a conversation on their way from disk to RAM: run `job`, then tell `promoted`."""

    source: ConversationId
    capture: Capture
    job: ReadJob
    sums: Checksums
    is_whole: bool


@dataclass(frozen=True, eq=False)
class Loading:
    """A promotion, from its reservation to its end."""

    parked: Parked
    is_whole: bool


def load_request(
    parked: Parked,
    end: int,
    block_tokens: int,
    *,
    rewindable: bool,
    sizes: StateSizes | None = None,
    file: StateFile | None = None,
) -> CaptureRequest:
    """The capture that `[0, end)` of a conversation on disk is read into."""
    return CaptureRequest(
        key_digest=parked.key_digest,
        units=parked.units[:end],
        prefix_hashes=parked.prefix_hashes[: end // block_tokens],
        lineage=parked.blocks,
        layout_digest=parked.layout_digest,
        checkpoints=tuple(c.position for c in parked.checkpoints if c.position <= end),
        rewindable=rewindable,
        namespace=parked.namespace,
        sizes=sizes,
        file=file,
    )


def sizes_on_disk(manifest: Manifest) -> StateSizes | None:
    """Of an opaque state that lies there; None for another one."""
    if not manifest.is_sized:
        return None
    return StateSizes(manifest.blocks[0].bytes, tuple(checkpoint.bytes for checkpoint in manifest.checkpoints))


def give_up(disk: DiskTier, promotion: Promotion, error: Exception) -> list[DiskEntry]:
    """Takes off what a read that failed showed to be lost, and returns it: at once what is not what was written, the
    rest when the device did not answer for the last time."""
    extents = [ref.id for ref, _ in promotion.job.extents]
    if isinstance(error, DamagedPart):
        lost = [error.extent]
    else:
        lost = [extent for extent in extents if disk.failed_read(extent) >= READ_FAILURES]
    return [entry for extent in lost for entry in disk.damaged(extent)]


def unlike_disk(disk: DiskTier, fresh: Sequence[BlockId], checksums: Checksums) -> None:
    """A block that was copied anew under the id it has on disk must have the bytes it has there. If it has not, the
    live rows were not what they were taken for: nothing may build on the place on disk."""
    for block_id, sums in zip(fresh, checksums.rows, strict=False):  # the store refuses a wrong number of them
        place = disk.blocks.get(block_id)
        if place is not None and not np.array_equal(place.sums, sums):
            disk.damaged(place.extent)
