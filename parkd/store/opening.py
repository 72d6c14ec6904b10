"""Opens a store over RAM and disk, so that the composition root needs to know nothing else about the disk tier."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from parkd.state import Grain, StateLayout
from parkd.store.budget import BLOCK_BYTES, CONVERSATION_BYTES, HASH_BYTES, UNIT_BYTES
from parkd.store.disk_policy import WriteAllowance
from parkd.store.disk_records import DiskConfig
from parkd.store.file_store import FileStore
from parkd.store.fs import FileSystem
from parkd.store.manifest import Manifest
from parkd.store.records import ConversationId, StoreConfig
from parkd.store.recovery import open_tier, scan, written_last_day
from parkd.store.tiers import TieredStore
from parkd.store.write_queue import DiskSources
from parkd.types import HASH_BYTES as DIGEST_BYTES

INDEX_SHARE = 8
"""The index of what is on disk takes at most one part in this many of the memory budget."""
INDEX_CONVERSATIONS = 1024
"""Conversations for whose records the index has room, besides their tokens."""
BLOCK_EPOCH_BITS = 32
"""Each opening numbers its blocks from a multiple of this power of two. The multiple is random, and no block on disk
has it."""


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """The operator's settings for the disk."""

    budget_bytes: int
    write_bytes_per_day: int
    max_age_s: float | None = None


def index_bytes_for(store: StoreConfig, disk_bytes: int, layout: StateLayout) -> int:
    """Bytes of memory reserved for the index of what is on disk."""
    tokens = disk_bytes // max(1, layout.row_bytes)
    per_block = HASH_BYTES + BLOCK_BYTES
    full = tokens * UNIT_BYTES + tokens // store.block_tokens * per_block
    full += INDEX_CONVERSATIONS * (CONVERSATION_BYTES + per_block)
    return min(store.budget_bytes // INDEX_SHARE, full)


def open_tiered(
    fs: FileSystem,
    config: StoreConfig,
    options: DiskOptions,
    layout: StateLayout,
    fingerprint: bytes,
    *,
    clock: Callable[[], float],
    wall: Callable[[], float],
    directory: Path | None = None,
    **others: object,
) -> TieredStore:
    """Opens the store over what the directory holds, and removes files of no use.

    `others` are options of ConversationStore. `directory` is the path of `fs`; only states in files need it. Raises
    OSError if the directory cannot be read, and ValueError for a fingerprint of the wrong length.
    """
    if len(fingerprint) != DIGEST_BYTES:
        raise ValueError(f"a fingerprint has {DIGEST_BYTES} bytes, not {len(fingerprint)}")
    now_s, wall_s = clock(), wall()
    disk_config = DiskConfig(
        options.budget_bytes,
        fingerprint,
        index_bytes_for(config, options.budget_bytes, layout),
        options.write_bytes_per_day,
        options.max_age_s,
    )
    disk = open_tier(fs, disk_config, layout, now_s, wall_s)
    allowance = WriteAllowance.full(options.write_bytes_per_day, now_s, written_last_day(disk, now_s))
    seen = {block.id >> BLOCK_EPOCH_BITS for e in disk.entries.values() for block in e.manifest.blocks}
    sources = DiskSources(wall, lambda: secrets.randbits(64), _epoch(seen) << BLOCK_EPOCH_BITS)
    if layout.grain is not Grain.FILE:
        return TieredStore(config, layout, clock, disk=disk, sources=sources, allowance=allowance, **others)
    assert directory is not None, "a state in a file has a path"
    parts = {"disk": disk, "sources": sources, "allowance": allowance}
    return FileStore(config, layout, clock, path_of=directory.joinpath, **parts, **others)


def _epoch(seen: set[int]) -> int:
    while (epoch := secrets.randbits(63 - BLOCK_EPOCH_BITS)) in seen:
        pass
    return epoch


def forget(fs: FileSystem, chosen: Callable[[Manifest], bool]) -> tuple[list[ConversationId], list[str]]:
    """Removes the `chosen` conversations, and files that nothing needs then.

    Returns the ids of the removed conversations, and the names of files that could not be removed. Raises OSError if
    the directory cannot be read.
    """
    going = [manifest for manifest, _ in scan(fs).manifests if chosen(manifest)]
    left: list[str] = []
    for manifest in going:
        _remove(fs, manifest.name, left)
    for name, _ in scan(fs).garbage:
        _remove(fs, name, left)
    fs.sync()
    return [manifest.id for manifest in going], left


def _remove(fs: FileSystem, name: str, left: list[str]) -> None:
    try:
        fs.remove(name)
    except OSError:
        left.append(name)
