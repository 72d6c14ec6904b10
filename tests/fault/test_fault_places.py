"""A conversation's places in RAM and on disk: what the one means for the other, and what each is worth."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest

from parkd.state import Grain
from parkd.store.admission import Admission, Decision
from parkd.store.files.disk_jobs import DamagedPart, read
from parkd.store.flights import GivenUp, Promotion
from parkd.store.policy import LruPolicy, Policy, ValuePolicy
from parkd.store.records import ConversationGone, Parked, RefusalReason, Refused, Tier
from tests.fault.fault_fs import Fault
from tests.fault.tier_kit import Machine, away, evict, on_disk, parked, promote, pump, rows_of, started
from tests.fault.whole_kit import whole_layout
from tests.fault.workload import FIXED, LAYOUTS
from tests.unit.store.store_kit import KEY, assert_counts, assert_same_rows, leased_rows, make_store, make_units


class Still:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def clock(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now + 1.7e9


def both(machine, store, seed: int, tokens: int = 11) -> Parked:
    """A conversation in RAM and on disk."""
    there, _ = parked(machine, store, seed, tokens)
    assert pump(store, machine.fs) == []
    return there


def test_leaving_memory_is_no_loss_for_what_is_on_disk() -> None:
    machine, store = started()
    there = both(machine, store, 1)
    evict(store, there)
    assert store.why_gone(KEY, there.prefix_hashes) == ""
    head = promote(store, machine.fs, store.get(both(machine, store, 2, 60).id))
    assert isinstance(head, Refused)
    assert head.reason is RefusalReason.BUSY, "it is in memory"
    lost, _ = parked(machine, store, 3)
    store.queue.cancel(lost.id)
    evict(store, lost)
    assert "evicted" in store.why_gone(KEY, lost.prefix_hashes)


def test_the_head_of_what_is_on_disk_is_no_loss_either() -> None:
    machine, store = started()
    long, _ = away(machine, store, 1, 60)
    head = promote(store, machine.fs, long, 9)
    assert head.id != long.id
    evict(store, head)
    assert store.get(head.id) is None
    assert store.why_gone(KEY, head.prefix_hashes) == ""


@pytest.mark.parametrize("layout", ["rows", "fixed state", "whole", "whole with checkpoints"])
def test_what_leaves_the_disk_stays_in_memory(layout: str) -> None:
    machine, store = started(layout=LAYOUTS[layout])
    there, rows = parked(machine, store, 1)
    assert pump(store, machine.fs) == []
    store.table.leave_disk(on_disk(store)[there.id])
    assert_counts(store)
    assert on_disk(store) == {}
    assert_same_rows(rows_of(store, machine.fs, store.get(there.id)), rows)


def test_what_is_on_disk_only_can_be_used_without_memory() -> None:
    """A touch of it decides what is removed from the disk first."""
    machine, store = started()
    old, _ = away(machine, store, 1)
    young, _ = away(machine, store, 2)
    store.touch(old.id)
    assert store.get(old.id).last_used_s > store.get(young.id).last_used_s
    machine.disk_bytes = store.disk_stats().bytes_in_use
    store.table.make_disk_room(machine.disk_bytes, 0, machine.times.clock())
    assert on_disk(store) != {}


def test_damage_costs_only_those_that_need_the_file() -> None:
    machine, store = started()
    hurt, _ = away(machine, store, 1)
    also_there = both(machine, store, 2)
    well, rows = away(machine, store, 3)
    machine.fs.flip(on_disk(store)[hurt.id].disk.extents[0].name, 5)
    assert promote(store, machine.fs, hurt) is None
    assert set(on_disk(store)) == {also_there.id, well.id}, "at once: other bytes will not come back"
    assert "could not be read" in store.why_gone(KEY, hurt.prefix_hashes)
    assert_same_rows(rows_of(store, machine.fs, store.get(well.id)), rows)
    assert store.disk_stats().read_failures_total == 1


def test_damage_is_no_loss_for_what_is_in_memory() -> None:
    """Two conversations need one file; the one in memory is still there."""
    machine, store = started()
    engine = machine.engine().read(make_units(1, 8))
    first = engine.park(store)
    assert pump(store, machine.fs) == []
    engine.truncate(4)
    engine.extend(make_units(2, 7))
    branch, rows = engine.park(store), engine.rows()
    assert pump(store, machine.fs) == []
    evict(store, first)
    [promotion] = [store.promote(first.id, 8)]
    extent = on_disk(store)[first.id].disk.extents[0].id
    assert store.promoted(promotion, DamagedPart(extent, "made up")) is None
    assert on_disk(store) == {}
    assert "could not be read" in store.why_gone(KEY, first.prefix_hashes)
    assert len(store.table.gone) == 1, "the branch is not gone"
    assert_same_rows(leased_rows(store, store.get(branch.id)), rows)
    assert_counts(store)


def test_what_was_dropped_while_it_was_read_is_no_failed_read() -> None:
    machine, store = started()
    there, _ = away(machine, store, 1)
    promotion = store.promote(there.id, 11)
    read(machine.fs, promotion.job)
    store.drop(there.id, "a test")
    assert store.promoted(promotion, None) is None
    assert store.disk_stats().read_failures_total == 0
    assert store.disk_stats().reads_total == 0
    assert_counts(store)
    assert pump(store, machine.fs) == []
    assert machine.fs.names() == []


def test_what_is_in_memory_alone_is_not_read_from_disk() -> None:
    machine, store = started()
    there, _ = parked(machine, store, 1)
    with pytest.raises(ConversationGone):
        store.promote(there.id, 11)


def test_with_parking_off_nothing_is_read() -> None:
    machine, store = started()
    there, _ = away(machine, store, 1)
    machine.ram_bytes = 0
    refused = machine.start().promote(there.id, 11)
    assert isinstance(refused, Refused)
    assert refused.reason is RefusalReason.OFF


@pytest.mark.parametrize("layout", ["fixed state", "whole with checkpoints"])
def test_a_failed_read_gives_back_what_it_took_and_no_more(layout: str) -> None:
    """Checkpoints that were read again are held once, as are those that were in memory for another conversation."""
    machine, store = started(layout=LAYOUTS[layout])
    engine = machine.engine().read(make_units(1, 8), checkpoint=True)
    engine.extend(make_units(2, 5), checkpoint=True)
    first = engine.park(store)
    assert pump(store, machine.fs) == []
    evict(store, first)
    machine.fs.fault = Fault(machine.fs.operations + 1)
    assert promote(store, machine.fs, first) is None
    assert_counts(store)
    loaded = promote(store, machine.fs, store.get(first.id))
    assert isinstance(loaded, Parked)
    assert [c.position for c in loaded.checkpoints] == [8, 13]
    assert_counts(store)
    evict(store, loaded)
    assert_counts(store)
    assert not any(c.is_in_ram for c in store.inspect().checkpoints.values())


def test_after_a_read_its_files_may_go_again() -> None:
    machine, store = started(disk_bytes=110_000)
    there, _ = away(machine, store, 1)
    assert isinstance(promote(store, machine.fs, there), Parked)
    for seed in range(2, 9):
        parked(machine, store, seed)
        assert pump(store, machine.fs) == []
    assert there.id not in on_disk(store)


def test_a_restore_of_rows_keeps_no_file() -> None:
    """It reads memory: the place on disk may go meanwhile. A state in a file is read from there, and stays."""
    for layout, stays in (("rows", False), ("file", True)):
        machine, store = started(layout=LAYOUTS[layout], disk_bytes=230_000, ram_bytes=4 << 20)
        there = both(machine, store, 1)
        with store.lease(there.id, 11):
            for seed in range(2, 14):
                parked(machine, store, seed)
                assert pump(store, machine.fs) == []
            assert (there.id in on_disk(store)) == stays, layout
        for seed in range(20, 34):
            parked(machine, store, seed)
            assert pump(store, machine.fs) == []
        assert there.id not in on_disk(store)


def test_growth_takes_its_own_ancestors_place_on_disk() -> None:
    """Though others were not used for longer."""
    machine, store = started(disk_bytes=100_000)
    old = both(machine, store, 1)
    engine = machine.engine(2).read(make_units(2, 30))
    first = engine.park(store)
    assert pump(store, machine.fs) == []
    free = machine.disk_bytes - store.disk_stats().bytes_in_use
    assert free < 100_000 // 2
    engine.read(engine.units.copy())
    engine.extend(make_units(3, 2))
    grown = engine.park(store)
    assert pump(store, machine.fs) == []
    assert set(on_disk(store)) == {old.id, grown.id}, "the ancestor went first"
    assert store.disk_stats().evictions_total == 0, "it was superseded"
    assert first.id not in on_disk(store)


def test_what_is_larger_than_the_disk_is_not_written() -> None:
    machine, store = started(disk_bytes=30_000)
    small = both(machine, store, 1, 1)
    parked(machine, store, 2, 200)
    assert pump(store, machine.fs) == []
    assert set(on_disk(store)) == {small.id}, "nothing goes for what will not fit"
    assert store.disk_stats().not_written_total == 1
    assert not store.has_writes


def test_a_store_without_a_disk_has_nothing_to_write() -> None:
    store = make_store(1 << 20)
    Machine().engine().read(make_units(1, 9)).park(store)
    assert store.disk_stats().not_written_total == 0
    assert not store.has_writes
    assert not store.frees_room


def test_room_comes_from_writes_that_go_on_and_from_removals() -> None:
    machine = Machine(times=Still())
    store = machine.start()
    assert (store.has_writes, store.frees_room) == (False, False)
    parked(machine, store, 1)
    assert (store.has_writes, store.frees_room) == (True, True)
    machine.fs.fault = Fault(machine.fs.operations + 1)
    assert len(pump(store, machine.fs, 1)) == 1
    there, _ = parked(machine, store, 2)
    assert pump(store, machine.fs) == []
    assert (store.has_writes, store.frees_room) == (True, False), "writing pauses"
    machine.times.now += 1000
    assert pump(store, machine.fs) == []
    assert (store.has_writes, store.frees_room) == (False, False)
    store.drop(there.id, "a test")
    assert (store.has_writes, store.frees_room) == (False, True), "files are to be removed"
    assert pump(store, machine.fs) == []
    assert not store.frees_room


def test_what_returns_now_is_read_whatever_else_is_worth() -> None:
    """A promotion is for a prompt that is there."""
    machine, store = started(policy=ValuePolicy(), ram_bytes=300_000, slots=1)
    shot, rows = away(machine, store, 1, 40)
    engine = machine.engine(2).read(make_units(2, 20))
    for turn in range(6):
        machine.times.now += 60.0
        engine.extend(make_units(20 + turn, 4))
        chat = engine.park(store)
        assert isinstance(chat, Parked)
        store.queue.cancel(chat.id)  # it is in memory only, so that much is lost with it
    back = promote(store, machine.fs, store.get(shot.id))
    assert isinstance(back, Parked)
    assert_same_rows(leased_rows(store, back), rows)
    assert store.get(chat.id) is None


@pytest.mark.parametrize(
    ("policy", "idle_s", "is_read"),
    [
        (ValuePolicy(), 5.0, True),
        (ValuePolicy(), 36_000.0, False),
        (LruPolicy(), 5.0, False),
    ],
)
def test_what_is_only_expected_is_read_if_it_is_worth_more_than_what_would_go(
    policy: Policy, idle_s: float, is_read: bool
) -> None:
    """One place: an answer that asked for something is more likely to return than one that did not, for a while."""
    machine, store = started(times=Still(), policy=policy, ram_bytes=300_000, slots=1)
    expected, rows = away(machine, store, 1, 40)
    machine.times.now += idle_s
    other = both(machine, store, 2, 40)
    promotion = store.promote(expected.id, 40, is_ahead=True)
    if not is_read:
        assert isinstance(promotion, Refused)
        assert promotion.reason is RefusalReason.VALUE
        assert store.get(other.id).tier is Tier.RAM
        return
    assert isinstance(promotion, Promotion)
    read(machine.fs, promotion.job)
    back = store.promoted(promotion, None)
    assert (back.tier, back.last_used_s) == (Tier.PROMOTED, expected.last_used_s), "nobody has used it"
    assert_same_rows(leased_rows(store, back), rows)
    assert store.get(other.id).tier is Tier.DISK


def test_a_read_that_is_given_up_says_nothing_about_the_files() -> None:
    machine, store = started()
    there, rows = away(machine, store, 1, 40)
    promotion = store.promote(there.id, 40, is_ahead=True)
    assert isinstance(promotion, Promotion)
    assert store.promoted(promotion, GivenUp()) is None
    assert store.disk_stats().read_failures_total == 0
    assert_counts(store)
    assert_same_rows(leased_rows(store, promote(store, machine.fs, store.get(there.id))), rows)


def test_what_is_on_disk_only_does_not_count_as_parked_in_memory() -> None:
    """Memory has room for a beginning: it is parked, though more than that is on disk."""
    machine, store = started(ram_bytes=200_000)
    engine = machine.engine().read(make_units(1, 200))
    long = engine.park(store)
    assert pump(store, machine.fs) == []
    evict(store, long)
    others = [parked(machine, store, seed, 60)[0] for seed in range(2, 6)]
    others = [each for each in others if isinstance(each, Parked)]
    assert pump(store, machine.fs) == []
    leases = [store.lease(each.id, each.position) for each in others if store.get(each.id).tier is not Tier.DISK]
    engine.extend(make_units(9, 8))
    part = engine.park(store)
    assert isinstance(part, Parked)
    assert 4 <= part.position < 200
    for lease in leases:
        lease.release()
    assert_counts(store)


@pytest.mark.parametrize("ram_bytes", range(60_000, 140_000, 4001))
def test_a_state_that_cannot_be_cut_is_read_whole_or_not(ram_bytes: int) -> None:
    for layout in (FIXED, whole_layout(Grain.OPAQUE, 3000)):
        machine, store = started(layout=layout)
        engine = machine.engine().read(make_units(1, 16), checkpoint=True)
        engine.extend(make_units(2, 12), checkpoint=True)
        there = engine.park(store)
        assert pump(store, machine.fs) == []
        machine.ram_bytes = ram_bytes if layout.is_opaque else ram_bytes // 4
        store = machine.start()
        back = promote(store, machine.fs, store.get(there.id))
        if isinstance(back, Parked):
            assert back.position == 28
            assert [c.position for c in back.checkpoints] == [16, 28]
        else:
            assert isinstance(back, Refused)
            assert back.reason is RefusalReason.BUDGET


def test_a_file_must_be_as_long_as_was_reserved_at_most() -> None:
    machine, store = started(layout=whole_layout(Grain.FILE))
    engine = machine.engine().read(make_units(1, 11), checkpoint=True)
    capture = store.begin_capture(engine.request())
    sums = engine.capture(capture.transfer)
    reserved = capture.transfer.stages[0].rows[0].file.bytes
    for wrong in (0, -1, reserved + 1):
        with pytest.raises(ValueError, match="reserved"):
            store.commit(capture, type(sums)(sums.rows, sums.fixed, wrong))
    assert isinstance(store.commit(capture, type(sums)(sums.rows, sums.fixed, reserved)), Parked)


def test_a_state_in_a_file_is_written_while_the_allowance_lasts() -> None:
    """Once half of it is spent, only for what came back; in a pause after a failure for nobody."""
    machine, store = started(layout=whole_layout(Grain.FILE), write_bytes_per_day=400_000)
    outcomes = [parked(machine, store, seed)[0] for seed in range(1, 9)]
    refused = [each for each in outcomes if isinstance(each, Refused)]
    assert refused
    assert {each.reason for each in refused} == {RefusalReason.VALUE}
    engine = machine.engine(99)
    known = machine.engine(1).read(make_units(1, 11), checkpoint=True)
    known.extend(make_units(50, 4), checkpoint=True)
    engine.extend(known.units, checkpoint=True)
    assert isinstance(engine.park(store), Parked), "it came back"


def test_no_file_is_begun_in_a_pause() -> None:
    machine, store = started(layout=whole_layout(Grain.FILE))
    parked(machine, store, 1)
    machine.fs.fault = Fault(machine.fs.operations + 1)
    assert len(pump(store, machine.fs, 1)) == 1
    machine.fs.fault = None
    capture = store.begin_capture(machine.engine(2).read(make_units(2, 11), checkpoint=True).request())
    assert isinstance(capture, Refused)
    assert capture.reason is RefusalReason.BUSY


def test_a_pinned_conversation_is_never_too_old() -> None:
    machine, store = started(max_age_s=3600)
    kept, gone = (both(machine, store, seed) for seed in (1, 2))
    store.pin(kept.id)
    machine.times.now += 4000
    pump(store, machine.fs)
    assert set(on_disk(store)) == {kept.id}
    assert store.get(gone.id) is None


def test_age_is_looked_at_once_a_minute() -> None:
    machine = Machine(max_age_s=3600.0, times=Still())
    store = machine.start()
    there = both(machine, store, 1)
    machine.times.now += 3600.0
    assert store.next_job() is None
    assert store.get(there.id) is not None, "it is exactly as old as it may be"
    machine.times.now += 59.0
    assert store.next_job() is None
    assert store.get(there.id) is not None, "it was looked at less than a minute ago"
    machine.times.now += 1.0
    assert store.next_job() is not None
    assert store.get(there.id) is None


def test_blocks_read_in_part_end_with_a_whole_one() -> None:
    """What memory lets in of a promotion is cut to whole blocks, since a checksum covers all of one."""
    machine, store = started()
    long, rows = away(machine, store, 1, 60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Admission, "decide", lambda *_, **__: Decision(22, None))
        head = promote(store, machine.fs, long)
    assert (head.position, len(head.blocks)) == (20, 5)
    assert_same_rows(leased_rows(store, head), [stage[:20] for stage in rows])


def test_what_is_pinned_stays_on_disk_though_room_is_needed_there() -> None:
    machine, store = started(disk_bytes=110_000)
    kept, _ = away(machine, store, 1)
    store.pin(kept.id)
    other, _ = away(machine, store, 2)
    for seed in range(3, 10):
        parked(machine, store, seed)
        assert pump(store, machine.fs) == []
    assert kept.id in on_disk(store)
    assert other.id not in on_disk(store)


def test_what_is_of_other_weights_is_neither_found_nor_read_and_can_be_dropped() -> None:
    machine, store = started()
    there, _ = away(machine, store, 1)
    machine.fingerprint = b"the weights, two"
    store = machine.start()
    assert store.get(there.id) is not None
    assert store.candidates(KEY, there.prefix_hashes) == []
    with pytest.raises(ConversationGone):
        store.promote(there.id, 11)
    assert store.drop(there.id, "a test")
    assert pump(store, machine.fs) == []
    assert machine.fs.names() == []


def test_what_memory_refuses_is_not_asked_of_the_disk() -> None:
    """Nothing goes there for it, and the reason is memory's."""
    machine, store = started(layout=whole_layout(Grain.FILE), slots=1)
    there = both(machine, store, 1)
    store.pin(there.id)
    store.queue.allowance.spend(machine.write_bytes_per_day)
    refused, _ = parked(machine, store, 2)
    assert isinstance(refused, Refused)
    assert refused.reason is RefusalReason.SLOTS


