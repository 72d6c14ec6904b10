"""Writes and reads that fail: nothing half done is visible, and nothing is tried for ever."""

from __future__ import annotations

import errno

import pytest

from parkd.state import Grain
from parkd.store import disk_policy
from parkd.store.records import Parked
from tests.fault.fault_fs import Fault
from tests.fault.tier_kit import Machine, away, evict, on_disk, parked, promote, pump, rows_of, started
from tests.fault.whole_kit import whole_layout
from tests.fault.workload import check_files
from tests.unit.store.store_kit import (
    KEY,
    assert_counts,
    assert_same_rows,
    leased_rows,
    make_units,
)


@pytest.mark.parametrize("nth", range(1, 9))
def test_a_failed_write_is_never_visible(nth: int) -> None:
    """Report 49."""
    machine, store = started()
    there, rows = parked(machine, store, 1)
    machine.fs.fault = Fault(machine.fs.operations + nth)
    assert len(pump(store, machine.fs, 1)) == 1
    machine.fs.fault = None
    assert machine.fs.names() == [], "what was written is removed before anyone is told, also if the process ends then"
    assert on_disk(store) == {}
    assert_same_rows(leased_rows(store, there), rows)
    pump(store, machine.fs)
    assert machine.fs.names() == []
    assert store.disk.bytes_in_use == 0
    evict(store, there)
    assert store.get(there.id) is None
    assert on_disk(machine.start()) == {}


def test_after_a_failure_writes_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, store = started()
    parked(machine, store, 1)
    monkeypatch.setattr(disk_policy, "FIRST_PAUSE_S", 300.0)  # each look at the test's clock takes a second
    machine.fs.fault = Fault(machine.fs.operations + 1, code=errno.ENOSPC, sticky=True)
    pump(store, machine.fs)
    parked(machine, store, 2)
    operations = machine.fs.operations
    assert pump(store, machine.fs) == []
    assert machine.fs.operations == operations
    machine.fs.fault = None
    machine.times.now += 300.0
    pump(store, machine.fs)
    assert store.disk_stats().conversations == 1


def test_a_broken_disk_costs_memory_nothing() -> None:
    """After the second failure in a row nothing is kept waiting: parking in memory goes on as without a disk."""
    machine, store = started(ram_bytes=140_000)
    machine.fs.fault = Fault(machine.fs.operations + 1, sticky=True)
    for seed in range(1, 12):
        there, rows = parked(machine, store, seed, 60)
        assert isinstance(there, Parked), there
        assert_same_rows(leased_rows(store, there), rows)
        pump(store, machine.fs)
    assert store.disk_stats().write_failures_total >= 2
    assert store.stats().evictions_total > 0


def test_files_that_waited_for_a_broken_disk_are_gone_from_memory_too() -> None:
    machine, store = started(layout=whole_layout(Grain.FILE))
    there = [parked(machine, store, seed)[0] for seed in range(3)]
    for _ in range(2):
        machine.times.now += disk_policy.LONGEST_PAUSE_S
        machine.fs.fault = Fault(machine.fs.operations + 1)
        assert len(pump(store, machine.fs)) == 1
    assert [store.get(known.id) for known in there] == [None] * 3, "the last waited, and was given up with the second"
    assert (machine.fs.names(), store.disk.bytes_in_use) == ([], 0)


def test_a_file_that_waits_is_read_as_long_as_it_is() -> None:
    """It was reserved longer."""
    machine, store = started(layout=whole_layout(Grain.FILE))
    there, rows = parked(machine, store, 1)
    read_back = rows_of(store, machine.fs, there)
    assert read_back is not None
    assert_same_rows(read_back, rows)


def test_a_file_that_is_superseded_while_it_waits_goes() -> None:
    machine, store = started(layout=whole_layout(Grain.FILE))
    engine = machine.engine()
    engine.extend(make_units(1, 9), checkpoint=True)
    engine.park(store)
    engine.extend(make_units(2, 3), checkpoint=True)
    grown = engine.park(store)
    pump(store, machine.fs)
    check_files(store, machine.fs, machine.disk_bytes)
    assert list(on_disk(store)) == [grown.id]


def test_a_failed_read_is_a_miss_and_a_second_gives_it_up() -> None:
    """Report 52: no livelock; each look-up tries once, and what fails twice is gone."""
    machine, store = started()
    there, _ = away(machine, store, 1)
    for _ in range(2):
        assert store.candidates(KEY, there.prefix_hashes)
        machine.fs.fault = Fault(machine.fs.operations + 1, sticky=True)
        assert promote(store, machine.fs, there) is None
        machine.fs.fault = None
        assert_counts(store)
    assert store.candidates(KEY, there.prefix_hashes) == []
    assert "could not be read" in store.why_gone(KEY, there.prefix_hashes)
    pump(store, machine.fs)
    assert machine.fs.names() == []


def test_one_failed_read_costs_no_conversation() -> None:
    machine, store = started()
    there, rows = away(machine, store, 1)
    machine.fs.fault = Fault(machine.fs.operations + 2)
    assert promote(store, machine.fs, there) is None
    assert_same_rows(rows_of(store, machine.fs, store.get(there.id)), rows)


def test_what_a_start_finds_is_there_after_a_crash() -> None:
    """A name whose sync failed, and that could not be removed either, is seen by the next process: once that one has
    opened the directory, it may be relied on."""
    machine, store = started()
    there, rows = parked(machine, store, 1)
    syncs = [number for number, step in enumerate(_steps_of_a_write(), 1) if step == "sync directory"]
    machine.fs.fault = Fault(machine.fs.operations + syncs[0], sticky=True)
    assert len(pump(store, machine.fs, 1)) == 1
    machine.fs.fault = None
    assert there.id in on_disk(machine.start())
    machine.fs.crash(kept=0.0)
    after = machine.start()
    assert_same_rows(rows_of(after, machine.fs, after.get(there.id)), rows)


def test_a_directory_that_can_not_be_synced_is_not_opened() -> None:
    machine = Machine()
    machine.fs.fault = Fault(machine.fs.operations + 3)
    with pytest.raises(OSError, match="sync directory"):
        machine.start()


def _steps_of_a_write() -> list[str]:
    machine, store = started()
    parked(machine, store, 1)
    before = len(machine.fs.log)
    pump(store, machine.fs)
    return machine.fs.log[before:]
