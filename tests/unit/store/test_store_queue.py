"""The order in which conversations go for one capture, step by step."""

from __future__ import annotations

import pytest

from parkd.state import Costs
from parkd.store.eviction import Queue
from parkd.store.policy import LruPolicy
from parkd.store.records import Parked
from tests.unit.store.store_kit import CopyEngine, assert_counts, make_layout, make_store, make_units

LAYOUT = make_layout((1024, 1024))


class Alike(LruPolicy):
    """All are worth the same: of equals, the one parked first goes first."""

    def score(self, candidate, costs, now_s):
        return 1.0


class Tokens(LruPolicy):
    """Worth what would be freed."""

    def score(self, candidate, costs, now_s):
        return float(candidate.freed_tokens)


def read(seed: int, tokens: int = 40) -> CopyEngine:
    return CopyEngine(LAYOUT, seed=seed).read(make_units(seed, tokens))


def branch(store, parent: Parked, stop: int, seed: int, tokens: int) -> Parked:
    engine = CopyEngine(LAYOUT, seed=seed)
    with store.lease(parent.id, stop) as lease:
        engine.restore(lease)
    engine.extend(make_units(seed, tokens))
    return engine.park(store)


def queue_of(store, policy=None, family=(), superseded=()) -> Queue:
    known = store.table.known
    return Queue(
        store.table,
        policy or Alike(),
        Costs(),
        store.clock(),
        family=[known(each.id) for each in family],
        superseded=[known(each.id) for each in superseded],
    )


def popped(store, queue: Queue) -> list[str]:
    gone = []
    while len(queue):
        gone.append(queue.pop())
        store.table.evict(gone[-1], "a test")
    return [each.id for each in gone]


def test_what_is_superseded_goes_first_and_the_other_side_of_the_switch_last():
    store = make_store(8 << 20, LAYOUT)
    first, second, third, ancestor = (read(seed).park(store) for seed in (1, 2, 3, 4))
    store.touch(first.id)
    store.touch(ancestor.id)
    assert len(queue_of(store)) == 4, "all are rated from here on"
    queue = queue_of(store, family=[ancestor], superseded=[ancestor])
    assert len(queue) == 4
    assert popped(store, queue) == [ancestor.id, second.id, third.id, first.id]


def test_an_ancestor_that_stays_is_no_other_side_of_the_switch():
    """It is kept by what it shares, if at all."""
    store = make_store(8 << 20, LAYOUT)
    ancestor, first, second = (read(seed).park(store) for seed in (1, 2, 3))
    store.touch(ancestor.id)
    assert popped(store, queue_of(store, family=[ancestor])) == [ancestor.id, first.id, second.id]


@pytest.mark.parametrize("how", ["lease", "pin", "await"])
def test_what_may_not_go_is_no_candidate_even_when_what_it_shares_changes(how):
    store = make_store(8 << 20, LAYOUT)
    kept = read(1).park(store)
    gone = branch(store, kept, 20, 2, 20)
    if how == "lease":
        lease = store.lease(kept.id, 40)
    elif how == "pin":
        store.pin(kept.id)
    else:
        store.expect(kept.key_digest, kept.prefix_hashes)
    other = read(3).park(store)
    assert popped(store, queue_of(store)) == [gone.id, other.id]
    assert set(store.inspect().conversations) == {kept.id}
    if how == "lease":
        lease.release()
    assert_counts(store)


def test_one_is_rated_anew_when_what_it_shared_becomes_its_own():
    """Its worth is what it would free then."""
    store = make_store(8 << 20, LAYOUT)
    parent = read(1, 40).park(store)
    worker = branch(store, parent, 36, 2, 8)
    other = read(3, 20).park(store)
    queue = queue_of(store, Tokens(), family=[other])
    assert queue.freed_slots == 1 + 2 + 5, "the nine blocks that two share count for neither"
    assert popped(store, queue)[0] == parent.id, "only the last block is its own"
    assert set(store.inspect().conversations) == set()
    parent = read(1, 40).park(store)
    worker = branch(store, parent, 36, 2, 8)
    other = read(3, 20).park(store)
    queue, late = queue_of(store, Tokens(), family=[worker, other, parent]), queue_of(store, Tokens())
    assert len(late) == 3
    assert popped(store, queue) == [parent.id, other.id, worker.id], "the worker has eleven blocks then, not two"


