"""What is written, when, and what is given up: one rule of the write queue each."""

from __future__ import annotations

from collections import Counter

import pytest

from parkd.store.disk_policy import FIRST_PAUSE_S
from parkd.store.files.disk_jobs import RemoveJob, WriteJob
from parkd.store.records import Parked
from parkd.store.store import ConversationStore
from tests.fault.fault_fs import Fault
from tests.fault.test_fault_places import Still, both
from tests.fault.tier_kit import Machine, on_disk, parked, pump, run, started
from tests.fault.whole_kit import ROW_BYTES
from tests.fault.workload import LAYOUTS
from tests.unit.store.store_kit import make_units


def test_a_pause_ends_at_its_time() -> None:
    machine = Machine(times=Still())
    store = machine.start()
    there, _ = parked(machine, store, 1)
    machine.fs.fault = Fault(machine.fs.operations + 1)
    assert len(pump(store, machine.fs, 1)) == 1
    there, _ = parked(machine, store, 2)
    assert pump(store, machine.fs) == []
    assert store.queue.is_paused
    machine.times.now += FIRST_PAUSE_S - 0.5
    assert store.queue.is_paused
    machine.times.now += 0.5
    assert not store.queue.is_paused
    assert pump(store, machine.fs) == []
    assert there.id in on_disk(store)


def test_a_disk_that_works_again_is_written_again() -> None:
    """However often it failed before: once the pause is over."""
    machine = Machine(times=Still())
    store = machine.start()
    for seed in range(3):
        parked(machine, store, seed)
        machine.fs.fault = Fault(machine.fs.operations + 1)
        pump(store, machine.fs)
        machine.times.now += 1000.0
    assert store.disk_stats().write_failures_total == 3
    machine.fs.fault = None
    there, _ = parked(machine, store, 9)
    assert store.has_writes
    assert pump(store, machine.fs) == []
    assert there.id in on_disk(store)


def test_with_a_short_allowance_what_shares_blocks_on_disk_is_written() -> None:
    """It is a branch of what has come back, though it is new itself."""
    machine, store = started(write_bytes_per_day=200_000)
    first = both(machine, store, 1, 40)
    store.queue.allowance.left_bytes = 90_000.0
    other, _ = parked(machine, store, 2, 40)
    engine = machine.engine(3)
    with store.lease(first.id, 4) as lease:
        engine.restore(lease)
    engine.extend(make_units(3, 30))
    branch = engine.park(store)
    assert pump(store, machine.fs) == []
    assert branch.id in on_disk(store)
    assert other.id not in on_disk(store)


