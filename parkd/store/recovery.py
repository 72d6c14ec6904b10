"""Opens a directory: keeps the conversations whose files are complete, and removes everything else.

Checks names, sizes and manifests, but not the contents of extents: their checksums are compared when they are read.

    *.tmp                              removed: a write that did not end
    *.manifest that is not valid       removed: torn, or one of its extents is missing or has another length
    *.extent that no manifest names    removed
    whatever exceeds the budgets       removed: expired, then of other weights, then least recently used
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass

from parkd.state import StateLayout
from parkd.store.disk import DiskTier
from parkd.store.disk_jobs import remove
from parkd.store.disk_policy import DAY_S
from parkd.store.disk_records import DiskConfig, file_bytes, parked_of
from parkd.store.fs import FileSystem
from parkd.store.manifest import (
    EXTENT_SUFFIX,
    MANIFEST_SUFFIX,
    TEMPORARY_SUFFIX,
    DamagedManifest,
    Manifest,
    decode,
)

log = logging.getLogger(__name__)

OUR_NAMES = re.compile(
    rf"[0-9a-f]{{16}}{re.escape(EXTENT_SUFFIX)}|[0-9a-f]{{32}}{re.escape(MANIFEST_SUFFIX)}({re.escape(TEMPORARY_SUFFIX)})?"
)


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


def open_tier(fs: FileSystem, config: DiskConfig, layout: StateLayout, now_s: float, wall_s: float) -> DiskTier:
    """The disk tier over a directory, after removing what exceeds its budgets.

    `now_s` and `wall_s` are the same instant by the store's clock and in seconds since the epoch. Raises OSError if the
    directory cannot be read or synced.
    """
    found = scan(fs)
    times = _times(fs)
    tier = DiskTier(config)
    for name, size in found.garbage:
        tier.charge_found(file_bytes(size))
        tier.condemn((name,), file_bytes(size))
    extents = {ref.id: ref.taken_bytes for manifest, _ in found.manifests for ref in manifest.extents}
    tier.charge_found(sum(extents.values()))
    for manifest, size in found.manifests:
        is_foreign = manifest.fingerprint != config.fingerprint or manifest.layout_digest != layout.digest
        taken = file_bytes(size)
        tier.charge_found(taken)
        marked_s = times.get(manifest.name, float("inf"))
        parked = parked_of(manifest, now_s, wall_s, marked_s)
        entry = tier.add(manifest, parked, taken, is_foreign=is_foreign)
        if marked_s <= wall_s:  # else the next marks correct it
            entry.marked_s = parked.last_used_s
    if config.max_age_s is not None:
        for entry in list(tier.entries.values()):
            if entry.parked.last_used_s < now_s - config.max_age_s:
                tier.forget(entry)
    stuck = 0
    while tier.make_room(0, 0, now_s, set()) or stuck == 0:
        job = tier.next_removal_job()
        if job is None:
            break
        left = remove(fs, job)
        tier.removed(job, left)
        stuck += len(left)
    fs.sync()  # Names that are seen now may not be durable yet, if their sync failed. From here on they are.
    if stuck:
        log.warning("%d files could not be removed; they stay and count in the budget", stuck)
    return tier


def _times(fs: FileSystem) -> dict[str, float]:
    """File times by name; empty if they cannot be read, since they only decide what is removed first."""
    try:
        return fs.times()
    except OSError as error:
        log.warning("the times when conversations were last used cannot be read: %s", error)
        return {}


def written_last_day(tier: DiskTier, now_s: float) -> int:
    """Bytes of present files that were written in the last day. At least this much of the allowance is spent."""
    recent = {
        ref.id: ref.size
        for entry in tier.entries.values()
        if entry.parked.parked_at_s > now_s - DAY_S
        for ref in entry.manifest.extents
    }
    return sum(recent.values())