def test_a_capture_in_flight_that_is_left_alone_with_shared_blocks_is_no_candidate():
    """It holds what its parent held too: the parent's end changes what it holds alone, but it is not rated."""
    store, engine = make_store(8 << 20, LAYOUT), CopyEngine(LAYOUT)
    parent, other = read(1).park(store), read(2).park(store)
    with store.lease(parent.id, 40) as lease:
        engine.restore(lease)
    engine.extend(make_units(3, 8))
    capture = store.begin_capture(engine.request())
    store.drop(parent.id, "a test")
    assert popped(store, queue_of(store)) == [other.id]
    assert engine.finish(store, capture).blocks[:10] == parent.blocks
    assert_counts(store)


def test_what_is_worth_something_raises_the_floor():
    """Greedy-dual: what is used now is worth more than the best that was evicted so far. What is superseded, or frees
    nothing, says nothing of that."""
    store = make_store(8 << 20, LAYOUT)
    ancestor, other = read(1).park(store), read(2).park(store)
    queue = queue_of(store, superseded=[ancestor])
    assert queue.pop().id == ancestor.id
    assert store.table.floor == 0.0
    store.table.evict(store.table.known(ancestor.id), "a test")
    assert queue.pop().id == other.id
    assert store.table.floor == 1.0
    store.touch(other.id)
    assert store.table.known(other.id).ram.floor == 1.0


def test_what_frees_nothing_raises_no_floor():
    store = make_store(8 << 20, LAYOUT)
    engine = read(1, 20)
    longer = engine.park(store)
    engine.truncate(8)
    shorter = engine.park(store)
    store.pin(longer.id)
    queue = queue_of(store)
    assert queue.pop().id == shorter.id
    assert store.table.floor == 0.0
    assert queue.freed_slots == 0


def test_a_toll_is_the_best_of_what_would_go():
    store = make_store(8 << 20, LAYOUT)
    sizes = {read(seed, tokens).park(store).id: tokens for seed, tokens in ((1, 8), (2, 16), (3, 24), (4, 32))}
    block_bytes = 4 * 2048
    queue = queue_of(store, Tokens(), family=[store.get(next(iter(sizes)))])
    for wanted_bytes, wanted, most, count in (
        (0, 0, float("-inf"), 0),
        (1, 0, 8.0, 1),
        (2 * block_bytes, 0, 8.0, 1),
        (2 * block_bytes + 1, 0, 16.0, 2),
        (0, 1, 8.0, 1),
        (0, 3, 24.0, 3),
        (1 << 30, 0, 32.0, 4),
    ):
        toll = queue.foresee(wanted_bytes, wanted)
        assert (toll.most_score, toll.count) == (most, count), (wanted_bytes, wanted)
    assert len(queue) == 4, "nothing was evicted"


def test_what_is_superseded_costs_no_toll():
    store = make_store(8 << 20, LAYOUT)
    ancestor, other = read(1).park(store), read(2, 8).park(store)
    queue = queue_of(store, Tokens(), family=[ancestor], superseded=[ancestor])
    assert queue.foresee(1, 0).most_score == float("-inf")
    assert queue.foresee(1 << 30, 0).most_score == 8.0
    assert other.position == 8


def test_what_frees_nothing_costs_no_toll():
    store = make_store(8 << 20, LAYOUT)
    engine = read(1, 20)
    longer = engine.park(store)
    engine.truncate(8)
    engine.park(store)
    store.pin(longer.id)
    toll = queue_of(store).foresee(0, 1)
    assert (toll.most_score, toll.count) == (float("-inf"), 1)


def test_a_rating_is_used_again_as_long_as_it_is_steady():
    store, asked = make_store(8 << 20, LAYOUT), []

    class Steady(LruPolicy):
        def score(self, candidate, costs, now_s):
            asked.append(candidate.id)
            return super().score(candidate, costs, now_s)

        def steady_s(self, history, idle_s):
            return 10.0

    first, second = (read(seed).park(store) for seed in (1, 2))
    for now_s, rated in ((2000.0, {first.id, second.id}), (2010.0, set()), (2010.5, {first.id, second.id})):
        asked.clear()
        Queue(store.table, Steady(), Costs(), now_s, family=[], superseded=[])
        assert set(asked) == rated, now_s
