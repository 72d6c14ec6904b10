"""Parking, restoring and sharing, one behaviour a test."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from parkd.state import Checksums
from parkd.store.budget import BLOCK_BYTES, conversation_metadata_bytes
from parkd.store.records import Capture, ConversationGone, Parked, RefusalReason, Refused, name_of
from tests.unit.store.store_kit import (
    KEY,
    OTHER_KEY,
    CopyEngine,
    assert_counts,
    assert_same_rows,
    leased_rows,
    make_hashes,
    make_layout,
    make_store,
    make_units,
)

LAYOUT = make_layout()
SLOT_BYTES = 4 * (256 + 128)
AMPLE = 4 << 20


@pytest.fixture
def engine() -> CopyEngine:
    return CopyEngine(LAYOUT)


@pytest.mark.parametrize("tokens", [1, 255, 256, 257, 511, 512, 513, 1024])
def test_what_was_parked_comes_back_at_every_block_edge(tokens):
    layout = make_layout((24, 8))
    store, engine = make_store(AMPLE, layout, block_tokens=256), CopyEngine(layout, 256)
    engine.read(make_units(1, tokens))
    rows = engine.rows()
    parked = engine.park(store)
    assert parked.position == tokens
    for stop in {1, tokens // 2, tokens - 1, tokens} - {0}:
        engine.read(make_units(2, tokens))
        with store.lease(parked.id, stop) as lease:
            engine.restore(lease)
        assert engine.position == stop
        assert_same_rows(engine.rows(), [stage[:stop] for stage in rows])
    assert_counts(store)


def test_restore_copies_and_two_branches_stay(engine):
    store = make_store(AMPLE)
    parent = engine.read(make_units(1, 41)).park(store)
    parent_rows = engine.rows()
    for branch in (2, 3):
        with store.lease(parent.id, 30) as lease:
            engine.restore(lease)
        engine.extend(make_units(branch, 20))
        engine.park(store)
    assert store.stats().conversations == 3
    assert_same_rows(leased_rows(store, parent), parent_rows)
    assert_counts(store)


def test_a_grown_conversation_copies_only_new_blocks_and_supersedes(engine):
    store = make_store(AMPLE)
    first = engine.read(make_units(1, 42)).park(store)
    engine.extend(make_units(2, 10))
    capture = store.begin_capture(engine.request())
    assert (capture.transfer.start, capture.transfer.stop) == (40, 52)
    grown = engine.finish(store, capture)
    assert grown.blocks[:10] == first.blocks[:10]
    assert store.get(first.id) is None
    assert store.stats().conversations == 1
    assert store.stats().superseded_total == 1
    assert store.stats().blocks == 13
    assert store.stats().kept_tokens_total == 40
    assert_same_rows(leased_rows(store, grown), engine.rows())
    assert_counts(store)


def test_equal_units_without_lineage_share_nothing(engine):
    store = make_store(AMPLE)
    first = engine.read(make_units(1, 40)).park(store)
    engine.read(np.concatenate([make_units(1, 40), make_units(2, 8)]))
    capture = store.begin_capture(engine.request())
    assert capture.transfer.start == 0
    parked = engine.finish(store, capture)
    assert not set(first.blocks) & set(parked.blocks)
    assert_same_rows(leased_rows(store, parked), engine.rows())


def test_a_shared_prefix_is_held_once_for_all_siblings(engine):
    store = make_store(AMPLE)
    latest = engine.read(make_units(1, 40)).park(store)
    for sibling in range(8):
        with store.lease(latest.id, 40) as lease:
            engine.restore(lease)
        engine.extend(make_units(10 + sibling, 4))
        latest = engine.park(store)
    stats = store.stats()
    assert stats.blocks == 10 + 8
    assert stats.shared_blocks == 10
    assert stats.row_bytes == 18 * SLOT_BYTES


def test_an_unchanged_tail_is_reused_and_a_grown_one_is_recopied(engine):
    store = make_store(AMPLE)
    parked = engine.read(make_units(1, 42)).park(store)
    capture = store.begin_capture(engine.request())
    assert capture.transfer.start == capture.transfer.stop == 42
    assert capture.transfer.bytes == 0
    again = engine.finish(store, capture)
    assert again.blocks == parked.blocks
    # The daemon may hand in the old tail although tokens were added: it must not be taken for the longer block.
    lineage = engine.lineage
    engine.extend(make_units(2, 1))
    request = dataclasses.replace(engine.request(), lineage=lineage)
    assert store.begin_capture(request).transfer.start == 40


def test_lineage_of_a_restore_inside_a_block_leaves_the_block_out(engine):
    store = make_store(AMPLE)
    parked = engine.read(make_units(1, 40)).park(store)
    with store.lease(parked.id, 38) as lease:
        assert lease.lineage == parked.blocks[:9]
        assert (lease.transfer.stop, lease.transfer.position) == (40, 38)
        engine.restore(lease)
    engine.extend(make_units(2, 2))
    wrong = dataclasses.replace(engine.request(), lineage=parked.blocks)
    assert store.begin_capture(wrong).transfer.start == 36
    assert engine.park(store).blocks[9] != parked.blocks[9]


def test_a_lease_from_a_block_start_moves_only_the_rest(engine):
    store = make_store(AMPLE)
    parked = engine.read(make_units(1, 42)).park(store)
    with store.lease(parked.id, 41, start=20) as lease:
        assert lease.transfer.start == 20
        assert lease.transfer.checksums.shape == (6, 2)
        rows = np.concatenate([run.buffer for run in lease.transfer.stages[0].rows]).reshape(-1, 256)
        assert np.array_equal(rows, engine.arenas[0][20:42])


@pytest.mark.parametrize(("stop", "start"), [(0, 0), (43, 0), (8, 3), (8, 12), (8, -4)])
def test_a_lease_of_rows_that_are_not_there_is_an_error(engine, stop, start):
    store = make_store(AMPLE)
    parked = engine.read(make_units(1, 42)).park(store)
    with pytest.raises(ValueError, match="rows"):
        store.lease(parked.id, stop, start)
    assert store.stats().leased == 0


def test_neighbouring_slots_are_one_run_for_every_stage(engine):
    store = make_store(AMPLE)
    parked = engine.read(make_units(1, 402)).park(store)
    with store.lease(parked.id, 402) as lease:
        assert [len(stage.rows) for stage in lease.transfer.stages] == [1, 1]


def test_nothing_is_visible_before_commit_and_abort_gives_all_back(engine):
    store = make_store(AMPLE)
    engine.read(make_units(1, 42))
    request = engine.request()
    before = store.stats().bytes_in_use
    capture = store.begin_capture(request)
    assert store.candidates(KEY, request.prefix_hashes) == []
    assert store.stats().in_flight_bytes == 11 * SLOT_BYTES
    store.abort(capture)
    store.abort(capture)
    assert store.stats().bytes_in_use == before == 0
    assert store.stats().aborts_total == 1
    with pytest.raises(ValueError, match="before"):
        store.commit(capture, engine.capture(capture.transfer))
    assert_counts(store)


def test_commit_wants_a_checksum_for_every_part(engine):
    store = make_store(AMPLE)
    capture = store.begin_capture(engine.read(make_units(1, 42)).request())
    good = engine.capture(capture.transfer)
    with pytest.raises(ValueError, match="expected"):
        store.commit(capture, Checksums(good.rows[:-1], good.fixed))
    assert store.commit(capture, good).position == 42


def test_a_capture_keeps_its_reused_blocks_when_the_parent_is_dropped(engine):
    store = make_store(AMPLE)
    parent = engine.read(make_units(1, 40)).park(store)
    engine.extend(make_units(2, 8))
    capture = store.begin_capture(engine.request())
    store.drop(parent.id, "test")
    CopyEngine(LAYOUT, seed=9).read(make_units(3, 80)).park(store)
    grown = engine.finish(store, capture)
    assert_same_rows(leased_rows(store, grown), engine.rows())
    assert_counts(store)


def test_a_dropped_conversation_keeps_its_bytes_until_the_lease_ends(engine):
    store = make_store(AMPLE)
    parked = engine.read(make_units(1, 40)).park(store)
    rows = engine.rows()
    lease = store.lease(parked.id, 40)
    assert store.drop(parked.id, "damaged")
    assert not store.drop(parked.id, "damaged")
    assert store.get(parked.id) is None
    with pytest.raises(ConversationGone):
        store.lease(parked.id, 40)
    other = CopyEngine(LAYOUT, seed=9)
    other.read(make_units(3, 80)).park(store)
    assert np.array_equal(lease.transfer.stages[0].rows[0].buffer.reshape(-1, 256), rows[0])
    in_use = store.stats().bytes_in_use
    lease.release()
    lease.release()
    freed = 10 * (SLOT_BYTES + BLOCK_BYTES) + conversation_metadata_bytes(40, 4)
    assert store.stats().bytes_in_use == in_use - freed
    assert_counts(store)


def test_conversations_of_another_key_are_strangers(engine):
    store = make_store(AMPLE)
    engine.read(make_units(1, 40)).park(store)
    hashes = make_hashes(make_units(1, 40), 4)
    assert store.candidates(OTHER_KEY, hashes) == []
    short = engine.read(make_units(1, 20)).park(store, OTHER_KEY)
    assert store.stats().conversations == 2
    assert [parked.id for parked, _ in store.candidates(OTHER_KEY, hashes)] == [short.id]


def test_a_pin_passes_to_what_supersedes(engine):
    store = make_store(AMPLE)
    store.pin(engine.read(make_units(1, 40)).park(store).id)
    engine.extend(make_units(2, 4))
    grown = engine.park(store)
    assert store.stats().pinned == 1
    store.unpin(grown.id)
    assert store.stats().pinned == 0


def test_requests_that_contradict_themselves_are_errors(engine):
    store = make_store(AMPLE)
    request = engine.read(make_units(1, 40)).request()
    for change in (
        {"layout_digest": b"x" * 16},
        {"prefix_hashes": request.prefix_hashes[:-1]},
        {"checkpoints": (8, 8)},
        {"checkpoints": (41,)},
        {"units": request.units[:0], "prefix_hashes": ()},
    ):
        with pytest.raises(ValueError, match=r"."):
            store.begin_capture(dataclasses.replace(request, **change))
    assert store.stats().bytes_in_use == 0


def test_parking_off_refuses_and_knows_nothing(engine):
    store = make_store(0)
    refused = engine.read(make_units(1, 40)).park(store)
    assert isinstance(refused, Refused)
    assert refused.reason is RefusalReason.OFF
    assert store.candidates(KEY, make_hashes(make_units(1, 40), 4)) == []
    assert store.why_gone(KEY, make_hashes(make_units(1, 40), 4)) == ""
    assert store.stats().bytes_allocated == 0


def test_close_gives_all_memory_back(engine):
    store = make_store(AMPLE)
    for seed in range(3):
        assert isinstance(engine.read(make_units(seed, 50)).park(store), Parked)
    store.close()
    assert store.stats().bytes_allocated == 0
    assert store.stats().conversations == 0


def test_a_machine_without_memory_refuses(engine, monkeypatch):
    def no_memory(size):
        raise OSError(12, "Cannot allocate memory")

    store = make_store(AMPLE)
    monkeypatch.setattr("parkd.store.slabs.anonymous", no_memory)
    refused = engine.read(make_units(1, 40)).park(store)
    assert refused.reason is RefusalReason.MEMORY
    assert store.stats().bytes_allocated == 0
    monkeypatch.undo()
    assert isinstance(store.begin_capture(engine.request()), Capture)
    assert_counts(store)


def test_found_by_use_24_tokens_that_a_restore_takes_from_the_store_are_counted(engine):
    """Issue 22, item 24: `parkd_store_reused_tokens_total` stayed 0 after restores."""
    store = make_store(AMPLE)
    parked = engine.read(make_units(1, 42)).park(store)
    assert store.stats().reused_tokens_total == 0
    store.lease(parked.id, 42).release()
    store.lease(parked.id, 42, 40).release()
    assert store.stats().reused_tokens_total == 42 + 2
    assert store.stats().kept_tokens_total == 0


def test_a_conversation_keeps_its_name_while_it_grows_and_a_fork_gets_its_own(engine):
    """Where two go on differently from one point, the first keeps the name."""
    store = make_store(AMPLE)
    first = engine.read(make_units(1, 10)).park(store)
    assert name_of(first.id) == first.id
    engine.extend(make_units(2, 7))
    second = engine.park(store)
    assert (name_of(second.id), second.id != first.id) == (first.id, True)
    assert [each.id for each in store.named(first.id)] == [second.id]
    with store.lease(second.id, 10) as lease:
        engine.restore(lease)
    engine.extend(make_units(3, 9))
    fork = engine.park(store)
    assert name_of(fork.id) not in (first.id, "")
    engine.extend(make_units(4, 5))
    third = engine.park(store)
    assert name_of(third.id) == name_of(fork.id)
    assert store.continued(KEY, third.units, make_hashes(third.units, 4)) == name_of(fork.id)
    assert store.continued(OTHER_KEY, third.units, make_hashes(third.units, 4, OTHER_KEY)) is None
    store.drop(third.id, "a test")
    again = engine.read(third.units).park(store)
    assert name_of(again.id) != name_of(fork.id), "nothing of that name is left"