def test_half_of_the_memory_may_wait() -> None:
    """And what waits alone may be larger."""
    whole_bytes = -(-11 * ROW_BYTES // 4096) * 4096
    for spare, waits in ((0, True), (-2, False)):
        machine, store = started(layout=LAYOUTS["whole"], ram_bytes=2 * 2 * whole_bytes + spare)
        first, second = (parked(machine, store, seed)[0] for seed in (1, 2))
        assert store.queue.waiting == ((first.id, second.id) if waits else (first.id,))
        assert store.disk_stats().not_written_total == (not waits)
    machine, store = started(layout=LAYOUTS["whole"], ram_bytes=200_000)
    large, _ = parked(machine, store, 1, 48)
    assert store.queue.waiting == (large.id,)


def test_another_that_is_dropped_does_not_stop_a_write() -> None:
    machine, store = started()
    written, waiting = (parked(machine, store, seed)[0] for seed in (1, 2))
    job = store.next_job()
    store.drop(waiting.id, "a test")
    assert run(store, machine.fs, job) is None
    assert set(on_disk(store)) == {written.id}
    assert not store.has_writes


def test_one_that_is_dropped_while_it_is_written_is_forgotten() -> None:
    machine, store = started()
    there, _ = parked(machine, store, 1)
    job = store.next_job()
    store.drop(there.id, "a test")
    assert run(store, machine.fs, job) is None
    assert on_disk(store) == {}
    assert pump(store, machine.fs) == []
    assert machine.fs.names() == []


def test_what_is_superseded_while_it_waits_is_not_written() -> None:
    machine, store = started()
    engine = machine.engine().read(make_units(1, 12))
    engine.park(store)
    engine.extend(make_units(2, 4))
    grown = engine.park(store)
    assert store.queue.waiting == (grown.id,)
    assert pump(store, machine.fs) == []
    assert store.disk_stats().writes_total == 1


def test_nothing_is_written_while_files_are_removed() -> None:
    """Their room may be what the write needs."""
    machine, store = started()
    gone = both(machine, store, 1)
    store.drop(gone.id, "a test")
    parked(machine, store, 2)
    removal = store.next_job()
    assert isinstance(removal, RemoveJob)
    assert store.next_job() is None
    assert run(store, machine.fs, removal) is None
    assert isinstance(store.next_job(), WriteJob)


def test_a_write_ends_before_the_next_begins() -> None:
    machine, store = started()
    for seed in (1, 2):
        parked(machine, store, seed)
    first = store.next_job()
    assert isinstance(first, WriteJob)
    assert store.next_job() is None
    assert run(store, machine.fs, first) is None
    assert isinstance(store.next_job(), WriteJob)


def assert_held(store: ConversationStore) -> None:
    """Between jobs, what is on disk needs an extent, and nothing else does."""
    seen = store.inspect()
    named = Counter(name for each in seen.conversations.values() for name in each.files)
    assert {each.name: each.holders for each in seen.disk.extents.values()} == {
        name: count for name, count in named.items() if name.endswith(".extent")
    }


@pytest.mark.parametrize(("disk_bytes", "is_written"), [(1 << 20, True), (80_000, True), (40_000, False)])
def test_an_extent_that_a_write_reuses_is_let_go_when_it_ends(disk_bytes: int, is_written: bool) -> None:
    """However it ends: written at once, written once another has made room, or without room for it."""
    machine, store = started(disk_bytes=disk_bytes)
    engine = machine.engine().read(make_units(1, 16))
    first = engine.park(store)
    store.pin(first.id)
    assert pump(store, machine.fs) == []
    other, _ = parked(machine, store, 9, 16)
    assert pump(store, machine.fs) == []
    engine.truncate(12)
    engine.extend(make_units(2, 8))
    branch = engine.park(store)
    assert branch.blocks[:3] == first.blocks[:3]
    assert pump(store, machine.fs) == []
    assert {first.id, branch.id} <= set(on_disk(store)) if is_written else set(on_disk(store)) == {first.id}
    assert (other.id in on_disk(store)) == (disk_bytes == 1 << 20)
    assert_held(store)


def test_with_a_short_allowance_what_came_back_is_written_though_nothing_of_it_is_on_disk() -> None:
    machine, store = started(write_bytes_per_day=200_000)
    engine = machine.engine().read(make_units(1, 36))
    store.queue.cancel(engine.park(store).id)
    store.queue.allowance.left_bytes = 90_000.0
    engine.extend(make_units(2, 4))
    grown = engine.park(store)
    assert store.queue.waiting == (grown.id,)
    other, _ = parked(machine, store, 3, 40)
    assert store.queue.waiting == (grown.id,), "it is new"
    assert isinstance(other, Parked)


@pytest.mark.parametrize("missing", [0, 1])
def test_files_and_index_may_take_all_of_their_room(missing: int) -> None:
    machine, store = started()
    there = both(machine, store, 1)
    seen = store.disk_stats()
    for limits in (
        {"disk_bytes": seen.bytes_in_use - missing},
        {"index_bytes": seen.index_bytes - missing},
    ):
        machine, store = started(**limits)
        there, _ = parked(machine, store, 1)
        assert pump(store, machine.fs) == []
        assert (there.id in on_disk(store)) == (not missing), limits


def test_what_two_share_is_freed_when_both_go() -> None:
    machine, store = started()
    engine = machine.engine().read(make_units(1, 16))
    engine.park(store)
    assert pump(store, machine.fs) == []
    engine.truncate(12)
    engine.extend(make_units(2, 8))
    engine.park(store)
    assert pump(store, machine.fs) == []
    places = [each.disk for each in on_disk(store).values()]
    free = machine.disk_bytes - store.disk_stats().bytes_in_use
    manifest_bytes = places[0].manifest_bytes
    assert store.disk.fits_without(places[:1], free + manifest_bytes, 0)
    assert not store.disk.fits_without(places[:1], free + manifest_bytes + 1, 0)
    assert store.disk.fits_without(places, machine.disk_bytes, 0)


def test_what_a_failed_write_may_have_left_is_removed_file_by_file() -> None:
    """Each with the bytes that were charged for it; a write of nothing new has no extent."""
    machine, store = started()
    engine = machine.engine().read(make_units(1, 16))
    engine.park(store)
    job = store.next_job()
    assert isinstance(job, WriteJob)
    machine.fs.fault = Fault(machine.fs.operations + 1)
    assert run(store, machine.fs, job) is not None
    charged = store.inspect().disk
    assert dict(charged.condemned_bytes) == {
        job.extent.name: 4 * 2 * 4096,
        job.temporary_name: 4096,
        job.manifest.name: 0,
    }
    assert sum(charged.condemned_bytes.values()) == charged.file_bytes

    machine, store = started()
    engine = machine.engine().read(make_units(1, 16))
    engine.park(store)
    assert pump(store, machine.fs) == []
    engine.truncate(12)
    engine.park(store)
    job = store.next_job()
    assert isinstance(job, WriteJob)
    assert job.extent is None
    machine.fs.fault = Fault(machine.fs.operations + 1)
    assert run(store, machine.fs, job) is not None
    assert dict(store.inspect().disk.condemned_bytes) == {job.temporary_name: 4096, job.manifest.name: 0}


@pytest.mark.parametrize("layout", ["rows", "fixed state"])
def test_what_is_on_disk_already_does_not_count_as_waiting(layout: str) -> None:
    """Of blocks and of checkpoints alike: two new conversations are more than may wait, three branches are not."""
    machine, store = started(layout=LAYOUTS[layout], ram_bytes=240_000 if layout == "rows" else 300_000)
    engine = machine.engine().read(make_units(1, 160 if layout == "rows" else 4), checkpoint=True)
    while layout != "rows" and engine.position < 60:
        engine.extend(make_units(engine.position, 4), checkpoint=True)
    stranger = machine.engine(2)
    first = engine.park(store)
    for start in range(0, engine.position, 4):
        stranger.extend(make_units(1000 + start, 4), checkpoint=True)
    assert stranger.park(store).position == first.position
    assert store.queue.waiting == (first.id,)
    assert pump(store, machine.fs) == []
    branches = []
    for seed in (3, 4, 5):
        engine.truncate(first.position - 4)
        engine.extend(make_units(seed, 4), checkpoint=True)
        branches.append(engine.park(store).id)
    assert store.queue.waiting == tuple(branches)
    assert pump(store, machine.fs) == []
    assert set(branches) <= set(on_disk(store))
    assert_held(store)


def test_a_beginning_that_is_parked_while_the_whole_is_written_stays() -> None:
    machine, store = started()
    engine = machine.engine().read(make_units(1, 16))
    whole = engine.park(store)
    job = store.next_job()
    engine.truncate(8)
    beginning = engine.park(store)
    assert run(store, machine.fs, job) is None
    assert set(on_disk(store)) == {whole.id}
    assert store.get(beginning.id) is not None
