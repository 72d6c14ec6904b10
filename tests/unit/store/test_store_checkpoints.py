"""Fixed state: parked at its positions, shared by descendants, and the only places to resume."""

from __future__ import annotations

import pytest

from parkd.store.records import Parked, RefusalReason
from tests.unit.store.store_kit import (
    CopyEngine,
    Hooks,
    assert_counts,
    assert_same_rows,
    make_layout,
    make_store,
    make_units,
)

LAYOUT = make_layout((256, 128), (5000, 0))
CHECKPOINT_BYTES = 8192


@pytest.fixture
def engine() -> CopyEngine:
    return CopyEngine(LAYOUT)


def read(engine, *steps):
    """Reads (seed, tokens) after one another, with a checkpoint after each."""
    engine.truncate(0)
    for seed, tokens in steps:
        engine.extend(make_units(seed, tokens), checkpoint=True)
    return engine


def test_state_comes_back_at_each_checkpoint_and_nowhere_else(engine):
    store = make_store(4 << 20, LAYOUT)
    parked = read(engine, (1, 10), (2, 8), (3, 7)).park(store)
    fixed, rows = dict(engine.fixed), engine.rows()
    assert [checkpoint.position for checkpoint in parked.checkpoints] == [10, 18, 25]
    for stop in (18, 10, 25):
        with store.lease(parked.id, stop) as lease:
            assert lease.transfer.position == stop
            engine.restore(lease)
        assert_same_rows(engine.fixed[stop], fixed[stop])
        assert_same_rows(engine.rows(), [stage[:stop] for stage in rows])
    for stop in (9, 12, 24):
        with pytest.raises(ValueError, match="no checkpoint"):
            store.lease(parked.id, stop)
    assert store.stats().checkpoint_bytes == 3 * CHECKPOINT_BYTES


def test_rows_behind_the_last_checkpoint_are_not_parked(engine):
    store = make_store(4 << 20, LAYOUT)
    read(engine, (1, 10))
    engine.extend(make_units(2, 9))
    assert engine.park(store).position == 10


def test_fixed_state_alone_can_be_leased_where_all_rows_are_live(engine):
    store = make_store(4 << 20, LAYOUT)
    parked = read(engine, (1, 8), (2, 8)).park(store)
    with store.lease(parked.id, 8, start=8) as lease:
        assert lease.transfer.checksums.shape == (0, 2)
        assert [part.position for part in lease.transfer.stages[0].fixed] == [8]


def test_without_a_checkpoint_nothing_is_parked(engine):
    store = make_store(4 << 20, LAYOUT)
    refused = engine.read(make_units(1, 30)).park(store)
    assert refused.reason is RefusalReason.NO_CHECKPOINT
    assert store.stats().bytes_in_use == 0


def test_descendants_share_their_ancestors_checkpoints(engine):
    store = make_store(4 << 20, LAYOUT)
    parent = read(engine, (1, 8), (2, 8)).park(store)
    with store.lease(parent.id, 16) as lease:
        engine.restore(lease)
    assert list(engine.fixed) == [16]
    engine.extend(make_units(3, 8), checkpoint=True)
    capture = store.begin_capture(engine.request())
    assert [part.position for part in capture.transfer.stages[0].fixed] == [24]
    child = engine.finish(store, capture)
    assert [checkpoint.position for checkpoint in child.checkpoints] == [8, 16, 24]
    assert child.checkpoints[:2] == parent.checkpoints
    assert store.get(parent.id) is None
    assert store.stats().checkpoint_bytes == 3 * CHECKPOINT_BYTES
    assert_counts(store)


def test_a_checkpoint_of_a_stranger_with_equal_units_is_not_inherited(engine):
    store = make_store(4 << 20, LAYOUT)
    first = read(engine, (1, 8), (2, 8)).park(store)
    read(engine, (1, 8))
    engine.extend(make_units(2, 8))
    engine.extend(make_units(3, 8), checkpoint=True)
    second = engine.park(store)
    assert [checkpoint.position for checkpoint in second.checkpoints] == [8, 24]
    # It can be resumed at 16, which the longer one can't.
    assert store.get(first.id) is not None
    assert_counts(store)


def test_a_checkpoint_behind_the_fork_is_not_inherited_although_its_units_are_equal(engine):
    store = make_store(4 << 20, LAYOUT)
    parent = read(engine, (1, 8), (2, 8)).park(store)
    with store.lease(parent.id, 8) as lease:
        engine.restore(lease)
    engine.extend(make_units(2, 8))
    engine.extend(make_units(3, 8), checkpoint=True)
    child = engine.park(store)
    assert child.blocks[:2] == parent.blocks[:2]
    assert [checkpoint.position for checkpoint in child.checkpoints] == [8, 24]


def test_what_does_not_fit_is_parked_up_to_a_checkpoint(engine):
    store = make_store(100_000, LAYOUT)
    parked = read(engine, (1, 30), (2, 30), (3, 200)).park(store)
    assert isinstance(parked, Parked)
    assert parked.position == 60
    assert [checkpoint.position for checkpoint in parked.checkpoints] == [30, 60]
    assert_counts(store)


def test_abort_frees_new_checkpoints_and_keeps_inherited_ones(engine):
    store = make_store(4 << 20, LAYOUT)
    read(engine, (1, 8)).park(store)
    engine.extend(make_units(3, 8), checkpoint=True)
    capture = store.begin_capture(engine.request())
    assert store.stats().in_flight_bytes == 2 * 4 * 384 + CHECKPOINT_BYTES
    store.abort(capture)
    assert store.stats().checkpoint_bytes == CHECKPOINT_BYTES
    assert_counts(store)


