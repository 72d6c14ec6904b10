"""A conversation that is moved to disk because someone asked for it."""

from __future__ import annotations

import pytest

from parkd.store.files.disk_jobs import write
from parkd.store.records import ConversationGone, RefusalReason, name_of
from tests.fault.fault_fs import FaultFs
from tests.fault.tier_kit import evict, on_disk, promote, pump, rows_of, started
from tests.unit.store.store_kit import KEY, assert_same_rows, make_hashes, make_layout, make_store, make_units


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


def test_all_rows_of_the_name_move_and_no_others() -> None:
    machine, store = started()
    engine = machine.engine().read(make_units(1, 8))
    first = engine.park(store)
    engine.extend(make_units(2, 5))
    assert pump(store, machine.fs) == []
    second = engine.park(store)
    other = machine.engine(2).read(make_units(7, 9)).park(store)
    name = name_of(second.id)
    assert {each.id for each in store.named(name)} == {first.id, second.id}
    assert [each.id for each in store.named(other.id)] == [other.id]
    assert store.move_to_disk(name) is None
    assert pump(store, machine.fs) == []
    assert {each.id: each.tier.value for each in store.named(name)} == {second.id: "disk"}
    assert store.get(other.id).tier == "ram"


def test_a_row_on_disk_alone_does_not_hide_that_another_is_refused() -> None:
    machine, store = started(write_bytes_per_day=6_000)
    engine = machine.engine().read(make_units(1, 8))
    first = engine.park(store)
    assert pump(store, machine.fs) == []
    evict(store, first)
    engine.extend(make_units(2, 40))
    second = engine.park(store)
    assert store.get(first.id).tier == "disk"
    assert store.move_to_disk(name_of(second.id)).reason is RefusalReason.VALUE
    assert store.get(second.id).tier == "ram"


def test_one_refusal_of_several_is_told_whichever_row_it_is_of() -> None:
    machine, store = started()
    engine = machine.engine().read(make_units(1, 8))
    first = engine.park(store)
    assert pump(store, machine.fs) == []
    engine.extend(make_units(2, 8))
    second = engine.park(store)
    assert pump(store, machine.fs) == []
    evict(store, first) if store.get(first.id) is not None else None
    engine.extend(make_units(3, 8))
    third = engine.park(store)
    rows = {each.id for each in store.named(name_of(third.id))}
    assert {second.id, third.id} <= rows
    release = store.expect(third.key_digest, third.prefix_hashes)  # held: the longest
    assert store.move_to_disk(name_of(third.id)).reason is RefusalReason.BUSY
    release()


@pytest.mark.parametrize("less", [0, 1])
def test_it_is_refused_if_it_is_larger_than_what_may_be_written_or_than_the_disk(less: int) -> None:
    """Exactly as large fits."""
    size = 12 * (256 + 128)  # three blocks of both stages
    bounds = {"write_bytes_per_day": RefusalReason.VALUE, "disk_bytes": RefusalReason.BUDGET}
    for name, reason in bounds.items():
        machine, store = started(**{name: size - less})
        parked = machine.engine().read(make_units(1, 9)).park(store)
        store.queue.cancel(parked.id)
        refused = store.move_to_disk(parked.id)
        assert (refused and refused.reason) == (reason if less else None)


def test_one_that_waits_or_is_written_is_not_queued_again() -> None:
    machine, store = started()
    others = [machine.engine(seed).read(make_units(seed, 9)).park(store) for seed in (1, 2)]
    asked = machine.engine(3).read(make_units(3, 9)).park(store)
    left = store.queue.allowance.left_bytes
    for _ in range(2):
        assert store.move_to_disk(asked.id) is None
    jobs = []
    while (job := store.next_job()) is not None:
        jobs.append(job.manifest.id)
        assert store.move_to_disk(job.manifest.id) is None, "while it is written"
        assert len(store.queue.waiting) == 3 - len(jobs), "what is written does not wait once more"
        write(machine.fs, job)
        store.finished(job, None)
    assert jobs == [*(each.id for each in others), asked.id]
    assert store.queue.allowance.left_bytes < left
    assert {each.id: each.tier.value for each in map(store.get, jobs)} == dict.fromkeys(jobs, "disk")
    assert store.stats().bytes_in_use == 0


def test_one_is_queued_while_another_is_written() -> None:
    machine, store = started()
    first, second = (machine.engine(seed).read(make_units(seed, 9)).park(store) for seed in (1, 2))
    store.queue.cancel(second.id)
    job = store.next_job()
    assert job.manifest.id == first.id
    assert store.move_to_disk(second.id) is None
    assert store.queue.waiting == (second.id,)
    write(machine.fs, job)
    store.finished(job, None)
    assert pump(store, machine.fs) == []
    assert (store.get(first.id).tier, store.get(second.id).tier) == ("ram", "disk")


def test_what_is_awaited_when_its_write_ends_stays_in_ram() -> None:
    machine, store = started()
    parked = machine.engine().read(make_units(1, 9)).park(store)
    assert store.move_to_disk(parked.id) is None
    release = store.expect(parked.key_digest, parked.prefix_hashes)
    assert pump(store, machine.fs) == []
    assert (store.get(parked.id).tier, list(on_disk(store))) == ("ram", [parked.id])
    release()


def test_what_is_dropped_while_it_is_written_does_not_leave_ram_twice() -> None:
    machine, store = started()
    parked = machine.engine().read(make_units(1, 9)).park(store)
    assert store.move_to_disk(parked.id) is None
    job = store.next_job()
    store.drop(parked.id, "a test")
    write(machine.fs, job)
    store.finished(job, None)
    assert store.get(parked.id) is None


def test_a_name_lives_until_its_last_row_is_gone() -> None:
    machine, store = started()
    engine = machine.engine().read(make_units(1, 8))
    first = engine.park(store)
    assert pump(store, machine.fs) == []
    engine.extend(make_units(2, 5))
    second = engine.park(store)
    units, hashes = engine.units, make_hashes(engine.units, 4)
    assert store.continued(KEY, units, hashes) == name_of(first.id)
    store.drop(second.id, "a test")
    assert [each.id for each in store.named(first.id)] == [first.id]
    assert store.continued(KEY, units, hashes) == name_of(first.id)
    promote(store, machine.fs, store.get(first.id))
    evict(store, first)
    assert store.continued(KEY, units, hashes) == name_of(first.id)
    store.drop(first.id, "a test")
    assert store.continued(KEY, units, hashes) is None


def test_the_longest_row_is_refused_although_a_shorter_one_goes() -> None:
    machine, store = started(write_bytes_per_day=12 * 384)
    engine = machine.engine().read(make_units(1, 8))
    first = engine.park(store)
    release = store.keep(first.id)
    engine.extend(make_units(2, 40))
    second = engine.park(store)
    assert {each.id for each in store.named(name_of(second.id))} == {first.id, second.id}
    assert store.move_to_disk(name_of(second.id)).reason is RefusalReason.VALUE
    assert pump(store, machine.fs) == []
    assert (store.get(first.id).tier, store.get(second.id).tier) == ("disk", "ram")
    release()


def test_one_that_is_superseded_while_it_is_written_has_left_ram_already() -> None:
    machine, store = started()
    engine = machine.engine().read(make_units(1, 9))
    first = engine.park(store)
    assert store.move_to_disk(first.id) is None
    job = store.next_job()
    engine.extend(make_units(2, 5))
    second = engine.park(store)
    assert store.get(first.id) is None
    write(machine.fs, job)
    store.finished(job, None)
    assert store.get(first.id).tier == "disk", "it is written nevertheless"
    assert store.get(second.id).tier == "ram"
