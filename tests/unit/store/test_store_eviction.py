"""Budgets, slot bounds, who goes, and what fits in part."""

from __future__ import annotations

import pytest

from parkd.store.planning import plan_capture
from parkd.store.policy import longest_position
from parkd.store.records import Parked, RefusalReason, Refused
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

LAYOUT = make_layout((1024, 1024))
BLOCK = 4
SLOT_BYTES = BLOCK * 2048


@pytest.fixture
def engine() -> CopyEngine:
    return CopyEngine(LAYOUT)


def budget_for(conversations: int, tokens: int) -> int:
    """Holds so many conversations of `tokens` and two blocks more."""
    probe, engine = make_store(64 << 20, LAYOUT), CopyEngine(LAYOUT)
    engine.read(make_units(1, tokens)).park(probe)
    return probe.stats().bytes_in_use * conversations + 2 * SLOT_BYTES + 4000


def test_five_conversations_round_robin_in_room_for_three(engine):
    store = make_store(budget_for(3, 120), LAYOUT)
    saved: dict[int, tuple[Parked, list]] = {}
    hits = 0
    for turn in range(20):
        who = turn % 5
        if who in saved and store.get(saved[who][0].id) is not None:
            assert_same_rows(leased_rows(store, saved[who][0]), saved[who][1])
            hits += 1
        parked = engine.read(make_units(100 + who, 120)).park(store)
        assert isinstance(parked, Parked)
        saved[who] = parked, engine.rows()
        assert store.stats().conversations <= 3
        assert_counts(store)
    assert store.stats().conversations == 3
    assert hits == 0
    last = [saved[who][0] for who in (2, 3, 4)]
    assert all(store.get(parked.id) is not None for parked in last)


def test_the_least_recently_used_goes(engine):
    store = make_store(budget_for(3, 120), LAYOUT)
    first, second, third = (engine.read(make_units(seed, 120)).park(store) for seed in (1, 2, 3))
    store.touch(first.id)
    engine.read(make_units(4, 120)).park(store)
    assert store.get(second.id) is None
    assert store.get(first.id) is not None
    assert store.get(third.id) is not None


def test_leased_and_pinned_never_go(engine):
    store = make_store(budget_for(3, 120), LAYOUT)
    first, second, third = (engine.read(make_units(seed, 120)).park(store) for seed in (1, 2, 3))
    store.pin(first.id)
    with store.lease(second.id, 120):
        engine.read(make_units(4, 120)).park(store)
        assert store.get(third.id) is None
        fifth = engine.read(make_units(5, 120)).park(store)
        assert isinstance(fifth, Parked)
        assert store.get(first.id) is not None
        assert store.get(second.id) is not None
    assert_counts(store)


def test_refused_when_nothing_may_go_and_nobody_is_evicted_for_it(engine):
    store = make_store(budget_for(3, 120) - 2 * SLOT_BYTES - 2000, LAYOUT)
    first, second, third = (engine.read(make_units(seed, 120)).park(store) for seed in (1, 2, 3))
    store.pin(first.id)
    store.pin(third.id)
    with store.lease(second.id, 100):
        refused = engine.read(make_units(5, 2000)).park(store)
    assert isinstance(refused, Refused)
    assert refused.reason is RefusalReason.BUDGET
    assert store.stats().evictions_total == 0
    assert store.stats().conversations == 3
    assert isinstance(engine.park(store), Parked)
    assert store.get(second.id) is None
    assert_counts(store)


def test_a_refusal_says_what_was_missing(engine):
    store = make_store(5000, LAYOUT)
    refused = engine.read(make_units(3, 400)).park(store)
    assert isinstance(refused, Refused)
    assert refused.reason is RefusalReason.BUDGET
    assert refused.message == "needs 0.8 MiB, 0.0 MiB could be freed"
    assert store.stats().refusals_total == {"budget": 1}
    assert store.stats().bytes_in_use == 0


def test_what_does_not_fit_is_parked_as_far_as_it_fits(engine):
    store = make_store(300_000, LAYOUT)
    parked = engine.read(make_units(1, 2000)).park(store)
    assert 100 < parked.position < 2000
    assert store.stats().partial_captures_total == 1
    assert_same_rows(leased_rows(store, parked), engine.rows(parked.position))
    plan = plan_capture(store.table, engine.read(make_units(1, 2000)).request(), 16)
    assert not store.table.memory.fits(plan.need(parked.position + 4), store.table.most_room()[0])


def test_a_longer_copy_that_fits_no_further_than_the_parked_one_is_refused(engine):
    store = make_store(300_000, LAYOUT)
    parked = engine.read(make_units(1, 2000)).park(store)
    refused = engine.park(store)
    assert isinstance(refused, Refused)
    assert refused.message.endswith(
        f"its first {parked.position} tokens would fit, {parked.position} are parked already"
    )
    assert store.get(parked.id) is not None
    assert_counts(store)


