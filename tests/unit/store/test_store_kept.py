"""What a paused turn goes on from: parked whole or not at all, and kept until it goes on."""

from __future__ import annotations

import dataclasses

import pytest

from parkd.store.policy import ValuePolicy
from parkd.store.records import ConversationGone, Parked, RefusalReason, Refused, Tier
from parkd.store.store import ConversationStore
from tests.fault.tier_kit import away, evict, parked, pump, rows_of, started
from tests.unit.store.store_kit import (
    CopyEngine,
    assert_counts,
    assert_same_rows,
    leased_rows,
    make_layout,
    make_store,
    make_units,
)

LAYOUT = make_layout()
FIXED = make_layout(fixed_bytes=(64, 32))
SLOT_BYTES = 4 * (256 + 128)


def pause(engine: CopyEngine, store: ConversationStore, passing: tuple[int, ...] = ()) -> Parked | Refused:
    request = dataclasses.replace(engine.request(), is_indivisible=True, is_returning=True, passing=passing)
    capture = store.begin_capture(request)
    return capture if isinstance(capture, Refused) else engine.finish(store, capture)


def there(answer: Parked | Refused) -> Parked:
    assert isinstance(answer, Parked)
    return answer


def test_what_is_kept_is_not_evicted_until_it_is_released():
    store, engine = make_store(24 * SLOT_BYTES), CopyEngine(LAYOUT)
    first = there(engine.read(make_units(1, 40)).park(store))
    rows, release = engine.rows(), store.keep(first.id)
    for seed in range(2, 6):
        engine.read(make_units(seed, 40)).park(store)
    assert_same_rows(leased_rows(store, first), rows)
    release()
    release()
    engine.read(make_units(7, 40)).park(store)
    engine.read(make_units(8, 40)).park(store)
    assert store.get(first.id) is None
    assert_counts(store)


def test_two_may_keep_the_same():
    store, engine = make_store(24 * SLOT_BYTES), CopyEngine(LAYOUT)
    first = there(engine.read(make_units(1, 40)).park(store))
    one, _other = store.keep(first.id), store.keep(first.id)
    one()
    one()
    for seed in range(2, 6):
        engine.read(make_units(seed, 40)).park(store)
    assert store.get(first.id) is not None


def test_what_is_gone_cannot_be_kept():
    store = make_store(1 << 20)
    with pytest.raises(ConversationGone):
        store.keep("nobody")


def test_what_is_kept_is_not_superseded():
    """The same tokens computed again have other bytes."""
    store, engine = make_store(1 << 20), CopyEngine(LAYOUT)
    first = there(engine.read(make_units(1, 10)).park(store))
    rows, release = engine.rows(), store.keep(first.id)
    again = CopyEngine(LAYOUT, seed=2).read(make_units(1, 10))
    again.extend(make_units(2, 5))
    again.park(store)
    assert_same_rows(leased_rows(store, first), rows)
    release()
    again.extend(make_units(3, 5))
    again.park(store)
    assert store.get(first.id) is None


def test_a_pause_is_whole_or_not_at_all():
    store, engine = make_store(8 * SLOT_BYTES + 4096), CopyEngine(LAYOUT)
    engine.read(make_units(1, 60))
    refused = pause(engine, store)
    assert isinstance(refused, Refused)
    assert refused.reason is RefusalReason.BUDGET
    assert store.stats().bytes_in_use == 0
    partly = there(engine.park(store))
    assert 0 < partly.position < 60


def test_a_pause_needs_a_checkpoint_at_its_end():
    store, engine = make_store(1 << 20, FIXED), CopyEngine(FIXED)
    engine.read(make_units(1, 10), checkpoint=True)
    engine.extend(make_units(2, 5))
    refused = pause(engine, store)
    assert isinstance(refused, Refused)
    assert refused.reason is RefusalReason.NO_CHECKPOINT
    assert there(engine.park(store)).position == 10


def test_a_pause_is_not_refused_for_what_others_are_worth():
    store = make_store(24 * SLOT_BYTES, policy=ValuePolicy(margin=1e9))
    engine = CopyEngine(LAYOUT)
    engine.read(make_units(1, 48)).park(store)
    engine.read(make_units(2, 50))
    refused = engine.park(store)
    assert isinstance(refused, Refused)
    assert refused.reason is RefusalReason.VALUE
    assert there(pause(engine, store)).position == 50


def test_checkpoints_of_pauses_are_not_inherited_and_what_has_only_those_is_superseded():
    store, engine = make_store(1 << 20, FIXED), CopyEngine(FIXED)
    engine.read(make_units(1, 10), checkpoint=True).park(store)
    engine.extend(make_units(2, 3), checkpoint=True)
    first = there(pause(engine, store))
    assert [each.position for each in first.checkpoints] == [10, 13]
    del engine.fixed[13]
    engine.extend(make_units(3, 3), checkpoint=True)
    second = there(pause(engine, store, passing=(13,)))
    assert [each.position for each in second.checkpoints] == [10, 16]
    assert store.get(first.id) is None
    assert_counts(store)


def test_a_checkpoint_of_a_pause_at_the_end_of_a_block_is_not_inherited_either():
    store, engine = make_store(1 << 20, FIXED), CopyEngine(FIXED)
    engine.read(make_units(1, 8), checkpoint=True).park(store)
    engine.extend(make_units(2, 4), checkpoint=True)
    assert [each.position for each in there(pause(engine, store)).checkpoints] == [8, 12]
    del engine.fixed[12]
    engine.extend(make_units(3, 4), checkpoint=True)
    assert [each.position for each in there(pause(engine, store, passing=(12,))).checkpoints] == [8, 16]


def test_what_is_kept_may_go_to_disk_and_stays_there():
    machine, store = started(disk_bytes=60_000)
    kept, rows = parked(machine, store, 1)
    release = store.keep(kept.id)
    assert not store.table.known(kept.id).may_leave_ram
    assert pump(store, machine.fs) == []
    assert store.table.known(kept.id).may_leave_ram
    assert store.table.known(kept.id).may_leave_disk
    evict(store, kept)
    assert store.get(kept.id).tier is Tier.DISK
    assert not store.table.known(kept.id).may_leave_disk
    for seed in range(2, 12):
        machine.times.now += 60
        away(machine, store, seed)
    assert len(store.table.on_disk()) < 11, "the disk is small"
    assert_same_rows(rows_of(store, machine.fs, store.get(kept.id)), rows)
    release()
    assert store.table.known(kept.id).may_leave_disk


def test_what_is_kept_does_not_grow_too_old():
    machine, store = started(max_age_s=100.0)
    kept, _ = away(machine, store, 1)
    release = store.keep(kept.id)
    machine.times.now += 200
    pump(store, machine.fs)
    assert store.get(kept.id) is not None
    release()
    machine.times.now += 200
    pump(store, machine.fs)
    assert store.get(kept.id) is None
