"""What is let in, how far, and what goes for it: one rule of admission each."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from parkd.state import Costs, Grain, StateSizes
from parkd.store.budget import BLOCK_BYTES, CONVERSATION_BYTES, HASH_BYTES, UNIT_BYTES
from parkd.store.policy import LruPolicy, ValuePolicy
from parkd.store.records import Parked, RefusalReason, Refused
from tests.fault.fault_fs import FaultFs
from tests.fault.whole_kit import FIXED_BYTES, WholeEngine, whole_layout
from tests.unit.store.store_kit import (
    CopyEngine,
    assert_counts,
    make_hashes,
    make_layout,
    make_store,
    make_units,
)

LAYOUT = make_layout((1024, 1024))
FIXED = make_layout((1024, 1024), (700, 1000))
BLOCK = 4
SLOT_BYTES = BLOCK * 2048


def read(seed: int, tokens: int, layout=LAYOUT, **options) -> CopyEngine:
    return CopyEngine(layout, seed=seed).read(make_units(seed, tokens), **options)


def described(position: int) -> int:
    """Bytes of metadata of a conversation, without its blocks."""
    return CONVERSATION_BYTES + position * UNIT_BYTES + position // BLOCK * HASH_BYTES


def size_of(position: int, blocks: int) -> int:
    """All bytes of a conversation of rows that shares nothing."""
    return described(position) + blocks * (SLOT_BYTES + BLOCK_BYTES)


def returning(store, seed: int, tokens: int, turns: int = 6) -> Parked:
    """A conversation that came back so often."""
    engine = read(seed, tokens - BLOCK * turns)
    for turn in range(turns):
        store.clock.now += 60.0
        engine.extend(make_units(seed * 100 + turn, BLOCK))
        parked = engine.park(store)
    return parked


def test_one_more_token_is_parked_though_only_all_others_together_make_room():
    """What two share counts for neither of them alone: then room is counted over all that may go, and whatever fits
    whole is parked, however little it adds."""
    store, pinned = make_store(size_of(10, 3) + size_of(12, 3) + described(8), LAYOUT), read(1, 10)
    kept = pinned.park(store)
    store.pin(kept.id)
    branch = read(2, 12)
    longer = branch.park(store)
    branch.truncate(8)
    shorter = branch.park(store)
    assert isinstance(shorter, Parked)
    assert {kept.id, longer.id, shorter.id} == set(store.inspect().conversations)
    assert shorter.blocks == longer.blocks[:2]
    pinned.extend(make_units(9, 3))
    grown = pinned.park(store)
    assert isinstance(grown, Parked), grown
    assert (grown.position, grown.blocks[:2]) == (13, kept.blocks[:2])
    assert store.stats().evictions_total == 2
    assert_counts(store)


@pytest.mark.parametrize(("missing", "is_parked"), [(0, True), (1, False)])
def test_the_machine_keeps_exactly_its_floor_of_free_memory(missing, is_parked):
    tokens, floor = 20, 1 << 20
    wanted = size_of(tokens, tokens // BLOCK)
    store = make_store(8 << 20, LAYOUT, free_memory=lambda: floor + wanted - missing, min_free_bytes=floor)
    outcome = read(1, tokens).park(store)
    assert isinstance(outcome, Parked) == is_parked
    if not is_parked:
        assert outcome.reason is RefusalReason.MEMORY_FLOOR


def test_what_is_refused_for_its_size_is_not_asked_of_the_machine():
    store = make_store(5000, LAYOUT, free_memory=lambda: 0, min_free_bytes=1)
    outcome = read(1, 400).park(store)
    assert isinstance(outcome, Refused)
    assert outcome.reason is RefusalReason.BUDGET


def test_a_slot_is_not_taken_from_what_is_worth_more():
    """There is memory for both, but one conversation slot."""
    store = make_store(8 << 20, LAYOUT, slots=1, policy=ValuePolicy())
    chat = returning(store, 1, 120)
    refused = read(9, 120).park(store)
    assert isinstance(refused, Refused)
    assert refused.reason is RefusalReason.VALUE
    assert store.get(chat.id) is not None


@pytest.mark.parametrize(("read_s", "is_parked"), [(1e-12, False), (1e-3, True)])
def test_what_is_worth_no_more_evicts_nothing(read_s, is_parked):
    """Where reading again is quicker than restoring, all of them are worth nothing."""
    store = make_store(size_of(120, 30) + 20_000, LAYOUT, policy=ValuePolicy())
    store.measured(Costs(read_s=read_s, bytes_per_s=1e9))
    first = read(1, 120).park(store)
    second = read(2, 120)
    if is_parked:
        store.clock.now += 86_400.0  # the first will not return any more
    outcome = second.park(store)
    if is_parked:
        assert isinstance(outcome, Parked)
        assert outcome.position == 120
        assert store.get(first.id) is None
    else:
        assert store.get(first.id) is not None
        assert store.stats().evictions_total == 0


def test_an_ancestor_that_left_frees_no_slot_for_the_capture_that_will_not_replace_it():
    store, engine = make_store(8 << 20, LAYOUT, slots=1), read(1, 20)
    ancestor = engine.park(store)
    engine.extend(make_units(2, 8))
    capture = store.begin_capture(engine.request())
    sums = engine.capture(capture.transfer)
    store.drop(ancestor.id, "a test")
    refused = read(3, 20).park(store)
    assert isinstance(refused, Refused)
    assert refused.reason is RefusalReason.SLOTS
    store.commit(capture, sums)
    assert store.stats().conversations == 1


def part_of(room_tokens: int, tokens: int):
    """Parks `tokens` where a conversation that is worth more leaves room for `room_tokens`."""
    room = size_of(room_tokens, room_tokens // BLOCK)
    store = make_store(64 << 20, LAYOUT, policy=ValuePolicy())
    returning(store, 1, 120)
    taken = store.stats().bytes_in_use
    store = make_store(taken + room + SLOT_BYTES - 200, LAYOUT, policy=ValuePolicy())
    returning(store, 1, 120)
    return read(9, tokens).park(store)


def test_a_part_is_worth_parking_from_one_in_eight_on():
    """As far as it fits without an eviction, if that is at least one token of eight, and a block."""
    whole = part_of(16, 16)
    assert isinstance(whole, Parked), "it fits whole"
    limit = part_of(16, 100).position
    assert 16 <= limit < 20
    assert part_of(16, limit * 8).position == limit
    refused = part_of(16, limit * 8 + 1)
    assert isinstance(refused, Refused)
    assert refused.reason is RefusalReason.VALUE


def test_blocks_beyond_the_last_checkpoint_are_not_kept():
    """The live rows descend from more than can be parked: what is behind the last checkpoint cannot be resumed."""
    store, engine = make_store(8 << 20, FIXED), read(1, 8, FIXED, checkpoint=True)
    engine.extend(make_units(2, 4), checkpoint=True)
    longer = engine.park(store)
    del engine.fixed[12]
    with store.lease(longer.id, 12):
        store.drop(longer.id, "a test")
        engine.extend(make_units(3, 2))
        parked = engine.park(store)
        assert (parked.position, parked.blocks) == (8, longer.blocks[:2])
        assert_counts(store)
    assert_counts(store)
    assert set(store.inspect().blocks) == set(parked.blocks)


def opaque(grain=Grain.OPAQUE, **options):
    layout = whole_layout(grain, FIXED_BYTES)
    return make_store(8 << 20, layout, **options), WholeEngine(layout, BLOCK, 1, FaultFs())


@pytest.mark.parametrize("size", [100, 50_000])
def test_a_checkpoint_of_an_opaque_state_is_reserved_at_its_own_size(size):
    """Not at the layout's, which is an estimate."""
    store, engine = opaque()
    engine.read(make_units(1, 8), checkpoint=True).extend(make_units(2, 8), checkpoint=True)
    request = engine.request()
    request = replace(request, sizes=StateSizes(request.sizes.whole, (size, 0)))
    pages = -(-size // 4096) + -(-request.sizes.whole // 4096)
    exact = pages * 4096 + described(16) + BLOCK_BYTES
    for budget, fits in ((exact, True), (exact - 1, False)):
        store, _ = opaque()
        store = make_store(budget, store.layout)
        outcome = store.begin_capture(request)
        assert isinstance(outcome, Refused) == (not fits)
        if fits:
            [stage] = outcome.transfer.stages
            assert [part.buffer.nbytes for part in stage.fixed] == [size, 0]
            store.abort(outcome)


def test_an_opaque_state_that_is_worth_less_is_refused_by_its_bytes():
    """What it takes is its own size, not that of a block of rows."""
    layout = whole_layout(Grain.OPAQUE)
    for turns, reason in ((6, RefusalReason.VALUE),):
        store = make_store(20 * 2800 * 2, layout, policy=ValuePolicy())
        engine = WholeEngine(layout, BLOCK, 1, FaultFs()).read(make_units(1, 20 - turns))
        for turn in range(turns):
            store.clock.now += 60.0
            engine.extend(make_units(10 + turn, 1))
            chat = engine.park(store)
        assert isinstance(chat, Parked)
        other = WholeEngine(layout, BLOCK, 2, FaultFs()).read(make_units(2, 20))
        refused = other.park(store)
        assert isinstance(refused, Refused)
        assert refused.reason is reason
        assert store.get(chat.id) is not None


def test_one_that_was_used_since_it_was_rated_stays():
    """A rating may be kept from capture to capture, but not over a use."""
    store = make_store(3 * size_of(40, 10) + 2 * SLOT_BYTES + 4000, LAYOUT, policy=LruPolicy())
    ids = [read(seed, 40).park(store).id for seed in (1, 2, 3, 4)]
    assert store.get(ids[0]) is None, "all were rated for the fourth"
    store.touch(ids[1])
    fifth = read(5, 40).park(store)
    assert set(store.inspect().conversations) == {ids[1], ids[3], fifth.id}


def test_the_other_side_of_the_switch_is_the_one_used_last():
    store = make_store(3 * size_of(40, 10) + 2 * SLOT_BYTES + 4000, LAYOUT, policy=_Fixed())
    ids = [read(seed, 40).park(store).id for seed in (1, 2, 3)]
    store.touch(ids[0])
    fourth = read(4, 40).park(store)
    assert set(store.inspect().conversations) == {ids[0], ids[2], fourth.id}


class _Fixed(LruPolicy):
    """All are worth the same."""

    def score(self, candidate, costs, now_s):
        return 1.0


def test_what_shares_nothing_with_a_queued_prompt_is_not_kept_for_it():
    store = make_store(8 << 20, LAYOUT)
    parked = read(1, 20).park(store)
    store.expect(parked.key_digest, make_hashes(make_units(2, 20), BLOCK))
    assert store.inspect().conversations[parked.id].awaited == 0
    store.expect(parked.key_digest, parked.prefix_hashes[:1])
    assert store.inspect().conversations[parked.id].awaited == 1


def test_the_bytes_stay_until_the_last_of_two_leases_ends():
    store, engine = make_store(8 << 20, LAYOUT), read(1, 20)
    parked = engine.park(store)
    leases = [store.lease(parked.id, 20) for _ in range(2)]
    store.drop(parked.id, "a test")
    leases[0].release()
    assert set(store.inspect().blocks) == set(parked.blocks)
    [run] = leases[1].transfer.stages[0].rows
    assert np.array_equal(run.buffer, engine.rows()[0].reshape(-1))
    leases[1].release()
    assert dict(store.inspect().blocks) == {}
