"""What the budgets of memory and disk let in, and who goes."""

from __future__ import annotations

import pytest

from parkd.state import Costs
from parkd.store.eviction import rated
from parkd.store.files.disk_jobs import MarkJob, mark
from parkd.store.history import History
from parkd.store.policy import GdsfPolicy, ValuePolicy
from parkd.store.records import ConversationGone, Parked, Refused, Tier
from tests.fault.tier_kit import away, evict, on_disk, parked, promote, pump, rows_of, started
from tests.fault.workload import LAYOUTS
from tests.unit.store.store_kit import (
    KEY,
    assert_same_rows,
    assert_within_budget,
    leased_rows,
    make_layout,
    make_units,
)


def test_a_promotion_reserves_before_it_reads() -> None:
    """Report 29: no room, no read; and nobody goes for nothing."""
    machine, store = started(ram_bytes=140_000)
    there, _ = away(machine, store, 1, 60)
    leases = []
    for seed in range(2, 9):
        other, _ = parked(machine, store, seed, 60)
        if isinstance(other, Parked):
            leases.append(store.lease(other.id, other.position))
    pump(store, machine.fs)
    assert isinstance(store.promote(there.id, 60), Refused)
    assert store.get(there.id).tier is Tier.DISK
    assert_within_budget(store)
    for lease in leases:
        lease.release()
    assert isinstance(promote(store, machine.fs, there), Parked)


def test_what_fits_only_in_part_of_a_block_is_read_up_to_the_block_before() -> None:
    """A checksum covers a whole block; a part of one would not match it."""
    for ram_bytes in range(60_000, 140_000, 700):
        machine, store = started(ram_bytes=ram_bytes)
        machine.ram_bytes = 1 << 20
        full = machine.start()
        there, rows = away(machine, full, 1, 150)
        machine.ram_bytes = ram_bytes
        store = machine.start()
        head = promote(store, machine.fs, store.get(there.id))
        if isinstance(head, Parked):
            assert_same_rows(leased_rows(store, head), [stage[: head.position] for stage in rows])
            assert head.position % 4 == 0 or head.position == 150
        else:
            assert isinstance(head, Refused)
        assert_within_budget(store)


def test_no_tail_is_kept_without_its_head() -> None:
    """Report 53: conversations share files, and a file goes when the last that needs it is gone."""
    machine, store = started()
    engine = machine.engine().read(make_units(1, 16))
    first = engine.park(store)
    pump(store, machine.fs)
    engine.truncate(12)
    engine.extend(make_units(2, 9))
    second, rows = engine.park(store), engine.rows()
    pump(store, machine.fs)
    store.drop(first.id, "a test")
    pump(store, machine.fs)
    evict(store, second)
    assert_same_rows(rows_of(store, machine.fs, store.get(second.id)), rows)
    extent = store.inspect().blocks[second.blocks[0]].extent
    machine.fs.remove(f"{extent:016x}.extent")
    assert on_disk(machine.start()) == {}
    assert machine.fs.names() == []


def test_the_disk_budget_holds_and_the_least_recently_used_goes() -> None:
    machine, store = started(disk_bytes=110_000)
    ids = [parked(machine, store, 1)[0].id]
    pump(store, machine.fs)
    for seed in range(2, 9):
        ids.append(parked(machine, store, seed)[0].id)
        store.touch(ids[0])
        pump(store, machine.fs)
        assert machine.fs.peak_bytes <= 110_000
    there = set(on_disk(store))
    assert ids[0] in there
    assert ids[-1] in there
    assert ids[1] not in there
    assert store.disk_stats().evictions_total > 0


def test_a_smaller_budget_is_enforced_before_anything_is_served() -> None:
    machine, store = started()
    for seed in range(1, 6):
        parked(machine, store, seed)
        pump(store, machine.fs)
    machine.disk_bytes = 70_000
    store = machine.start()
    assert machine.fs.bytes <= 70_000
    assert len(on_disk(store)) >= 1


