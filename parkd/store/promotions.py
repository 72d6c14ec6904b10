"""The parts of a promotion: a conversation that is read from disk into RAM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from parkd.state import Checksums, StateFile, StateLayout, StateSizes
from parkd.store.disk import DiskTier
from parkd.store.disk_jobs import DamagedPart, ReadJob
from parkd.store.disk_records import DiskEntry
from parkd.store.manifest import Manifest
from parkd.store.records import BlockId, Capture, CaptureRequest, ConversationId, Parked
from parkd.store.shelf import Shelf

READ_FAILURES = 2
"""Failed reads of a file before what it holds is given up."""


@dataclass(frozen=True, eq=False)
class Promotion:
    """Blocks of a conversation on their way from disk to RAM: run `job`, then call `TieredStore.promoted`."""

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


def end_of_read(parked: Parked, stop: int, block_tokens: int, layout: StateLayout) -> int:
    """The end of the whole blocks that hold `[0, stop)`, or of the conversation if its state cannot be cut there."""
    end = -(-stop // block_tokens) * block_tokens
    if layout.fixed_bytes or layout.is_opaque or end > parked.position:
        return parked.position
    return end


def know_checkpoints(disk: DiskTier, shelf: Shelf, manifest: Manifest, parked: Parked) -> None:
    """Notes which checkpoints of a promoted conversation are on disk already.

    Compares checksums: one that was inherited in RAM may hold another state of the same position.
    """
    places = {place.position: place for place in manifest.checkpoints}
    for checkpoint in parked.checkpoints:
        place, sums = places.get(checkpoint.position), shelf.checkpoints.checksums(checkpoint.id)
        if place is not None and np.array_equal(place.sums, sums):
            disk.know_checkpoint(checkpoint.id, place)


def sizes_on_disk(manifest: Manifest) -> StateSizes | None:
    """The sizes of an opaque state on disk; None if the state is rows."""
    if not manifest.is_sized:
        return None
    return StateSizes(manifest.blocks[0].bytes, tuple(checkpoint.bytes for checkpoint in manifest.checkpoints))


def give_up(disk: DiskTier, promotion: Promotion, error: Exception) -> list[DiskEntry]:
    """Removes the conversations that a failed read shows to be lost, and returns them: at once if the bytes are not
    those that were written, else after `READ_FAILURES` failures of the device."""
    extents = [ref.id for ref, _ in promotion.job.extents]
    if isinstance(error, DamagedPart):
        lost = [error.extent]
    else:
        lost = [extent for extent in extents if disk.failed_read(extent) >= READ_FAILURES]
    return [entry for extent in lost for entry in disk.damaged(extent)]


def drop_unlike(disk: DiskTier, fresh: Sequence[BlockId], checksums: Checksums) -> None:
    """Drops from disk what differs from blocks that were captured again under the id they have there.

    Such a block must have the same bytes. If it has not, the live rows were not what they were taken for, and nothing
    may build on the copy on disk.
    """
    for block_id, sums in zip(fresh, checksums.rows, strict=False):  # the store refuses a wrong number of them
        place = disk.blocks.get(block_id)
        if place is not None and not np.array_equal(place.sums, sums):
            disk.damaged(place.extent)
