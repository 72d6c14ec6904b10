"""Opens a store over RAM and disk: keeps the conversations whose files are complete, and removes everything else.

Checks names, sizes and manifests, but not the contents of extents: their checksums are compared when they are read.

    *.tmp                              removed: a write that did not end
    *.manifest that is not valid       removed: torn, or one of its extents is missing or has another length
    *.extent that no manifest names    removed
    whatever exceeds the budgets       removed: expired, then of other weights, then least recently used
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from parkd.state import OtherState, Recut, StateLayout, recut_between
from parkd.store.budget import BLOCK_BYTES, CONVERSATION_BYTES, HASH_BYTES, UNIT_BYTES
from parkd.store.conversations import Conversations
from parkd.store.disk import DiskSetup, file_bytes
from parkd.store.disk_policy import DAY_S, WriteAllowance
from parkd.store.files.disk_jobs import remove
from parkd.store.files.fs import FileSystem
from parkd.store.files.manifest import (
    EXTENT_SUFFIX,
    MANIFEST_SUFFIX,
    TEMPORARY_SUFFIX,
    DamagedManifest,
    Manifest,
    decode,
)
from parkd.store.layouts import described_layouts, keep_layouts
from parkd.store.policy import Policy
from parkd.store.records import BlockId, ConversationId, DiskConfig, Parked, ParkedCheckpoint, StoreConfig, Tier
from parkd.store.slabs import SlabHooks
from parkd.store.store import ConversationStore
from parkd.types import HASH_BYTES as DIGEST_BYTES

log = logging.getLogger(__name__)

OUR_NAMES = re.compile(
    rf"[0-9a-f]{{16}}{re.escape(EXTENT_SUFFIX)}|[0-9a-f]{{32}}{re.escape(MANIFEST_SUFFIX)}({re.escape(TEMPORARY_SUFFIX)})?"
)
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
    new_id: Callable[[], ConversationId] | None = None,
    policy: Policy | None = None,
    slab_hooks: SlabHooks | None = None,
    free_memory: Callable[[], int] | None = None,
) -> ConversationStore:
    """Opens the store over what the directory holds, and removes files of no use.

    `directory` is the path of `fs`; only states in files need it. The rest is as for ConversationStore. Raises OSError
    if the directory cannot be read, and ValueError for a fingerprint of the wrong length.
    """
    if len(fingerprint) != DIGEST_BYTES:
        raise ValueError(f"a fingerprint has {DIGEST_BYTES} bytes, not {len(fingerprint)}")
    found = scan(fs)
    index_bytes = index_bytes_for(config, options.budget_bytes, layout)
    written = written_last_day(found, wall())
    first_block = new_block_epoch(block.id for manifest, _ in found.manifests for block in manifest.blocks)
    setup = DiskSetup(
        DiskConfig(options.budget_bytes, fingerprint, index_bytes, options.write_bytes_per_day, options.max_age_s),
        WriteAllowance.full(options.write_bytes_per_day, clock(), written),
        wall,
        lambda: secrets.randbits(64),
        first_block,
        (directory or Path()).joinpath,
    )
    store = ConversationStore(
        config,
        layout,
        clock,
        disk=setup,
        new_id=new_id,
        policy=policy,
        slab_hooks=slab_hooks,
        free_memory=free_memory,
    )
    recover(store.table, fs, found, _recuts(fs, layout))
    if directory is not None:  # files that end with the process need no description
        keep_layouts(fs, layout, {manifest.layout_digest for manifest, _ in found.manifests})
    return store


@dataclass(frozen=True)
class Found:
    """The files in a directory."""

    manifests: tuple[tuple[Manifest, int], ...]
    """Valid manifests, each with the size of its file in bytes."""
    garbage: tuple[tuple[str, int], ...]
    """Names and sizes of parkd's files that are of no use, manifests first."""


def scan(fs: FileSystem) -> Found:
    """Reads every manifest; one that cannot be read is garbage. Raises OSError if the directory cannot be read."""
    sizes = {name: size for name, size in fs.sizes().items() if OUR_NAMES.fullmatch(name)}
    found: list[tuple[Manifest, int]] = []
    garbage = [name for name in sizes if name.endswith(TEMPORARY_SUFFIX)]
    for name, size in sizes.items():
        if not name.endswith(MANIFEST_SUFFIX):
            continue
        try:
            manifest = decode(fs.load(name))
            _check(manifest, name, sizes)
        except (OSError, DamagedManifest) as error:
            log.warning("%s is discarded: %s", name, error)
            garbage.append(name)
        else:
            found.append((manifest, size))
    named = {ref.name for manifest, _ in found for ref in manifest.extents}
    garbage += [name for name in sizes if name.endswith(EXTENT_SUFFIX) and name not in named]
    return Found(tuple(found), tuple((name, sizes[name]) for name in garbage))


def _check(manifest: Manifest, name: str, sizes: Mapping[str, int]) -> None:
    """Raises DamagedManifest unless the manifest belongs to this name and its extents have the right sizes."""
    if manifest.name != name:
        raise DamagedManifest("it belongs to another name")
    for ref in manifest.extents:
        if sizes.get(ref.name) != ref.size:
            raise DamagedManifest(f"{ref.name} is missing, or not as long as it was")


def _recuts(fs: FileSystem, layout: StateLayout) -> Mapping[bytes, Recut]:
    """By the digest of each other layout that a directory describes: how its parts become those of `layout`, where only
    the layer split differs, or the checksum."""
    found = {}
    for digest, other in described_layouts(fs).items():
        if digest != layout.digest:
            with contextlib.suppress(OtherState):
                found[digest] = recut_between(other, layout)
    return found


