"""What a directory holds when it is opened: the conversations whose every byte is there, and nothing else.

Names, sizes and manifests are checked, contents of extents are not: their checksums are compared when they are read.

    *.tmp                          removed: a write that never ended
    *.manifest that does not add up    removed: torn, or one of its extents is missing or has another length
    *.extent that no manifest names    removed
    everything over the budgets        removed: too old, then of other weights, then least recently used
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass

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
from parkd.types import StateLayout

log = logging.getLogger(__name__)

OUR_NAMES = re.compile(
    rf"[0-9a-f]{{16}}{re.escape(EXTENT_SUFFIX)}|[0-9a-f]{{32}}{re.escape(MANIFEST_SUFFIX)}({re.escape(TEMPORARY_SUFFIX)})?"
)


@dataclass(frozen=True)
class Found:
    """What the directory held."""

    manifests: tuple[tuple[Manifest, int], ...]
    """Each with its file's bytes."""
    garbage: tuple[tuple[str, int], ...]
    """Ours, and of no use, with their bytes. Manifests first."""


def scan(fs: FileSystem) -> Found:
    """Reads every manifest. Raises OSError if the directory can't be read; a file that can't is garbage."""
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
            log.warning("%s is given up: %s", name, error)
            garbage.append(name)
        else:
            found.append((manifest, size))
    named = {ref.name for manifest, _ in found for ref in manifest.extents}
    garbage += [name for name in sizes if name.endswith(EXTENT_SUFFIX) and name not in named]
    return Found(tuple(found), tuple((name, sizes[name]) for name in garbage))


def _check(manifest: Manifest, name: str, sizes: Mapping[str, int]) -> None:
    """Raises DamagedManifest."""
    if manifest.name != name:
        raise DamagedManifest("it belongs to another name")
    for ref in manifest.extents:
        if sizes.get(ref.name) != ref.size:
            raise DamagedManifest(f"{ref.name} is missing, or not as long as it was")


def open_tier(fs: FileSystem, config: DiskConfig, layout: StateLayout, now_s: float, wall_s: float) -> DiskTier:
    """The tier over what the directory holds, inside its budgets. Raises OSError if the directory can't be read or
    synced.

    `now_s` is the store's clock, `wall_s` the wall's, at one instant.
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
        if marked_s <= wall_s:  # else it is set right with the next marks
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
    fs.sync()  # a name that is seen now may be one whose sync failed: from here on it may be relied on
    if stuck:
        log.warning("%d files could not be removed; they stay and count in the budget", stuck)
    return tier


def _times(fs: FileSystem) -> dict[str, float]:
    """None if they can't be had: they only tell who goes first."""
    try:
        return fs.times()
    except OSError as error:
        log.warning("when conversations were last used is not known: %s", error)
        return {}


def written_last_day(tier: DiskTier, now_s: float) -> int:
    """Bytes of what is there and was written in the last day: at least so much of the allowance is spent."""
    recent = {
        ref.id: ref.size
        for entry in tier.entries.values()
        if entry.parked.parked_at_s > now_s - DAY_S
        for ref in entry.manifest.extents
    }
    return sum(recent.values())
