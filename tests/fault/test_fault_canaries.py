"""Takes one safeguard away and expects the checks to notice: a suite that can't fail proves nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
from fault_fs import Crashed, Fault, FaultFs
from store_kit import make_units
from tier_kit import Machine, evict, pump
from workload import Life, Wrong, live, survive

from parkd.store import disk_jobs, manifest, recovery
from parkd.store.disk_jobs import RemoveJob

DISK_BYTES = 140_000


def crash_everywhere(skip: frozenset[str] = frozenset()) -> None:
    """The life of the other tests, stopped at every operation, with nothing kept that was not synced."""
    life = Life(Machine(FaultFs(), ram_bytes=300_000, disk_bytes=DISK_BYTES))
    live(life)
    for nth in range(1, life.machine.fs.operations + 1):
        for kept in (0.0, None):
            life = Life(Machine(FaultFs(nth, skip), ram_bytes=300_000, disk_bytes=DISK_BYTES))
            life.machine.fs.fault = Fault(nth, "crash-before")
            with contextlib.suppress(Crashed):
                live(life)
            survive(life, kept)


def test_with_all_safeguards_nothing_is_wrong() -> None:
    crash_everywhere()


@pytest.mark.parametrize("skipped", ["sync extent", "sync manifest", "sync directory"])
def test_without_one_sync_it_is_noticed(skipped: str) -> None:
    with pytest.raises(Wrong, match="acknowledged"):
        crash_everywhere(frozenset({skipped}))


def damage_everything() -> None:
    """Flips one bit in every page of every extent, one conversation after another."""
    life = Life(Machine(FaultFs()))
    life.start()
    for seed in range(1, 4):
        life.engine.read(make_units(seed, 11))
        parked = life.park()
        life.work()
        evict(life.store, parked)
    for name in life.machine.fs.names():
        if name.endswith(".extent"):
            for at in range(0, len(life.machine.fs.content(name)), 4096):
                life.machine.fs.flip(name, at)
    for entry in list(life.store.disk.entries.values()):
        assert not life.read(entry.parked), "damaged bytes were served"


def test_damaged_extents_are_misses() -> None:
    damage_everything()


def test_without_the_parts_checksum_damage_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_jobs, "part_sum", lambda _buffer: 0)
    with pytest.raises(Wrong, match="other bytes"):
        damage_everything()


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
        found = recovery.scan(life.machine.fs).manifests
        if found:
            raise Wrong(f"a manifest with byte {at} changed was taken")


def test_a_damaged_manifest_is_never_taken() -> None:
    damage_manifest()


def test_without_the_manifests_checksum_damage_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    class Equal(int):
        def __eq__(self, other: object) -> bool:
            return True

        def __ne__(self, other: object) -> bool:
            return False

        __hash__ = int.__hash__

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