@pytest.mark.parametrize("changed", ["weights", "stages"])
def test_of_other_weights_or_stages_is_kept_but_goes_first(changed: str) -> None:
    """Report 12."""
    machine, store = started(disk_bytes=100_000)
    old, _ = parked(machine, store, 1)
    pump(store, machine.fs)
    if changed == "weights":
        machine.fingerprint = b"the weights, two"
    else:
        machine.layout = make_layout((128, 256))
    store = machine.start()
    assert store.candidates(KEY, old.prefix_hashes) == []
    assert store.disk_stats().foreign_conversations == 1
    with pytest.raises(ConversationGone):
        store.promote(old.id, 4)
    for seed in range(2, 5):
        new, _ = parked(machine, store, seed)
        pump(store, machine.fs)
        store.touch(new.id)
    assert old.id not in on_disk(store)
    assert store.disk_stats().conversations >= 2


def test_too_old_is_forgotten_in_both_tiers() -> None:
    machine, store = started(max_age_s=3600)
    there, _ = parked(machine, store, 1)
    pump(store, machine.fs)
    machine.times.now += 3500
    fresh, _ = parked(machine, store, 2)
    pump(store, machine.fs)
    machine.times.now += 200
    pump(store, machine.fs)
    assert store.get(there.id) is None
    assert store.get(fresh.id) is not None
    machine.times.now += 4000
    assert on_disk(machine.start()) == {}
    assert machine.fs.names() == []


def test_when_it_was_last_used_outlives_a_restart() -> None:
    machine, store = started(max_age_s=3600)
    kept, _ = parked(machine, store, 1)
    pump(store, machine.fs)
    parked(machine, store, 2)
    pump(store, machine.fs)
    mark(machine.fs, store.next_marks())
    machine.times.now += 3000
    store.touch(kept.id)
    syncs = machine.fs.log.count("sync directory")
    mark(machine.fs, store.next_marks())
    assert store.next_marks() is None, "told once"
    store.touch(kept.id)
    assert store.next_marks() is None, "at most every so often"
    at_stop = store.next_marks(stops=True)
    assert [name for name, _ in at_stop.times] == [on_disk(store)[kept.id].disk.name]
    assert machine.fs.log.count("sync directory") == syncs
    machine.times.now += 1000
    machine.fs.crash(kept=0)
    again = machine.start()
    assert list(on_disk(again)) == [kept.id], "the other was not used for more than an hour"
    machine.times.now += 10_000
    assert on_disk(machine.start()) == {}


def test_the_more_recently_used_stays_when_the_budget_shrinks_over_a_restart() -> None:
    machine, store = started()
    first, _ = (parked(machine, store, seed)[0] for seed in (1, 2))
    pump(store, machine.fs)
    store.touch(first.id)
    mark(machine.fs, store.next_marks(stops=True))
    machine.disk_bytes = store.disk_stats().bytes_in_use - 4096
    assert list(on_disk(machine.start())) == [first.id]


@pytest.mark.parametrize("lie", ["future", "past", "lost", "unreadable"])
def test_a_time_that_lies_does_no_harm(lie: str) -> None:
    machine, store = started(max_age_s=3600)
    old, _ = parked(machine, store, 1)
    pump(store, machine.fs)
    mark(machine.fs, store.next_marks())
    name = on_disk(store)[old.id].disk.name
    used_s = on_disk(store)[old.id].parked.last_used_s
    if lie == "lost":
        machine.fs.marks.clear()
    elif lie == "unreadable":
        machine.fs.times = _unreadable
    else:
        machine.fs.marks[name] = machine.times.wall() + (1e9 if lie == "future" else -1e9)
    again = machine.start()
    assert on_disk(again)[old.id].parked.last_used_s == pytest.approx(used_s, abs=2.0)
    mark(machine.fs, again.next_marks(stops=True) or MarkJob(()))
    if lie == "future":
        assert machine.fs.marks[name] == pytest.approx(used_s + 1.7e9, abs=2.0), "set right"
    machine.times.now += 4000
    assert on_disk(machine.start()) == {}, "nothing is kept for longer because of it"