def recover(
    table: Conversations, fs: FileSystem, found: Found, recuts: Mapping[bytes, Recut] = MappingProxyType({})
) -> None:
    """Enters what a directory holds into the table, after removing what exceeds the budgets. Raises OSError if the
    directory cannot be synced.

    What has one of the layouts in `recuts`, by digest, is read as one of the table's.
    """
    disk, now_s = table.disk, table.clock()
    config, wall_s = disk.config, disk.setup.wall()
    times = _times(fs)
    for name, size in found.garbage:
        disk.charge_found(file_bytes(size))
        disk.condemn(name, file_bytes(size))
    extents = {ref.id: ref.taken_bytes for manifest, _ in found.manifests for ref in manifest.extents}
    disk.charge_found(sum(extents.values()))
    used = last_uses({m.name: (m.last_used_s, times.get(m.name, math.inf)) for m, _ in found.manifests}, wall_s)
    for manifest, size in found.manifests:
        recut = recuts.get(manifest.layout_digest) if manifest.block_tokens == table.kind.block_tokens else None
        is_known = manifest.layout_digest == table.kind.layout.digest or recut is not None
        is_foreign = manifest.fingerprint != config.fingerprint or not is_known
        taken = file_bytes(size)
        disk.charge_found(taken)
        parked = parked_of(manifest, now_s, wall_s, used[manifest.name])
        place = table.found_on_disk(manifest, taken, parked, is_foreign=is_foreign, recut=None if is_foreign else recut)
        if times.get(manifest.name, math.inf) <= wall_s:  # else the next marks correct it
            place.marked_s = parked.last_used_s
    if config.max_age_s is not None:
        for each, _ in table.on_disk():
            if each.parked.last_used_s < now_s - config.max_age_s:
                table.leave_disk(each)
    stuck = 0
    while table.make_disk_room(0, 0, now_s):
        job = disk.next_removal_job()
        if job is None:
            break
        left = remove(fs, job)
        disk.removed(job, left)
        stuck += len(left)
    fs.sync()  # Names that are seen now may not be durable yet, if their sync failed. From here on they are.
    if stuck:
        log.warning("%d files could not be removed; they stay and count in the budget", stuck)


def last_uses(times: Mapping[str, tuple[float, float]], wall_s: float) -> Mapping[str, float]:
    """When each conversation was last used, from the time in its manifest and that of the manifest's file, which is
    marked later on. `wall_s` is now, by the same clock.

    A time in the future comes from a clock that was wrong then or is now, or from copying the file. Where one of the
    two is in the past, that counts. Of conversations that have neither, the one used last is taken to be used now, and
    the others as long before as their times say.
    """
    ahead = {
        name: written_s if math.isinf(marked_s) else marked_s  # a mark is later, and may be of a clock put right
        for name, (written_s, marked_s) in times.items()
        if min(written_s, marked_s) > wall_s
    }
    latest_s = max(ahead.values(), default=wall_s)
    return {
        name: wall_s - (latest_s - ahead[name])
        if name in ahead
        else max(each for each in (written_s, marked_s) if each <= wall_s)
        for name, (written_s, marked_s) in times.items()
    }


def parked_of(manifest: Manifest, now_s: float, wall_s: float, used_s: float) -> Parked:
    """The conversation as the matcher sees it, last used at `used_s`. `now_s` and `wall_s` are the same instant by two
    clocks; `used_s` is by the second."""
    shift = now_s - wall_s
    return Parked(
        id=manifest.id,
        key_digest=manifest.key_digest,
        units=manifest.units,
        prefix_hashes=manifest.prefix_hashes,
        blocks=tuple(block.id for block in manifest.blocks),
        checkpoints=tuple(ParkedCheckpoint(c.position, 0) for c in manifest.checkpoints),
        layout_digest=manifest.layout_digest,
        parked_at_s=min(now_s, manifest.parked_at_s + shift),
        last_used_s=min(now_s, used_s + shift),
        tier=Tier.DISK,
        namespace=manifest.namespace,
    )


def _times(fs: FileSystem) -> dict[str, float]:
    """File times by name; empty if they cannot be read, since they only decide what is removed first."""
    try:
        return fs.times()
    except OSError as error:
        log.warning("the times when conversations were last used cannot be read: %s", error)
        return {}


def written_last_day(found: Found, wall_s: float) -> int:
    """Bytes of present files that were written in the last day. At least this much of the allowance is spent. What a
    wrong clock says was written in the future is not: it would be spent until then."""
    recent = {
        ref.id: ref.size
        for manifest, _ in found.manifests
        if wall_s - DAY_S < manifest.parked_at_s <= wall_s
        for ref in manifest.extents
    }
    return sum(recent.values())


def new_block_epoch(ids: Iterable[BlockId]) -> BlockId:
    """The first of block ids that a directory has never seen, where `ids` are those of its blocks."""
    seen = {block_id >> BLOCK_EPOCH_BITS for block_id in ids}
    while (epoch := secrets.randbits(63 - BLOCK_EPOCH_BITS)) in seen:
        pass
    return epoch << BLOCK_EPOCH_BITS


def forget(fs: FileSystem, chosen: Callable[[Manifest], bool]) -> tuple[list[Manifest], list[str]]:
    """Removes the `chosen` conversations, and files that nothing needs then.

    Returns the removed conversations, and the names of files that could not be removed. Raises OSError if
    the directory cannot be read.
    """
    going = [manifest for manifest, _ in scan(fs).manifests if chosen(manifest)]
    left: list[str] = []
    for manifest in going:
        _remove(fs, manifest.name, left)
    for name, _ in scan(fs).garbage:
        _remove(fs, name, left)
    fs.sync()
    return going, left


def _remove(fs: FileSystem, name: str, left: list[str]) -> None:
    try:
        fs.remove(name)
    except OSError:
        left.append(name)
