"""Who goes first, who is refused, and what no policy may touch. Reports 6, 8, 25, 31."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parkd.state import Costs
from parkd.store.history import FIRST_GAP_S, GHOST_LIMIT, Ghosts, History
from parkd.store.policy import POLICIES, Evictable, GdsfPolicy, LruPolicy, ValuePolicy, policy_named, rank
from parkd.store.records import Parked, RefusalReason, Refused
from tests.unit.store.store_kit import CopyEngine, assert_counts, make_layout, make_store, make_units

COSTS = Costs(read_s=1e-3, read_growth_s=1e-7, bytes_per_s=1e9)
LAYOUT = make_layout((1024, 1024))
DAY_S = 86_400.0


def evictable(name="a", *, used=0.0, tokens=1000, position=1000, history=History(), floor=0.0) -> Evictable:  # noqa: B008
    return Evictable(name, position, tokens * 1000, used, used, tokens, history, floor)


def order(policy, candidates, now_s=100.0, *, superseded=(), partner=None) -> list[str]:
    return sorted(
        (each.id for each in candidates),
        key=lambda name: next(
            rank(each, policy.score(each, COSTS, now_s), is_superseded=name in superseded, is_partner=name == partner)
            for each in candidates
            if each.id == name
        ),
    )


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_superseded_ones_go_first_the_partner_late_and_what_frees_nothing_last(policy):
    parent = evictable("parent", tokens=0, used=1)
    ancestor = evictable("ancestor", tokens=0, used=90)
    partner, old = evictable("partner", used=2), evictable("old", used=50)
    found = order(policy, [parent, partner, old, ancestor], superseded={"ancestor"}, partner="partner")
    assert found == ["ancestor", "old", "partner", "parent"]


def test_lru_goes_by_last_use():
    assert order(LruPolicy(), [evictable("b", used=2), evictable("c", used=3), evictable("a", used=1)]) == [*"abc"]


def test_gdsf_prefers_what_is_used_often_or_costs_more_a_byte_and_lets_the_unused_sink():
    policy = GdsfPolicy()
    once, often = evictable("once"), evictable("often", history=History(turns=4))
    deep = evictable("deep", position=50_000)
    assert order(policy, [often, once]) == ["once", "often"]
    assert order(policy, [deep, once]) == ["once", "deep"]
    raised = policy.score(often, COSTS, 0.0) * 2
    assert order(policy, [often, evictable("new", floor=raised)]) == ["often", "new"]


def test_value_keeps_conversations_that_return_over_first_turns():
    policy, chat = ValuePolicy(), History(turns=5)
    assert order(policy, [evictable("chat", used=0, history=chat), evictable("shot", used=90)]) == ["shot", "chat"]


def test_value_lets_go_of_what_has_been_silent_for_long():
    policy, now_s = ValuePolicy(), DAY_S
    silent, shot = evictable("silent", used=0, history=History(turns=6)), evictable("shot", used=now_s - 5)
    assert order(policy, [shot, silent], now_s) == ["silent", "shot"]


def test_value_evicts_the_agent_whose_turn_is_furthest_off():
    policy, regular = ValuePolicy(), History(turns=8, gap_s=80.0, jitter=0.15)
    agents = [evictable(str(place), used=place * 10.0, history=regular) for place in range(8)]
    assert order(policy, agents, 75.0)[0] == "7"
    assert order(policy, agents, 75.0)[-1] == "0"


def test_value_counts_only_the_tail_that_no_one_else_holds_and_the_restore():
    deep_tail, shallow = evictable(position=80_000, tokens=1000), evictable(position=1000, tokens=1000)
    assert deep_tail.saved_s(COSTS) > shallow.saved_s(COSTS)
    assert COSTS.reading_s(0, 1000) == pytest.approx(1000 * 1e-3 + 1e-7 * 999 * 1000 / 2)
    slow = Costs(read_s=1e-6, bytes_per_s=1e3)
    assert shallow.saved_s(slow) == 0.0  # report 54: reading is cheaper than restoring, so it is worth nothing


def test_what_lies_on_disk_goes_before_what_would_be_read_again():
    on_disk = evictable("on disk", position=50_000)._replace(is_on_disk=True)
    costs = Costs(read_s=1e-3, bytes_per_s=1e9, disk_bytes_per_s=5e6)
    assert on_disk.saved_s(costs) == pytest.approx(1000 * 1000 / 5e6)  # the promotion, not the reading
    slow = Costs(read_s=1e-3, bytes_per_s=1e9, disk_bytes_per_s=1e3)
    assert on_disk.saved_s(slow) == on_disk._replace(is_on_disk=False).saved_s(slow)  # it would be read again instead
    for policy in (ValuePolicy(), GdsfPolicy()):
        kept, gone = on_disk._replace(id="kept", is_on_disk=False), on_disk
        assert policy.score(gone, costs, 100.0) < policy.score(kept, costs, 100.0)


@settings(max_examples=200, deadline=None)
@given(
    turns=st.integers(1, 1000),
    gap_s=st.floats(0, 1e9),
    jitter=st.floats(0.15, 1.0),
    idle_s=st.floats(-10, 1e12),
    tokens=st.integers(0, 200_000),
)
def test_scores_are_finite_and_a_longer_silence_never_makes_a_return_likelier(turns, gap_s, jitter, idle_s, tokens):
    history = History(turns=turns, gap_s=gap_s, jitter=jitter)
    candidate = evictable(position=200_000, tokens=tokens, history=history)
    for policy in POLICIES:
        score = policy.score(candidate, COSTS, idle_s)
        assert math.isfinite(score)
        assert policy.steady_s(history, idle_s) >= 0
    value = ValuePolicy()
    later, sooner = (value.return_probability(history, idle) for idle in (idle_s * 2 + 1, idle_s))
    assert 0 <= later <= sooner * (1 + 1e-9) <= 1 + 1e-9


def test_policies_have_names():
    assert [policy_named(policy.name) for policy in POLICIES] == list(POLICIES)
    assert POLICIES[0].name == "value"
    with pytest.raises(KeyError):
        policy_named("random")


def test_a_history_learns_the_gap_and_how_regular_it_is():
    history = History()
    assert (history.turns, history.gap_s, history.jitter) == (1, FIRST_GAP_S, 1.0)
    for _ in range(12):
        history = history.returned(60.0)
    assert history.turns == 13
    assert history.gap_s == pytest.approx(60.0)
    assert history.jitter == pytest.approx(0.15)
    assert history.returned(6000.0).jitter > 0.3
    assert history.forked(60.0).turns == 13


def test_ghosts_tell_a_return_from_a_shared_head_and_from_the_same_offer():
    ghosts, chain = Ghosts(), tuple(bytes([index]) for index in range(10))
    ghosts.note(chain[:6], 600, History(turns=3), 10.0)
    assert ghosts.next(chain[:8], 800, 70.0).turns == 4
    assert ghosts.next(chain[:6], 600, 70.0).turns == 3  # the very same state, offered again
    longer = chain + tuple(bytes([100 + index]) for index in range(10))
    assert ghosts.next(longer, 2000, 70.0).turns == 1  # shares less than half: another conversation
    assert ghosts.next((), 10, 70.0) == History()
    ghosts.note(chain[:6], 600, History(turns=9), 50.0)  # offered again after a refusal: it is known since 10 s
    expected = History(turns=3).returned(60.0)
    assert ghosts.next(chain[:8], 800, 70.0) == expected
    ghosts.note(chain[:6], 650, History(turns=9), 50.0)  # the same blocks and a longer tail
    assert ghosts.next(chain[:8], 800, 70.0) == History(turns=9).returned(20.0)
    for number in range(GHOST_LIMIT + 10):
        ghosts.note((number.to_bytes(4, "big"),), 256, History(), 0.0)
    assert len(ghosts) == GHOST_LIMIT
    assert ghosts.next(chain[:8], 800, 70.0).turns == 1


def room_for(conversations: int, tokens: int) -> int:
    probe, engine = make_store(64 << 20, LAYOUT), CopyEngine(LAYOUT)
    engine.read(make_units(1, tokens)).park(probe)
    return probe.stats().bytes_in_use * conversations + 20_000


def returning(store, engine, seed: int, tokens: int, turns: int) -> Parked:
    """A conversation that came back so often."""
    engine.read(make_units(seed, tokens - 4 * turns))
    for turn in range(turns):
        store.clock.now += 60.0
        engine.extend(make_units(seed * 100 + turn, 4))
        parked = engine.park(store)
    return parked


def test_one_shots_do_not_displace_conversations_that_return():
    """Reports 25 and 31: a flood of prompts that no one sends again evicts each other at most."""
    store, engine = make_store(room_for(4, 120), LAYOUT, policy=ValuePolicy()), CopyEngine(LAYOUT)
    chats = [returning(store, engine, seed, 120, 5) for seed in (1, 2)]
    for seed in range(50, 80):
        engine.read(make_units(seed, 120)).park(store)
        assert_counts(store)
    assert all(store.get(chat.id) is not None for chat in chats)
    stats = store.stats()
    assert stats.evictions_total + stats.refusals_total.get("value", 0) >= 28
    assert stats.evictions_total <= 5  # hysteresis: equals do not push each other out in turns


def test_under_lru_the_same_flood_evicts_them():
    store, engine = make_store(room_for(4, 120), LAYOUT, policy=LruPolicy()), CopyEngine(LAYOUT)
    chats = [returning(store, engine, seed, 120, 5) for seed in (1, 2)]
    for seed in range(50, 60):
        engine.read(make_units(seed, 120)).park(store)
    assert all(store.get(chat.id) is None for chat in chats)


def test_a_refusal_for_worth_evicts_nobody_and_says_why():
    store, engine = make_store(room_for(2, 120), LAYOUT, policy=ValuePolicy()), CopyEngine(LAYOUT)
    chats = [returning(store, engine, seed, 120, 6) for seed in (1, 2)]
    before = store.stats().evictions_total
    refused = engine.read(make_units(9, 120)).park(store)
    assert isinstance(refused, Refused)
    assert refused.reason is RefusalReason.VALUE
    assert store.stats().evictions_total == before
    assert all(store.get(chat.id) is not None for chat in chats)
    assert "expected to save more" in store.why_gone(engine.request().key_digest, engine.request().prefix_hashes)


def test_what_is_not_worth_an_eviction_is_parked_as_far_as_it_fits():
    """Agents that go round: what two of three leave free holds the third one's head."""
    store = make_store(room_for(2, 120) + 60 * 2048, LAYOUT, policy=ValuePolicy())
    agents = [CopyEngine(LAYOUT).read(make_units(seed, 96)) for seed in (1, 2)]
    for turn in range(6):
        for seed, agent in enumerate(agents):
            store.clock.now += 30.0
            agent.extend(make_units(seed * 100 + turn, 4))
            agent.park(store)
    chats, engine = [agent.park(store) for agent in agents], CopyEngine(LAYOUT)
    before = store.stats().evictions_total
    part = engine.read(make_units(9, 120)).park(store)
    assert isinstance(part, Parked)
    assert 15 <= part.position < 120
    assert store.stats().evictions_total == before
    assert all(store.get(chat.id) is not None for chat in chats)
    again = engine.read(make_units(8, 1200)).park(store)
    assert isinstance(again, Refused), "a scrap is worth no copy"


