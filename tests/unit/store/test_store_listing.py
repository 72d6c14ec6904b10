"""What people are told of each parked conversation, and all its bytes for a copy."""

from __future__ import annotations

import numpy as np
import pytest

from parkd.store.policy import ValuePolicy
from parkd.store.records import ConversationGone, Parked, Refused
from tests.fault.tier_kit import evict, parked, promote, pump, started
from tests.unit.store.store_kit import CopyEngine, make_layout, make_store, make_units

ROW_BYTES = 256 + 128
FIXED = make_layout(fixed_bytes=(64, 32))


def test_a_row_tells_its_bytes_in_both_tiers_its_times_and_its_turns() -> None:
    machine, store = started(layout=FIXED)
    there, _ = parked(machine, store, 1)
    [row] = store.listed()
    assert (row.parked.id, row.disk_bytes, row.turns) == (there.id, 0, 1)
    assert 3 * 4 * ROW_BYTES + 96 <= row.ram_bytes < 3 * 4 * ROW_BYTES + 2 * 4096
    assert row.own_bytes == row.ram_bytes, "it shares nothing"
    assert row.value is not None
    assert row.saves_s is not None
    assert pump(store, machine.fs) == []
    evict(store, there)
    machine.times.now += 100
    [row] = store.listed()
    assert row.disk_bytes == sum(-(-size // 4096) * 4096 for size in machine.fs.sizes().values())
    assert (row.ram_bytes, row.own_bytes, row.turns, row.value, row.saves_s) == (0, 0, None, None, None)
    assert row.age_s >= 100
    assert row.idle_s >= 100
    assert (row.is_pinned, row.is_foreign) == (False, False)


def test_what_two_share_is_counted_for_each_and_is_nobodys_own() -> None:
    store, engine = make_store(1 << 20), CopyEngine(make_layout())
    engine.read(make_units(1, 8)).park(store)
    engine.extend(make_units(2, 8))
    one = engine.park(store)
    with store.lease(one.id, 8) as lease:
        engine.restore(lease)
    engine.extend(make_units(3, 4))
    two = engine.park(store)
    rows = {row.parked.id: row for row in store.listed()}
    assert {name: row.ram_bytes for name, row in rows.items()} == {one.id: 16 * ROW_BYTES, two.id: 12 * ROW_BYTES}
    assert {name: row.own_bytes for name, row in rows.items()} == {one.id: 8 * ROW_BYTES, two.id: 4 * ROW_BYTES}


def test_all_bytes_are_held_for_a_copy_also_when_the_conversation_is_dropped() -> None:
    machine, store = started(layout=FIXED)
    there, rows = parked(machine, store, 1)
    held = store.hold(there.id)
    store.drop(there.id, "a test")
    parts = [np.concatenate([block[stage].buffer.reshape(-1) for block in held.blocks]) for stage in (0, 1)]
    assert all(np.array_equal(part, whole.reshape(-1)) for part, whole in zip(parts, rows, strict=True))
    assert [[part.position for part in parts] for parts in held.checkpoints] == [[11, 11]]
    held.release()
    assert store.stats().bytes_in_use == 0


def test_rows_that_are_held_in_ram_may_leave_the_disk() -> None:
    machine, store = started()
    there, _ = parked(machine, store, 1)
    assert pump(store, machine.fs) == []
    held = store.hold(there.id)
    assert store.table.known(there.id).may_leave_disk
    held.release()


def test_what_is_on_disk_alone_is_not_held() -> None:
    machine, store = started()
    there, _ = parked(machine, store, 1)
    assert pump(store, machine.fs) == []
    evict(store, there)
    with pytest.raises(ConversationGone):
        store.hold(there.id)


def test_a_promotion_is_not_refused_for_what_others_are_worth() -> None:
    """It was judged when it was chosen: a turn waits for it."""
    machine, store = started(policy=ValuePolicy(margin=1e9), ram_bytes=24 * 4 * ROW_BYTES, slots=1)
    there, _ = parked(machine, store, 1)
    assert isinstance(there, Parked)
    assert pump(store, machine.fs) == []
    evict(store, there)
    other, _ = parked(machine, store, 2)
    assert isinstance(other, Parked)
    assert pump(store, machine.fs) == []
    assert isinstance(parked(machine, store, 3)[0], Refused), "the policy is selective"
    assert isinstance(promote(store, machine.fs, store.get(there.id)), Parked)
