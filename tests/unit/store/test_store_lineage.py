"""A capture takes from the store only what its live rows descend from: blocks and, with them, checkpoints."""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b

import numpy as np
import pytest

from parkd.store.planning import block_identity
from tests.unit.store.store_kit import (
    KEY,
    CopyEngine,
    assert_counts,
    assert_same_rows,
    leased_rows,
    make_hashes,
    make_layout,
    make_store,
    make_units,
)

ROWS = make_layout()
FIXED = make_layout(fixed_bytes=(700, 1000))
BLOCK_TOKENS = 4


def places(parked) -> list[int]:
    return [checkpoint.position for checkpoint in parked.checkpoints]


def restored(store, engine, parked, stop=None) -> CopyEngine:
    with store.lease(parked.id, parked.position if stop is None else stop) as lease:
        engine.restore(lease)
    return engine


def grown(engine, seed: int, *steps: int) -> CopyEngine:
    """Goes on by each of `steps` tokens, with a checkpoint after each."""
    for number, tokens in enumerate(steps):
        engine.extend(make_units(1000 * seed + number, tokens), checkpoint=True)
    return engine


# A checkpoint is inherited only with the blocks that it belongs to


def test_a_checkpoint_of_other_tokens_is_not_inherited():
    """The live rows descend from a parked conversation, and another of the same key has checkpoints in their reach."""
    store, engine = make_store(8 << 20, FIXED), CopyEngine(FIXED)
    engine.truncate(0)
    stranger = grown(engine, 1, 8, 4).park(store)
    engine.truncate(0)
    mine = grown(engine, 2, 16).park(store)
    child = grown(restored(store, engine, mine), 3, 4).park(store)
    assert child.blocks[:4] == mine.blocks, "it descends from what was parked, so that it may inherit at all"
    assert places(child) == [16, 20]
    assert places(store.get(stranger.id)) == [8, 12]
    assert_counts(store)


def test_a_checkpoint_of_equal_tokens_that_were_read_again_is_not_inherited():
    """Equal tokens, other rows: the checkpoint at 8 is of the rows that are parked, not of those that are live."""
    store, engine = make_store(8 << 20, FIXED), CopyEngine(FIXED)
    shared = make_units(1, 12)
    engine.read(shared[:8], checkpoint=True)
    engine.extend(shared[8:], checkpoint=True)
    first = engine.park(store)
    engine.read(shared, checkpoint=True)
    second = engine.park(store)
    assert store.get(first.id) is not None, "it can be resumed at 8, which the other can't"
    child = grown(restored(store, engine, second), 3, 6).park(store)
    assert places(child) == [12, 18]


def test_a_checkpoint_inside_a_block_that_was_computed_again_is_not_inherited():
    """The fork is inside a block: what was parked of this block has rows that the live one has not."""
    store, engine = make_store(8 << 20, FIXED), CopyEngine(FIXED)
    engine.truncate(0)
    parent = grown(engine, 1, 4, 2, 6).park(store)
    assert places(parent) == [4, 6, 12]
    restored(store, engine, parent, 4)
    engine.extend(parent.units[4:6])
    child = grown(engine, 2, 6).park(store)
    assert child.blocks[0] == parent.blocks[0]
    assert places(child) == [4, 12]


def test_a_checkpoint_behind_the_end_is_not_inherited():
    """The live rows end inside the partial block that they descend from: parked up to 10, restored at 8."""
    store, engine = make_store(8 << 20, FIXED), CopyEngine(FIXED)
    engine.truncate(0)
    parent = grown(engine, 1, 8, 2).park(store)
    child = restored(store, engine, parent, 8).park(store)
    assert (child.position, places(child)) == (8, [8])


def test_an_inherited_checkpoint_has_the_bytes_of_the_rows_it_belongs_to():
    """Two conversations of equal tokens, each with a state of its own at 8: each branch gets its own."""
    store, engine = make_store(8 << 20, FIXED), CopyEngine(FIXED)
    units, states, parked = make_units(1, 12), [], []
    for number in range(2):
        engine.read(units[:8], checkpoint=True)
        states.append(engine.fixed[8])
        parked.append(grown(engine, 10 + number, 4).park(store))
    for conversation, state in zip(parked, states, strict=True):
        child = grown(restored(store, engine, conversation), 20 + len(parked), 4).park(store)
        assert places(child) == [8, 12, 16]
        restored(store, engine, child, 8)
        assert_same_rows(engine.fixed[8], state)


def test_what_was_restored_and_not_gone_on_with_copies_nothing():
    """The checkpoint at its end is inherited, as those before it are."""
    store, engine = make_store(8 << 20, FIXED), CopyEngine(FIXED)
    engine.truncate(0)
    parent = grown(engine, 1, 8, 8).park(store)
    capture = store.begin_capture(restored(store, engine, parent).request())
    assert (capture.transfer.start, capture.transfer.stages[0].fixed) == (16, ())
    child = engine.finish(store, capture)
    assert (child.blocks, child.checkpoints) == (parent.blocks, parent.checkpoints)


