"""What `inspect` says of a store, against a count by hand."""

from __future__ import annotations

import numpy as np

from parkd.store.budget import Budget, Kind
from tests.unit.store.store_kit import KEY, CopyEngine, make_layout, make_store, make_units

BLOCK_BYTES = 4 * (256 + 128)
FIXED = make_layout(fixed_bytes=(700, 1000))


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
