"""The values of the disk tier, and what they take.

Manifest (bytes on disk)  <->  DiskEntry  ──parked──>  Parked (what the matcher sees)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from parkd.store.budget import BLOCK_BYTES, conversation_metadata_bytes
from parkd.store.disk_jobs import WriteJob
from parkd.store.fs import GRAIN_BYTES
from parkd.store.manifest import Manifest, encoded_bytes
from parkd.store.records import Parked, ParkedCheckpoint, Tier
from parkd.store.slabs import round_up


@dataclass(frozen=True, slots=True)
class DiskConfig:
    budget_bytes: int
    """All files together, rounded up to pages."""
    fingerprint: bytes
    """16 bytes: of the model that is loaded."""
    index_bytes: int
    """Most memory that what is known of the disk may take; set aside from the memory budget."""
    write_bytes_per_day: int
    max_age_s: float | None = None
    """What was not used for so long is forgotten."""


@dataclass(eq=False)
class DiskEntry:
    """A conversation on disk."""

    parked: Parked
    manifest: Manifest
    manifest_bytes: int
    is_foreign: bool = False
    is_pinned: bool = False
    readers: int = 0
    marked_s: float = float("-inf")
    """The last use that the directory tells of, by the store's clock."""


@dataclass(frozen=True, slots=True)
class DiskStats:
    """A view of the disk tier at one instant."""

    conversations: int
    extents: int
    budget_bytes: int
    bytes_in_use: int
    """Files there are, files being written, files still to be removed."""
    foreign_conversations: int
    """Of other weights or another layer split."""
    index_bytes: int
    waiting_conversations: int
    """To be written."""
    allowance_bytes: int
    """What may still be written of the daily allowance."""
    writes_total: int
    written_bytes_total: int
    write_failures_total: int
    reads_total: int
    read_bytes_total: int
    read_failures_total: int
    evictions_total: int
    not_written_total: int
    """Conversations that were judged not worth a write, or found no room."""


def index_bytes_of(manifest: Manifest) -> int:
    """Memory for what is known of a conversation on disk."""
    records = (len(manifest.blocks) + len(manifest.checkpoints)) * BLOCK_BYTES
    return conversation_metadata_bytes(len(manifest.units), manifest.block_tokens) + records


def index_limit_bytes(tokens: int, block_tokens: int) -> int:
    """The same of a state in a file, before there is one."""
    return conversation_metadata_bytes(tokens, block_tokens) + 2 * BLOCK_BYTES


def file_bytes(size: int) -> int:
    """What a file of that length takes of the disk."""
    return round_up(size, GRAIN_BYTES)


def manifest_limit_bytes(manifest: Manifest) -> int:
    """No less than its file takes."""
    return file_bytes(
        encoded_bytes(
            len(manifest.units), len(manifest.blocks), len(manifest.checkpoints), manifest.stages, len(manifest.extents)
        )
        + len(manifest.id)
        + len(manifest.namespace)
    )


def job_bytes(job: WriteJob) -> int:
    """Bytes charged for a write: its extent, unless that was charged when it was reserved, and its manifest."""
    extent_bytes = 0 if job.extent is None or job.is_adopted else job.extent.taken_bytes
    return extent_bytes + manifest_limit_bytes(job.manifest)


def parked_of(manifest: Manifest, now_s: float, wall_s: float, marked_s: float = float("inf")) -> Parked:
    """The conversation as the matcher sees it. `now_s` and `wall_s` are the same instant by two clocks. `marked_s` is
    the time of the manifest's file. It can only tell of a later use than the manifest does; one that lies in the future
    tells of none, since a clock was wrong then, or a copy set it."""
    shift = now_s - wall_s
    used_s = manifest.last_used_s
    if used_s < marked_s <= wall_s:
        used_s = marked_s
    return Parked(
        id=manifest.id,
        key_digest=manifest.key_digest,
        units=manifest.units,
        prefix_hashes=manifest.prefix_hashes,
        blocks=tuple(block.id for block in manifest.blocks),
        checkpoints=tuple(ParkedCheckpoint(c.position, 0) for c in manifest.checkpoints),
        layout_digest=manifest.layout_digest,
        parked_at_s=manifest.parked_at_s + shift,
        last_used_s=min(now_s, used_s + shift),
        tier=Tier.DISK,
    )


def touched(entry: DiskEntry, now_s: float) -> None:
    entry.parked = replace(entry.parked, last_used_s=now_s)