def test_a_regular_agent_that_is_overdue_is_given_up_sooner_than_a_person():
    """One that was compacted away never returns; its place is wanted for what came of it."""
    policy = ValuePolicy()
    agent, person = History(8, gap_s=40.0, jitter=0.15), History(8, gap_s=40.0, jitter=1.0)
    assert policy.return_probability(agent, 20.0) > policy.return_probability(person, 20.0)
    assert policy.return_probability(agent, 52.0) < policy.return_probability(person, 52.0)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_every_turn_of_one_conversation_leaves_one_record(policy):
    """Report 6: snapshots of every turn must not push others out."""
    store, engine = make_store(room_for(3, 200), LAYOUT, policy=policy), CopyEngine(LAYOUT)
    other = engine.read(make_units(1, 120)).park(store)
    engine.read(make_units(2, 40))
    for turn in range(30):
        engine.extend(make_units(10 + turn, 4))
        engine.park(store)
    assert store.get(other.id) is not None
    assert (store.stats().conversations, store.stats().evictions_total) == (2, 0)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_workers_share_their_parents_head_and_do_not_evict_it(policy):
    """Report 8."""
    store, engine = make_store(room_for(2, 200), LAYOUT, policy=policy), CopyEngine(LAYOUT)
    parent = engine.read(make_units(1, 160)).park(store)
    for worker in range(12):
        with store.lease(parent.id, 120) as lease:
            engine.restore(lease)
        engine.extend(make_units(10 + worker, 24))
        engine.park(store)
    assert store.get(parent.id) is not None
    assert store.stats().shared_blocks >= 30, "the head is there once"
    assert_counts(store)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_one_that_is_rated_anew_while_others_go_is_still_one(policy):
    """What the first victim shared with its parent is the parent's own from then on, and its rank stays as it was."""
    store, engine = make_store(room_for(2, 200), LAYOUT, policy=policy), CopyEngine(LAYOUT)
    parent = engine.read(make_units(1, 160)).park(store)
    for seed, stop in ((2, 120), (3, 80)):
        with store.lease(parent.id, stop) as lease:
            engine.restore(lease)
        engine.extend(make_units(seed, 40))
        assert isinstance(engine.park(store), Parked)
    engine.read(make_units(9, 300)).park(store)
    assert_counts(store)
    if policy.name == "lru":
        assert store.stats().evictions_total >= 2