def test_a_read_that_fails_after_its_files_are_gone_gives_up_nothing_else() -> None:
    machine, store = started()
    there, _ = away(machine, store, 1)
    other, rows = away(machine, store, 2)
    promotion = store.promote(there.id, 11)
    store.drop(there.id, "a test")
    assert store.promoted(promotion, OSError("made up")) is None
    assert pump(store, machine.fs) == []
    assert_same_rows(rows_of(store, machine.fs, store.get(other.id)), rows)


@pytest.mark.parametrize("dropped", [0, 1])
def test_files_that_a_crash_brings_back_keep_blocks_that_are_in_two_extents(dropped: int) -> None:
    """A block has one place: what was written with another needs that extent too, whichever of the two goes first."""
    machine, store = started()
    engine = machine.engine().read(make_units(1, 8))
    first, rows = engine.park(store), engine.rows()
    assert pump(store, machine.fs) == []
    left = {name: bytes(machine.fs.content(name)) for name in machine.fs.names()}
    store.table.leave_disk(on_disk(store)[first.id])
    engine.truncate(7)
    engine.extend(make_units(2, 6))
    second, grown_rows = engine.park(store), engine.rows()
    assert second.blocks[0] == first.blocks[0]
    assert pump(store, machine.fs) == []
    for name, data in left.items():
        file = machine.fs.create(name)
        file.write(0, [np.frombuffer(data, np.uint8)])
        file.close()
    store = machine.start()
    assert set(on_disk(store)) == {first.id, second.id}
    store.drop((first, second)[dropped].id, "a test")
    assert pump(store, machine.fs) == []
    kept, expected = ((second, grown_rows), (first, rows))[dropped]
    assert_same_rows(rows_of(store, machine.fs, store.get(kept.id)), expected)


