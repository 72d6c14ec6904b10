"""A conversation that is moved to disk because someone asked for it."""

from __future__ import annotations

import pytest

from parkd.store.records import ConversationGone, RefusalReason, name_of
from tests.fault.fault_fs import FaultFs
from tests.fault.tier_kit import on_disk, pump, rows_of, started
from tests.unit.store.store_kit import assert_same_rows, make_layout, make_store, make_units


def test_it_is_written_whatever_it_is_worth_and_then_leaves_ram() -> None:
    machine, store = started(write_bytes_per_day=1 << 20)
    engine = machine.engine().read(make_units(1, 9))
    store.queue.allowance.spend(int(store.queue.allowance.left_bytes * 0.9))  # too little for what nobody asks for
    parked, rows = engine.park(store), engine.rows()
    assert pump(store, machine.fs) == []
    assert not on_disk(store)
    assert store.move_to_disk(name_of(parked.id)) is None
    assert store.get(parked.id).tier == "ram", "not before it is written"
    assert pump(store, machine.fs) == []
    assert store.get(parked.id).tier == "disk"
    assert store.stats().conversations == 0
    assert_same_rows(rows_of(store, machine.fs, store.get(parked.id)), rows)
    assert store.get(parked.id).tier == "ram", "it was read for that"
    assert store.move_to_disk(name_of(parked.id)) is None
    assert store.get(parked.id).tier == "disk", "what is on disk already leaves at once"


def test_it_is_refused_with_the_reason_and_then_stays_in_ram() -> None:
    machine, store = started()
    parked = machine.engine().read(make_units(1, 9)).park(store)
    release = store.expect(parked.key_digest, parked.prefix_hashes)
    assert store.move_to_disk(parked.id).reason is RefusalReason.BUSY
    release()
    with pytest.raises(ConversationGone):
        store.move_to_disk("unknown")
    without = make_store(4 << 20, make_layout())
    assert without.move_to_disk("any").reason is RefusalReason.OFF
    machine, store = started(write_bytes_per_day=100)
    parked = machine.engine().read(make_units(1, 9)).park(store)
    assert store.move_to_disk(parked.id).reason is RefusalReason.VALUE
    assert store.get(parked.id).tier == "ram"


def test_a_failed_write_leaves_it_in_ram() -> None:
    machine, store = started(FaultFs())
    parked = machine.engine().read(make_units(1, 9)).park(store)
    assert store.move_to_disk(parked.id) is None
    job = store.next_job()
    store.finished(job, OSError("the device failed"))
    assert store.get(parked.id).tier == "ram"
    assert store.move_to_disk(parked.id).reason is RefusalReason.BUSY
    machine.times.now += 10
    assert store.move_to_disk(parked.id) is None
    assert pump(store, machine.fs) == []
    assert store.get(parked.id).tier == "disk"


def test_of_two_that_continue_what_is_still_on_disk_the_first_keeps_the_name() -> None:
    machine, store = started()
    engine = machine.engine().read(make_units(1, 8))
    first = engine.park(store)
    assert pump(store, machine.fs) == []
    engine.extend(make_units(2, 5))
    second = engine.park(store)
    assert sorted(each.id for each in store.named(first.id)) == sorted([first.id, second.id])
    with store.lease(second.id, 8) as lease:
        engine.restore(lease)
    engine.extend(make_units(3, 5))
    fork = engine.park(store)
    assert (name_of(second.id), name_of(fork.id) != first.id) == (first.id, True)
