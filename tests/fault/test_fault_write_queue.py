"""What is written, when, and what is given up: one rule of the write queue each."""

from __future__ import annotations

from parkd.store.disk_jobs import RemoveJob, WriteJob
from parkd.store.write_queue import FIRST_PAUSE_S
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
