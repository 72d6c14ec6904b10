"""Takes one safeguard away and expects the checks to notice: a suite that can't fail proves nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import xxhash

from parkd.store import opening
from parkd.store.files import disk_jobs, manifest
from parkd.store.files.disk_jobs import RemoveJob
from tests.fault.fault_fs import Crashed, Fault, FaultFs
from tests.fault.tier_kit import Machine, evict, on_disk, pump
from tests.fault.workload import LAYOUTS, Life, Wrong, live, survive
from tests.unit.store.store_kit import make_units

DISK_BYTES = 140_000


def crash_everywhere(skip: frozenset[str] = frozenset(), layout: str = "rows") -> None:
    """The life of the other tests, stopped at every operation, with nothing kept that was not synced."""
    kind = LAYOUTS[layout]
    life = Life(Machine(FaultFs(), kind, ram_bytes=300_000, disk_bytes=DISK_BYTES))
    live(life)
    for nth in range(1, life.machine.fs.operations + 1):
        for kept in (0.0, None):
            life = Life(Machine(FaultFs(nth, skip), kind, ram_bytes=300_000, disk_bytes=DISK_BYTES))
            life.machine.fs.fault = Fault(nth, "crash-before")
            with contextlib.suppress(Crashed):
                live(life)
            survive(life, kept)


def test_with_all_safeguards_nothing_is_wrong() -> None:
    crash_everywhere()


@pytest.mark.parametrize("layout", ["rows", "whole", "file"])
@pytest.mark.parametrize("skipped", ["sync extent", "sync manifest", "sync directory"])
def test_without_one_sync_it_is_noticed(skipped: str, layout: str) -> None:
    with pytest.raises(Wrong, match="acknowledged"):
        crash_everywhere(frozenset({skipped}), layout)


class Equal(int):
    """A sum that is the same as any other."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


class BlindSum:
    """In the place of a sum that takes its bytes piece by piece."""

    def update(self, data: object) -> None: ...

    def intdigest(self) -> int:
        return Equal(1)


def damaged_life(layout: str) -> tuple[Life, str]:
    """Three conversations on disk alone, and the name of the first one's extent."""
    life = Life(Machine(FaultFs(), LAYOUTS[layout]))
    life.start()
    for seed in range(1, 4):
        life.engine.read(make_units(seed, 11), checkpoint=True)
        life.engine.extend(make_units(seed, 3))
        parked = life.park()
        life.work()
        evict(life.store, parked)
    [extent] = next(iter(on_disk(life.store).values())).disk.extents
    return life, extent.name


def damage_everything(layout: str) -> None:
    """Flips one bit in each page of an extent, so that every part is damaged in its turn, and nothing else."""
    life, name = damaged_life(layout)
    for at in range(0, len(life.machine.fs.content(name)), 4096):
        life, name = damaged_life(layout)
        life.machine.fs.flip(name, at)
        first, *others = list(on_disk(life.store).values())
        assert not life.read(first.parked), f"bytes were served that are damaged at {at}"
        assert all(life.read(entry.parked) for entry in others)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_damaged_extents_are_misses(layout: str) -> None:
    """Reports 11 and 50."""
    damage_everything(layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_the_parts_checksum_damage_is_served(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_jobs, "part_sum", lambda _name, _buffer: Equal(1))
    monkeypatch.setattr(xxhash, "xxh3_64", BlindSum)
    with pytest.raises(AssertionError, match="other bytes"):
        damage_everything(layout)


def damage_manifest() -> None:
    """Flips each bit of a unit in turn: the conversation must not be found under other units."""
    life = Life(Machine(FaultFs()))
    life.start()
    life.engine.read(make_units(1, 11))
    life.park()
    life.work()
    name = next(name for name in life.machine.fs.names() if name.endswith(".manifest"))
    good = bytes(life.machine.fs.content(name))
    for at in range(0, len(good), 7):
        life.machine.fs.content(name)[:] = good
        life.machine.fs.flip(name, at)
        found = opening.scan(life.machine.fs).manifests
        if found:
            raise Wrong(f"a manifest with byte {at} changed was taken")


def test_a_damaged_manifest_is_never_taken() -> None:
    damage_manifest()


def test_without_the_manifests_checksum_damage_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "checksum", lambda data: Equal(1))
    with pytest.raises(Wrong, match="was taken"):
        damage_manifest()


@pytest.mark.parametrize(
    ("part", "broken"),
    [
        # a write that fails leaves its files where they are, and the store does not know of them
        ("remove", lambda _fs, _job: ()),
    ],
)
def test_without_cleaning_up_files_are_left(
    part: str, broken: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life(Machine(FaultFs()))
    life.start()
    life.engine.read(make_units(1, 11))
    life.park()
    life.machine.fs.fault = Fault(life.machine.fs.operations + 5)  # inside the write of the manifest
    monkeypatch.setattr(disk_jobs, part, broken)
    job = life.store.next_job()
    with pytest.raises(OSError, match="made to fail"):
        disk_jobs.write(life.machine.fs, job)
    assert life.machine.fs.names(), "nothing was left, so nothing was tried"
    monkeypatch.undo()
    life.store.finished(job, OSError())
    pump(life.store, life.machine.fs)
    assert life.machine.fs.names() == [], "what a failed write left is removed by the store"
    assert life.store.disk.bytes_in_use == 0


def test_a_file_that_can_not_be_removed_stays_charged() -> None:
    life = Life(Machine(FaultFs()))
    life.start()
    life.engine.read(make_units(1, 11))
    parked = life.park()
    life.work()
    taken = life.store.disk.bytes_in_use
    life.store.drop(parked.id, "test")
    job = life.store.next_job()
    assert isinstance(job, RemoveJob)
    life.store.finished(job, None, job.names)
    assert life.store.disk.bytes_in_use == taken == life.machine.fs.bytes