@pytest.mark.parametrize(("place", "is_parked"), [(BLOCK - 1, False), (BLOCK, True)])
def test_a_head_of_less_than_a_block_is_not_parked_and_nobody_goes_for_it(place, is_parked):
    """A checkpoint behind the first few tokens is a whole copy of the fixed state."""
    layout = make_layout((1024, 1024), (5000, 5000))
    store = make_store(100_000, layout)
    short = CopyEngine(layout).read(make_units(1, 4), checkpoint=True).park(store)
    engine = CopyEngine(layout).read(make_units(2, place), checkpoint=True)
    engine.extend(make_units(3, 400), checkpoint=True)
    head = engine.park(store)
    if is_parked:
        assert head.position == place
    else:
        assert isinstance(head, Refused)
        assert head.reason is RefusalReason.BUDGET
        assert store.get(short.id) is not None
    assert_counts(store)


def test_what_is_short_as_a_whole_is_parked_whole(engine):
    store = make_store(100_000, LAYOUT)
    assert engine.read(make_units(1, BLOCK - 1)).park(store).position == BLOCK - 1


def test_growth_in_a_full_store_evicts_its_own_ancestor_before_others(engine):
    store = make_store(budget_for(2, 122), LAYOUT)
    other = engine.read(make_units(1, 122)).park(store)
    engine.read(make_units(2, 122)).park(store)
    engine.extend(make_units(3, 10))
    grown = engine.park(store)
    assert store.stats().evictions_total == 1
    assert grown.position == 132
    assert_same_rows(leased_rows(store, grown), engine.rows())
    assert store.get(other.id) is not None
    assert_counts(store)


@pytest.mark.parametrize("bound", [1, 2])
def test_the_slot_bound_holds_and_growth_takes_its_ancestors_place(engine, bound):
    store = make_store(4 << 20, LAYOUT, slots=bound)
    for seed in range(4):
        engine.read(make_units(seed, 20)).park(store)
        assert_counts(store)
    assert store.stats().evictions_total == 4 - bound
    engine.extend(make_units(9, 20))
    capture = store.begin_capture(engine.request())
    assert store.stats().conversations == bound
    store.abort(capture)
    engine.park(store)
    assert store.stats().evictions_total == 4 - bound
    assert store.stats().conversations == bound
    assert_counts(store)


def test_two_captures_do_not_count_on_the_same_ancestors_slot(engine):
    store = make_store(4 << 20, LAYOUT, slots=2)
    parent = engine.read(make_units(1, 20)).park(store)
    captures = []
    for seed in (2, 3):
        with store.lease(parent.id, 20) as lease:
            engine.restore(lease)
        engine.extend(make_units(seed, 8))
        capture = store.begin_capture(engine.request())
        captures.append((capture, engine.capture(capture.transfer)))
    with store.lease(parent.id, 20):
        refused = engine.read(make_units(4, 20)).park(store)
        assert refused.reason is RefusalReason.SLOTS
    for capture, sums in captures:
        store.commit(capture, sums)
        assert_counts(store)
    assert store.stats().conversations == 2


def test_why_gone_tells_of_evictions_drops_and_refusals(engine):
    store = make_store(budget_for(1, 120), LAYOUT)
    first = engine.read(make_units(1, 120)).park(store)
    second = engine.read(make_units(2, 120)).park(store)
    assert store.why_gone(KEY, first.prefix_hashes).startswith("evicted ")
    assert "needed for another conversation" in store.why_gone(KEY, first.prefix_hashes)
    assert store.why_gone(KEY, second.prefix_hashes) == ""
    longer = (*make_hashes(engine.units, 4), b"y" * 16)
    store.drop(second.id, "a checksum did not match")
    assert store.why_gone(KEY, longer).endswith("s ago: a checksum did not match")
    assert store.why_gone(b"z" * 16, longer) == ""


def test_memory_of_what_is_gone_is_bounded(engine):
    store = make_store(4 << 20, LAYOUT)
    for seed in range(140):
        parked = engine.read(make_units(seed, 100)).park(store)
        store.drop(parked.id, f"number {seed}")
    assert store.why_gone(KEY, parked.prefix_hashes).endswith("number 139")
    assert store.why_gone(KEY, make_hashes(make_units(0, 100), 4)) == ""
    held_bytes, limit_bytes = store.histories_bytes
    assert 0 < held_bytes <= limit_bytes
    known = [seed for seed in range(140) if store.why_gone(KEY, make_hashes(make_units(seed, 100), 4))]
    assert known == list(range(140 - len(known), 140)), "the oldest went"


@pytest.mark.parametrize("limit", [0, 1, 7, 99, 100, 101])
def test_longest_position_is_the_last_that_fits(limit):
    assert longest_position(100, None, lambda position: position <= limit) == min(limit, 100)
    places = (3, 50, 100)
    expected = max((place for place in places if place <= limit), default=0)
    assert longest_position(100, places, lambda position: position <= limit) == expected
