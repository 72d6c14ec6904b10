"""What `inspect` says of a store, against a count by hand; what people are told of each conversation, and all its bytes
for a copy."""

from __future__ import annotations

import numpy as np
import pytest

from parkd.store.budget import Budget, Kind
from parkd.store.policy import ValuePolicy
from parkd.store.records import ConversationGone, Parked, Refused
from tests.fault.tier_kit import evict, parked, promote, pump, started
from tests.unit.store.store_kit import KEY, CopyEngine, make_layout, make_store, make_units

BLOCK_BYTES = 4 * (256 + 128)
ROW_BYTES = 256 + 128
FIXED, ALSO_FIXED = make_layout(fixed_bytes=(700, 1000)), make_layout(fixed_bytes=(64, 32))


def test_two_branches_share_the_blocks_before_they_part():
    store, engine = make_store(8 << 20), CopyEngine(make_layout())
    first = engine.read(make_units(1, 10)).park(store)
    engine.truncate(8)
    engine.extend(make_units(2, 3))
    second = engine.park(store)
    seen = store.inspect()
    assert list(seen.conversations) == [first.id, second.id]
    branch = seen.conversations[second.id]
    assert (branch.position, len(branch.blocks), branch.checkpoints) == (11, 3, ())
    assert np.array_equal(branch.units, np.concatenate([make_units(1, 8), make_units(2, 3)]))
    assert branch.is_in_ram
    assert not branch.is_on_disk
    assert {i: block.owners for i, block in seen.blocks.items()} == {
        **dict.fromkeys(first.blocks[:2], 2),
        first.blocks[2]: 1,
        second.blocks[2]: 1,
    }
    assert {block.ram_bytes for block in seen.blocks.values()} == {BLOCK_BYTES}
    assert len({block.slot for block in seen.blocks.values()}) == 4 == seen.ram.used_slots
    assert all(block.is_sealed and block.extent is None for block in seen.blocks.values())
    assert seen.ram.slot_bytes == BLOCK_BYTES
    assert seen.disk is None
    assert sum(seen.ram.charged_bytes.values()) == store.stats().bytes_allocated
    store.drop(second.id, "a test")
    assert {i: block.owners for i, block in store.inspect().blocks.items()} == dict.fromkeys(first.blocks, 1)


def test_a_budget_tells_of_every_change():
    seen: list[int] = []
    budget = Budget(100, lambda: seen.append(budget.allocated_bytes))
    budget.charge(Kind.SLABS, 60)
    budget.charge(Kind.SEGMENTS, 40)
    budget.credit(Kind.SLABS, 50)
    assert (seen, budget.peak_bytes, budget.free_bytes) == ([60, 100, 50], 100, 50)


def test_pins_leases_waiters_and_a_conversation_that_fades():
    store, engine = make_store(8 << 20), CopyEngine(make_layout())
    parked = engine.read(make_units(1, 9)).park(store)
    request = engine.request()
    store.pin(parked.id)
    release = store.expect(KEY, request.prefix_hashes)
    lease = store.lease(parked.id, 9)
    seen = store.inspect().conversations[parked.id]
    assert (seen.is_pinned, seen.leases, seen.awaited) == (True, 1, 1)
    release()
    store.drop(parked.id, "test")
    after = store.inspect()
    assert (dict(after.conversations), [each.id for each in after.fading]) == ({}, [parked.id])
    assert {block.owners for block in after.blocks.values()} == {1}
    lease.release()
    assert (store.inspect().fading, dict(store.inspect().blocks)) == ((), {})
    assert seen.leases == 1, "a value stays as it was"


def test_a_capture_in_flight_and_its_checkpoints():
    store, engine = make_store(8 << 20, FIXED), CopyEngine(FIXED)
    engine.read(make_units(1, 6), checkpoint=True).extend(make_units(2, 3), checkpoint=True)
    capture = store.begin_capture(engine.request())
    seen = store.inspect()
    [flight] = seen.captures
    assert (flight.serial, flight.position, len(flight.blocks), flight.source) == (capture.serial, 9, 3, None)
    assert [checkpoint.position for checkpoint in flight.checkpoints] == [6, 9]
    assert dict(seen.conversations) == {}
    assert not any(block.is_sealed for block in seen.blocks.values())
    parked = store.commit(capture, engine.capture(capture.transfer))
    seen = store.inspect()
    assert seen.captures == ()
    assert all(block.is_sealed for block in seen.blocks.values())
    assert seen.conversations[parked.id].checkpoints == flight.checkpoints
    assert set(seen.checkpoints) == {checkpoint.id for checkpoint in flight.checkpoints}
    assert {(c.owners, c.is_in_ram, c.ram_bytes) for c in seen.checkpoints.values()} == {(1, True, 4096)}
    assert seen.ram.charged_bytes["checkpoints"] == seen.ram.held_bytes["checkpoints"] == 2 * 4096


def test_a_row_tells_its_bytes_in_both_tiers_its_times_and_its_turns() -> None:
    machine, store = started(layout=ALSO_FIXED)
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
    machine, store = started(layout=ALSO_FIXED)
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