@pytest.mark.parametrize("layout", ["rows", "fixed state"])
def test_blocks_of_two_directories_with_equal_ids_are_told_apart(layout: str) -> None:
    """Two conversations of each share an extent: what is found under another name there has that name for both."""
    machines = [Machine(layout=LAYOUTS[layout], numbers=count(first)) for first in (1, 1000)]
    expected = {}
    for seed, machine in enumerate(machines):
        store, engine = machine.start(), machine.engine(seed + 1).read(make_units(10 * seed, 12), checkpoint=True)
        for number in (1, 2):
            engine.truncate(12)
            engine.extend(make_units(10 * seed + number, 4), checkpoint=True)
            expected[engine.park(store).id] = engine.rows()
            assert pump(store, machine.fs) == []
    fs = machines[0].fs
    for name in machines[1].fs.names():
        file = fs.create(name)
        file.write(0, [np.frombuffer(bytes(machines[1].fs.content(name)), np.uint8)])
        file.close()
    store = machines[0].start()
    seen = store.inspect()
    assert set(seen.conversations) == set(expected)
    assert len(seen.blocks) == 2 * (3 + 2)
    assert len(seen.checkpoints) == (2 * (1 + 2) if layout == "fixed state" else 0)
    for name, rows in expected.items():
        assert_same_rows(rows_of(store, fs, store.get(name)), rows)
    for name in expected:
        store.drop(name, "a test")
    assert pump(store, fs) == []
    gone = store.inspect()
    assert (dict(gone.blocks), dict(gone.checkpoints), fs.names()) == ({}, {}, [])
