"""Live rows whose blocks are on disk alone: copied back under their names, and under no other block's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.fault.tier_kit import BLOCK_TOKENS, evict, promote, pump, rows_of, started
from tests.fault.workload import LAYOUTS
from tests.unit.store.store_kit import assert_counts, assert_same_rows, leased_state, make_units


@pytest.mark.parametrize(
    ("kept", "added"),
    [
        pytest.param(10, 2, id="the block has fewer rows than the live one"),
        pytest.param(8, 2, id="the block has as many rows, of other tokens"),
        pytest.param(8, 1, id="the block has more rows than the live one"),
    ],
)
def test_a_block_on_disk_gives_its_name_only_to_its_own_rows(kept: int, added: int) -> None:
    """The lineage names a block that the live rows do not descend from: a guard against a wrong lineage."""
    machine, store = started()
    engine = machine.engine().read(make_units(1, 10))
    first = engine.park(store)
    before = engine.rows()
    assert pump(store, machine.fs) == []
    evict(store, first)
    engine.truncate(kept)
    engine.extend(make_units(2, added))
    capture = store.begin_capture(replace(engine.request(), lineage=first.blocks))
    second = engine.finish(store, capture)
    assert second.blocks[:2] == first.blocks[:2]
    assert second.blocks[2] not in first.blocks
    assert pump(store, machine.fs) == []
    evict(store, second)
    assert_same_rows(rows_of(store, machine.fs, store.get(second.id)), engine.rows())
    if kept + added < 12:
        assert_same_rows(rows_of(store, machine.fs, store.get(first.id)), before)


def test_rows_that_were_read_again_get_names_of_their_own() -> None:
    """Equal tokens with no lineage: the blocks on disk are not theirs."""
    machine, store = started()
    engine = machine.engine().read(make_units(1, 10))
    first = engine.park(store)
    assert pump(store, machine.fs) == []
    evict(store, first)
    second = engine.read(np.concatenate([first.units, make_units(2, 3)])).park(store)
    assert not set(second.blocks) & set(first.blocks)


def test_a_whole_state_that_was_computed_again_gets_a_name_of_its_own() -> None:
    """Cut after a restore, and the same tokens generated once more: other bytes, so the state on disk must stay."""
    machine, store = started(layout=LAYOUTS["whole"])
    engine = machine.engine().read(make_units(1, 20))
    first = engine.park(store)
    before = engine.rows()
    assert pump(store, machine.fs) == []
    evict(store, first)
    engine.truncate(18)
    engine.extend(first.units[18:])
    second = engine.park(store)
    assert second.blocks != first.blocks
    assert_same_rows(rows_of(store, machine.fs, second), engine.rows())
    assert_same_rows(rows_of(store, machine.fs, store.get(first.id)), before)


@pytest.mark.parametrize("layout", ["whole", "whole with checkpoints", "fixed state"])
def test_a_state_that_cannot_be_cut_is_read_whole_wherever_it_is_resumed(layout: str) -> None:
    machine, store = started(layout=LAYOUTS[layout])
    engine = machine.engine().read(make_units(1, 6), checkpoint=True)
    engine.extend(make_units(2, 14), checkpoint=True)
    there = engine.park(store)
    assert pump(store, machine.fs) == []
    evict(store, there)
    back = promote(store, machine.fs, store.get(there.id), 6)
    assert (back.id, back.position) == (there.id, 20)
    assert [c.position for c in back.checkpoints] == [c.position for c in there.checkpoints]
    assert store.inspect().conversations[there.id].is_in_ram
    assert_same_rows(rows_of(store, machine.fs, back), engine.rows())
    assert_counts(store)
    evict(store, back)
    assert store.stats().bytes_in_use == 0, "nothing of it is held by nobody"


def test_of_rows_only_the_blocks_up_to_where_they_are_resumed_are_read() -> None:
    machine, store = started()
    engine = machine.engine().read(make_units(1, 20))
    there = engine.park(store)
    assert pump(store, machine.fs) == []
    evict(store, there)
    head = promote(store, machine.fs, store.get(there.id), 6)
    assert (head.position, head.blocks) == (8, there.blocks[:2])
    seen = store.inspect().blocks
    assert [seen[block].slot is not None for block in there.blocks] == [True, True, False, False, False]
    assert_same_rows(rows_of(store, machine.fs, head), engine.rows(8))
    assert_counts(store)


def test_what_fits_in_part_is_read_in_whole_blocks() -> None:
    machine, store = started(ram_bytes=300_000)
    engine = machine.engine().read(make_units(1, 400))
    there = engine.park(store)
    assert pump(store, machine.fs) == []
    machine.ram_bytes = 100_000
    store = machine.start()
    head = promote(store, machine.fs, store.get(there.id))
    assert 0 < head.position < 400
    assert head.position % BLOCK_TOKENS == 0
    assert_same_rows(rows_of(store, machine.fs, head), engine.rows(head.position))
    assert_counts(store)


def test_what_is_in_memory_for_another_conversation_is_held_and_not_read() -> None:
    """The conversation went on, and the longer one is not on disk yet: rows and fixed state of both are the same."""
    machine, store = started(layout=LAYOUTS["fixed state"])
    engine = machine.engine().read(make_units(1, 8), checkpoint=True)
    first, state = engine.park(store), engine.fixed[8]
    assert pump(store, machine.fs) == []
    engine.extend(make_units(2, 4), checkpoint=True)
    second = engine.park(store)
    promotion = store.promote(first.id, 8)
    assert promotion.job.bytes == 0
    back = store.promoted(promotion, None)
    assert back.id == first.id
    assert_counts(store)
    store.drop(second.id, "test")
    assert_counts(store)
    rows, fixed = leased_state(store, first.id, 8)
    assert_same_rows(rows, engine.rows(8))
    assert_same_rows(fixed, state)