def test_a_checkpoint_that_the_engine_still_holds_is_not_the_one_to_be_given_up():
    store, engine = make_store(8 << 20, FIXED, checkpoint_limit=4), CopyEngine(FIXED)
    engine.truncate(0)
    grown(engine, 1, 8, 8, 8, 8).park(store)
    engine.fixed = {16: engine.fixed[16]}
    grown(engine, 2, 8)
    capture = store.begin_capture(engine.request())
    assert [part.position for part in capture.transfer.stages[0].fixed] == [40], "the one at 16 is stored already"
    assert places(engine.finish(store, capture)) == [8, 16, 32, 40]


# A block is reused only if it is the one that the lineage means


@pytest.mark.parametrize("layout", [ROWS, FIXED], ids=["rows", "fixed state"])
def test_a_tail_of_other_tokens_is_not_taken_for_the_live_one(layout):
    """The lineage names a partial block of as many rows, but of other tokens: a guard against a wrong lineage."""
    store, engine = make_store(8 << 20, layout), CopyEngine(layout)
    engine.read(make_units(1, 8))
    parent = grown(engine, 1, 2).park(store)
    engine.truncate(8)
    grown(engine, 2, 2)
    capture = store.begin_capture(replace(engine.request(), lineage=parent.blocks))
    assert capture.transfer.start == 8, "the tail is copied"
    child = engine.finish(store, capture)
    assert child.blocks[:2] == parent.blocks[:2]
    assert child.blocks[2] != parent.blocks[2]
    assert_same_rows(leased_rows(store, child), engine.rows())
    assert_counts(store)


def test_the_tail_that_the_live_rows_end_with_is_reused():
    store, engine = make_store(8 << 20), CopyEngine(ROWS)
    parent = engine.read(make_units(1, 10)).park(store)
    capture = store.begin_capture(engine.request())
    assert capture.transfer.start == 10
    assert engine.finish(store, capture).blocks == parent.blocks


def test_a_tail_of_other_length_is_not_taken_for_the_live_one():
    """Its rows go on behind the end, or stop before it."""
    store, engine = make_store(8 << 20), CopyEngine(ROWS)
    parent = engine.read(make_units(1, 11)).park(store)
    for tokens in (10, 12):
        units = np.concatenate([parent.units, make_units(2, 1)])[:tokens]
        engine.read(units)
        capture = store.begin_capture(replace(engine.request(), lineage=parent.blocks))
        assert capture.transfer.start == 8
        store.abort(capture)


def test_the_name_of_a_tail_stands_for_all_units_before_it():
    """As a whole block's does: equal last units behind other ones have another name."""
    units, hashes = make_units(1, 10), make_hashes(make_units(1, 10), BLOCK_TOKENS)

    def name(before: bytes, start: int, stop: int) -> bytes:
        return blake2b(before + units[start:stop].tobytes(), digest_size=16, person=b"parkd-tail").digest()

    assert block_identity(KEY, units, hashes, BLOCK_TOKENS, 2, 2) == name(hashes[1], 8, 10)
    assert block_identity(KEY, units, hashes, BLOCK_TOKENS, 1, 3) == name(hashes[0], 4, 7)
    assert block_identity(KEY, units, hashes, BLOCK_TOKENS, 0, 3) == name(KEY, 0, 3)
    assert block_identity(KEY, units, hashes, BLOCK_TOKENS, 1, 4) == hashes[1]


def test_a_whole_block_of_other_tokens_ends_the_lineage():
    store, engine = make_store(8 << 20), CopyEngine(ROWS)
    parent = engine.read(make_units(1, 16)).park(store)
    engine.read(np.concatenate([parent.units[:4], make_units(2, 4), parent.units[8:]]))
    capture = store.begin_capture(replace(engine.request(), lineage=parent.blocks))
    assert capture.transfer.start == 4


def test_blocks_in_another_order_end_the_lineage():
    """Tokens that repeat would hash alike only without the chain; the index is compared as well."""
    store, engine = make_store(8 << 20), CopyEngine(ROWS)
    parent = engine.read(make_units(1, 12)).park(store)
    first, second, third = parent.blocks
    engine.read(parent.units)
    capture = store.begin_capture(replace(engine.request(), lineage=(first, third, second)))
    assert capture.transfer.start == 4


def test_a_block_that_is_still_being_copied_is_not_built_on():
    store, engine = make_store(8 << 20), CopyEngine(ROWS)
    engine.read(make_units(1, 10))
    open_one = store.begin_capture(engine.request())
    [flight] = store.inspect().captures
    second = store.begin_capture(replace(engine.request(), lineage=flight.blocks))
    assert second.transfer.start == 0
    store.abort(open_one)
    parked = store.commit(second, engine.capture(second.transfer))
    assert_same_rows(leased_rows(store, parked), engine.rows())
    assert_counts(store)


def test_a_tail_that_is_still_being_copied_is_not_built_on():
    store, engine = make_store(8 << 20), CopyEngine(ROWS)
    engine.read(make_units(1, 3))
    open_one = store.begin_capture(engine.request())
    [flight] = store.inspect().captures
    second = store.begin_capture(replace(engine.request(), lineage=flight.blocks))
    assert (second.transfer.start, second.transfer.stop) == (0, 3)
    store.abort(open_one)
    assert_same_rows(leased_rows(store, store.commit(second, engine.capture(second.transfer))), engine.rows())