def test_no_memory_for_a_checkpoint_leaves_nothing_behind(engine, monkeypatch):
    from parkd.store import slabs

    calls = []

    def second_fails(size):
        """After a slab and a first checkpoint."""
        calls.append(size)
        if len(calls) == 3:
            raise OSError(12, "Cannot allocate memory")
        return real(size)

    real = slabs.anonymous
    monkeypatch.setattr(slabs, "anonymous", second_fails)
    store = make_store(4 << 20, LAYOUT)
    refused = read(engine, (1, 8), (2, 8), (3, 8)).park(store)
    assert refused.reason is RefusalReason.MEMORY
    assert calls[1:] == [CHECKPOINT_BYTES] * 2
    assert store.stats().bytes_in_use == 0
    assert_counts(store)


def test_a_long_conversation_keeps_its_root_and_its_latest_checkpoints(engine):
    """Turn after turn is parked; each takes the place of the one before, whose old checkpoints are given up."""
    store = make_store(4 << 20, LAYOUT, checkpoint_limit=4)
    engine.truncate(0)
    for turn in range(1, 9):
        engine.extend(make_units(turn, 12), checkpoint=True)
        engine.fixed = {turn * 12: engine.fixed[turn * 12]}
        parked = engine.park(store)
        expected = [place * 12 for place in range(1, turn + 1)]
        assert [c.position for c in parked.checkpoints] == (expected if turn <= 4 else [12, *expected[-3:]])
        assert store.stats().conversations == 1
        assert store.stats().checkpoint_bytes == len(parked.checkpoints) * CHECKPOINT_BYTES
    assert_counts(store)


def test_what_the_engine_holds_is_parked_beyond_the_limit(engine):
    store = make_store(4 << 20, LAYOUT, checkpoint_limit=2)
    parked = read(engine, (1, 8), (2, 8), (3, 8)).park(store)
    assert [checkpoint.position for checkpoint in parked.checkpoints] == [8, 16, 24]


def test_locked_buffers_are_used_again(engine):
    hooks = Hooks()
    store = make_store(4 << 20, LAYOUT, slab_hooks=hooks)
    first = read(engine, (1, 8), (2, 8)).park(store)
    locked, made = dict(hooks.known), hooks.added_total
    store.drop(first.id, "test")
    assert store.stats().checkpoint_bytes == store.stats().bytes_in_use == 0
    assert hooks.known == locked
    second = read(engine, (3, 8), (4, 8)).park(store)
    assert (hooks.known, hooks.added_total) == (locked, made)
    with store.lease(second.id, 16) as lease:
        engine.restore(lease)
    assert_counts(store)
    store.drop(second.id, "test")
    store.close()
    assert hooks.known == {}


def test_without_hooks_the_machine_gets_buffers_back(engine):
    store = make_store(4 << 20, LAYOUT)
    store.drop(read(engine, (1, 8), (2, 8)).park(store).id, "test")
    assert len(store.table.memory.idle) == 0


def test_memory_ahead_is_for_rows_and_checkpoints(engine):
    hooks = Hooks()
    store = make_store(1 << 20, LAYOUT, slab_hooks=hooks)
    store.grow_ahead()
    made, stats = hooks.added_total, store.stats()
    assert len(store.table.memory.idle) == (1 << 20) // 4 // CHECKPOINT_BYTES
    assert (1 << 20) * 0.8 < stats.bytes_allocated <= 1 << 20
    assert stats.bytes_in_use == stats.checkpoint_bytes == 0
    idle = len(store.table.memory.idle)
    assert read(engine, (1, 40), (2, 40), (3, 40)).park(store).position == 120
    assert hooks.added_total == made
    assert len(store.table.memory.idle) == idle - 3, "none is given back while there is room"


def test_rows_take_the_room_of_idle_buffers(engine):
    """A conversation of rows that fill the budget fits, although a quarter of it was given to buffers ahead."""
    hooks = Hooks()
    store = make_store(400_000, LAYOUT, slab_hooks=hooks)
    store.grow_ahead()
    idle = len(store.table.memory.idle)
    assert idle > 10
    assert read(engine, (1, 600)).park(store).position == 600
    assert len(store.table.memory.idle) < idle
    assert_counts(store)


def test_checkpoints_take_the_room_of_empty_slabs(engine):
    store = make_store(400_000, LAYOUT, slab_hooks=Hooks())
    store.grow_ahead()
    steps = [(seed, 2) for seed in range(1, 31)]
    assert len(read(engine, *steps).park(store).checkpoints) == 30 > 400_000 // 4 // CHECKPOINT_BYTES
    assert_counts(store)


def test_a_floor_counts_only_memory_that_was_not_touched_before(engine):
    free = [1 << 30]
    store = make_store(4 << 20, LAYOUT, min_free_bytes=1 << 20, slab_hooks=Hooks(), free_memory=lambda: free[0])
    store.drop(read(engine, (1, 8), (2, 8)).park(store).id, "test")
    idle = len(store.table.memory.idle) * CHECKPOINT_BYTES
    free[0] = (1 << 20) + idle - 1  # enough for metadata, not for new buffers
    assert isinstance(read(engine, (3, 8), (4, 8)).park(store), Parked)
