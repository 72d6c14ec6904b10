"""The values of the disk tier, and the bytes that they take.

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
    """Most bytes of all files together, each rounded up to pages."""
    fingerprint: bytes
    """Of the loaded model, 16 bytes."""
    index_bytes: int
    """Most memory of the index of what is on disk; reserved from the memory budget."""
    write_bytes_per_day: int
    max_age_s: float | None = None
    """Conversations not used for this long are forgotten; None: never."""


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
    """The last use that is written down in the directory, by the store's clock."""


@dataclass(frozen=True, slots=True)
class DiskStats:
    """The disk tier at one instant. Names of counters end in `_total`."""

    conversations: int
    extents: int
    budget_bytes: int
    bytes_in_use: int
    """Of all files, including those being written and those to be removed."""
    foreign_conversations: int
    """Conversations of other weights or another layer split."""
    index_bytes: int
    waiting_conversations: int
    """Conversations that wait for their write."""
    allowance_bytes: int
    """What is left of the daily write allowance."""
    writes_total: int
    written_bytes_total: int
    write_failures_total: int
    reads_total: int
    read_bytes_total: int
    read_failures_total: int
    evictions_total: int
    not_written_total: int
    """Conversations that were not worth a write, or for which there was no room."""


def index_bytes_of(manifest: Manifest) -> int:
    """Bytes of memory for the index entry of a conversation on disk."""
    records = (len(manifest.blocks) + len(manifest.checkpoints)) * BLOCK_BYTES
    return conversation_metadata_bytes(len(manifest.units), manifest.block_tokens) + records


def index_limit_bytes(tokens: int, block_tokens: int) -> int:
    """The same for a state in a file, before it is written."""
    return conversation_metadata_bytes(tokens, block_tokens) + 2 * BLOCK_BYTES


def file_bytes(size: int) -> int:
    """Bytes of disk that a file of this size takes."""
    return round_up(size, GRAIN_BYTES)


def manifest_limit_bytes(manifest: Manifest) -> int:
    """Bytes of disk that the manifest's file takes, at most."""
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
    """The conversation as the matcher sees it. `now_s` and `wall_s` are the same instant by two clocks.

    `marked_s` is the time of the manifest's file: it is the last use if it is later than the one in the manifest. A
    time in the future is ignored, since it comes from a wrong clock or from copying the file.
    """
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
    """Notes that a conversation on disk was used now."""
    entry.parked = replace(entry.parked, last_used_s=now_s)