def _unreadable() -> dict[str, float]:
    raise OSError(5, "made to fail")


def test_when_the_allowance_is_short_only_what_came_back_is_written() -> None:
    """Report 32."""
    machine, store = started(write_bytes_per_day=200_000)
    for seed in range(1, 20):
        parked(machine, store, seed)
        pump(store, machine.fs)
    spent = store.disk_stats().written_bytes_total
    assert 100_000 <= spent <= 130_000, "one-shots were written up to half of the allowance, and no further"
    engine = machine.engine().read(make_units(99, 11))
    engine.park(store)
    engine.extend(make_units(98, 5))
    engine.park(store)
    pump(store, machine.fs)
    assert store.disk_stats().written_bytes_total > spent
    assert store.disk_stats().written_bytes_total <= 200_000


def test_the_index_of_the_disk_is_bounded() -> None:
    machine, store = started(index_bytes=30_000)
    for seed in range(1, 12):
        parked(machine, store, seed, 20)
        pump(store, machine.fs)
        assert store.disk.index_bytes <= 30_000
    assert store.disk_stats().conversations >= 2


def test_pinned_stays_on_disk() -> None:
    machine, store = started(disk_bytes=110_000)
    there, _ = parked(machine, store, 1)
    store.pin(there.id)
    pump(store, machine.fs)
    for seed in range(2, 9):
        parked(machine, store, seed)
        pump(store, machine.fs)
    assert there.id in on_disk(store)


def test_pinned_stays_pinned_when_it_is_read_from_disk() -> None:
    machine, store = started()
    there, _ = away(machine, store, 1)
    store.pin(there.id)
    promote(store, machine.fs, there)
    assert store.stats().pinned == 1
    store.unpin(there.id)
    assert store.stats().pinned == 0


COSTS = Costs(read_s=1e-3, bytes_per_s=8e9, disk_bytes_per_s=1e9)


@pytest.mark.parametrize("policy", [ValuePolicy(), GdsfPolicy()], ids=lambda policy: policy.name)
def test_what_is_on_disk_leaves_memory_first(policy) -> None:
    """Of equals the one goes whose return costs a promotion only."""
    machine, store = started(policy=policy)
    there, _ = parked(machine, store, 1, 40)
    assert pump(store, machine.fs) == []
    waiting, _ = parked(machine, store, 2, 40)
    store.queue.cancel(waiting.id)
    assert [store.table.known(each.id).is_on_disk for each in (there, waiting)] == [True, False]
    scores = {}
    for each in (there, waiting):
        rating = _rated(store, each, policy)
        assert rating.candidate.is_on_disk == (each is there)
        scores[each.id] = rating.score
    assert scores[there.id] < scores[waiting.id]
    store.table.leave_disk(on_disk(store)[there.id])
    assert store.table.known(there.id).ram.rating is None, "what it is worth in memory has changed"
    rating = _rated(store, there, policy)
    assert not rating.candidate.is_on_disk
    assert rating.score > scores[there.id]


@pytest.mark.parametrize("layout", ["rows", "file"])
def test_waiting_for_the_disk_is_no_use_of_a_conversation(layout: str) -> None:
    """It counted as a conversation that began from it, at once: so nobody was expected to come back after longer."""
    machine, store = started(layout=LAYOUTS[layout])
    there, _ = parked(machine, store, 1)
    assert store.has_writes
    assert store.table.known(there.id).ram.history == History()
    pump(store, machine.fs)
    assert store.table.known(there.id).ram.history == History()


def _rated(store, parked, policy):
    conversation = store.table.known(parked.id)
    return rated(store.table, conversation, conversation.ram, policy, COSTS, 1100.0)