def test_what_a_queued_request_starts_from_stays_until_it_is_released():
    store, engine = make_store(room_for(2, 120), LAYOUT, policy=LruPolicy()), CopyEngine(LAYOUT)
    awaited = engine.read(make_units(1, 120)).park(store)
    release = store.expect(awaited.key_digest, awaited.prefix_hashes)
    for seed in range(2, 8):
        engine.read(make_units(seed, 120)).park(store)
    assert store.get(awaited.id) is not None
    release()
    release()
    for seed in range(8, 12):
        engine.read(make_units(seed, 120)).park(store)
    assert store.get(awaited.id) is None
    store.expect(b"x" * 16, (b"y" * 16,))()  # nothing is known of it: nothing is kept


@settings(max_examples=12, deadline=None)
@given(data=st.data(), policy=st.sampled_from(POLICIES))
def test_no_policy_evicts_what_is_pinned_leased_or_awaited_nor_breaks_the_budget(data, policy):
    store, engine = make_store(room_for(4, 100), LAYOUT, policy=policy), CopyEngine(LAYOUT)
    leases, releases, kept = [], [], set()
    for step in range(14):
        engine.read(make_units(data.draw(st.integers(0, 9)), 20 * data.draw(st.integers(1, 6))))
        parked = engine.park(store)
        if isinstance(parked, Parked) and len(kept) + len(leases) < 2:
            how = data.draw(st.sampled_from(("pin", "lease", "await", "none")))
            if how == "pin":
                store.pin(parked.id)
            elif how == "lease":
                leases.append(store.lease(parked.id, parked.position))
            elif how == "await":
                releases.append(store.expect(parked.key_digest, parked.prefix_hashes))
            if how in ("pin", "await"):
                kept.add((parked.units.tobytes(), len(parked.units)))
        assert_counts(store)
        for entry_units, length in kept:
            there = [e.parked.units for e in store.table.in_ram.values()]
            assert any(u[:length].tobytes() == entry_units for u in there), step
        held = [block for lease in leases for block in lease.parked.blocks]
        assert all(store.table.blocks.get(block) is not None for block in held)
    for lease in leases:
        lease.release()


def test_parking_stops_at_the_memory_floor_and_goes_on_in_memory_it_has():
    free = [100 << 20]
    store = make_store(8 << 20, LAYOUT, free_memory=lambda: free[0], min_free_bytes=64 << 20)
    engine = CopyEngine(LAYOUT)
    first = engine.read(make_units(1, 400)).park(store)
    free[0] = 64 << 20
    refused = engine.read(make_units(2, 400)).park(store)
    assert isinstance(refused, Refused)
    assert refused.reason is RefusalReason.MEMORY_FLOOR
    assert "64.0 MiB must stay free" in refused.message
    free[0] += 1 << 18  # room for metadata, not for rows: those go where rows lay before
    store.drop(first.id, "test")
    assert isinstance(engine.park(store), Parked)