def test_a_block_of_another_place_is_not_taken_although_its_hash_is_the_same():
    """Hashes may collide. Where a block begins is compared as well: of whole blocks, and of the tail."""
    store, engine = make_store(8 << 20), CopyEngine(ROWS)
    tokens, name = make_units(1, 4), b"the same hash..."
    alike = np.concatenate([tokens, tokens, tokens, tokens[:2]])
    engine.read(alike)
    first, second, third, tail = store.commit(
        (capture := store.begin_capture(replace(engine.request(), prefix_hashes=(name,) * 3))),
        engine.capture(capture.transfer),
    ).blocks
    for lineage, start in [
        ((first, third, second), 4),
        ((second, third), 0),
        ((first, second, tail), 8),
        ((first, second, third, tail), 14),
    ]:
        count = 14 if len(lineage) == 4 else 10
        request = replace(engine.request(), units=alike[:count], prefix_hashes=(name,) * (count // 4), lineage=lineage)
        capture = store.begin_capture(request)
        assert capture.transfer.start == start, lineage
        store.abort(capture)


def test_a_block_that_was_freed_ends_the_lineage():
    store, engine = make_store(8 << 20), CopyEngine(ROWS)
    parent = engine.read(make_units(1, 11)).park(store)
    store.drop(parent.id, "test")
    engine.lineage = parent.blocks
    capture = store.begin_capture(engine.request())
    assert capture.transfer.start == 0


# What live rows descend from after a restore


@pytest.mark.parametrize(("stop", "blocks"), [(11, 3), (10, 2), (8, 2), (7, 1), (3, 0)])
def test_live_rows_descend_from_whole_blocks_and_from_a_tail_only_at_its_end(stop, blocks):
    store, engine = make_store(8 << 20), CopyEngine(ROWS)
    parent = engine.read(make_units(1, 11)).park(store)
    with store.lease(parent.id, stop) as lease:
        assert lease.lineage == parent.blocks[:blocks]


@pytest.mark.parametrize(("start", "stop"), [(1, 8), (8, 4), (-4, 8), (0, 0), (0, 12), (12, 12)])
def test_rows_that_a_conversation_cannot_serve_are_not_leased(start, stop):
    store, engine = make_store(8 << 20), CopyEngine(ROWS)
    parent = engine.read(make_units(1, 11)).park(store)
    with pytest.raises(ValueError, match=r"rows \["):
        store.lease(parent.id, stop, start)
    assert store.stats().leased == 0


def test_a_lease_begins_and_ends_where_it_was_asked_to():
    store, engine = make_store(8 << 20), CopyEngine(ROWS)
    parent = engine.read(make_units(1, 11)).park(store)
    for start, stop, end, resume_at in [(0, 11, 11, None), (4, 8, 8, None), (4, 7, 8, 7), (8, 8, 8, None)]:
        with store.lease(parent.id, stop, start) as lease:
            transfer = lease.transfer
            assert (transfer.start, transfer.stop, transfer.resume_at) == (start, end, resume_at)
            assert transfer.position == stop


# Which ancestors a capture replaces


def test_an_ancestor_with_a_checkpoint_of_its_own_stays():
    """Parked with a checkpoint at 8, which what grew from equal tokens has not."""
    store, engine = make_store(8 << 20, FIXED), CopyEngine(FIXED)
    engine.read(make_units(1, 8), checkpoint=True)
    first = engine.park(store)
    engine.read(make_units(1, 8)).extend(make_units(2, 4), checkpoint=True)
    second = engine.park(store)
    assert set(store.inspect().conversations) == {first.id, second.id}
    third = grown(restored(store, engine, first), 3, 4).park(store)
    assert set(store.inspect().conversations) == {second.id, third.id}


def test_an_equal_conversation_is_replaced_and_a_longer_one_is_not():
    store, engine = make_store(8 << 20), CopyEngine(ROWS)
    long = engine.read(make_units(1, 11)).park(store)
    engine.read(make_units(1, 11)).park(store)
    assert store.get(long.id) is None
    short = engine.read(make_units(1, 9)).park(store)
    assert len(store.inspect().conversations) == 2
    assert store.get(short.id) is not None


# Where blocks are


def test_blocks_that_are_added_follow_those_before_them_in_memory():
    """There is a hole that would fit; behind the conversation its rows stay one run, which is moved by one copy."""
    store, engine = make_store(8 << 20), CopyEngine(ROWS)
    hole = engine.read(make_units(1, 8)).park(store)
    engine.read(make_units(2, 8)).park(store)
    store.drop(hole.id, "test")
    engine.extend(make_units(3, 8))
    parked = engine.park(store)
    slots = [store.inspect().blocks[block].slot for block in parked.blocks]
    assert slots == list(range(slots[0], slots[0] + 4))
    with store.lease(parked.id, 16) as lease:
        assert [len(stage.rows) for stage in lease.transfer.stages] == [1, 1]
