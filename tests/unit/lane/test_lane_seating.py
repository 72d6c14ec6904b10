"""In which seat a turn runs, and which conversations make way for it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import permutations

import numpy as np
import pytest

from parkd.lane.live_rows import LiveRows
from parkd.lane.seating import AHEAD_TOKENS, ANSWER_TOKENS, displaced, first_rows, is_safe
from parkd.lane.start import Seated, decide_start
from parkd.state import Costs, StageLayout, StateLayout
from parkd.store.records import Parked
from parkd.types import CacheOutcome, ConversationKey, PromptIdentity, Units

LIVE, RAM, COLD = CacheOutcome.LIVE, CacheOutcome.RESTORED_RAM, CacheOutcome.COLD
KEY = ConversationKey("", b"model")
LAYOUT = StateLayout((StageLayout(0, 1, 64, 0, b"one"),), "xxh3-64")
COST = Costs(read_s=1e-3, bytes_per_s=1e9)


def said(name: int, tokens: int, head: int = 0) -> Units:
    """Units of one conversation; its first `head` ones are those of all."""
    return np.concatenate([np.arange(head), np.arange(head, tokens) + 10_000 * name]).astype(np.uint64)


def live(units: Units, *, is_parked: bool = True, lineage: tuple[int, ...] = ()) -> Seated:
    return Seated(LiveRows(KEY, units, lineage, len(lineage) * 256, "live" if is_parked else None))


def prompt(units: Units) -> PromptIdentity:
    return PromptIdentity(KEY, units.astype(np.int64), units, (), ())


def decide(
    units: Units, seats: list[Seated], candidates: tuple[Parked, ...] = (), *, reuses: bool = True, row_tokens: int = 0
) -> tuple[CacheOutcome, int, tuple[int, ...]]:
    start = decide_start(
        prompt(units), seats, candidates, layout=LAYOUT, cost=COST, row_tokens=row_tokens, reuses=reuses
    )
    return start.source, start.seat, start.displaced


def test_a_new_conversation_takes_a_free_seat_and_else_the_one_used_longest_ago() -> None:
    one, two, free = live(said(1, 900)), live(said(2, 300)), Seated()
    assert decide(said(3, 500), [one, free, two]) == (COLD, 1, ())
    assert decide(said(3, 500), [one, two]) == (COLD, 0, ())
    assert decide(said(3, 500), [two, one]) == (COLD, 0, ())


def test_a_live_conversation_that_is_not_parked_is_not_cut_to_a_few_tokens_either() -> None:
    """Without parking, its rows are all there is; every prompt shares a few tokens of the template."""
    one = live(said(1, 900, 5), is_parked=False)
    assert decide(said(3, 500, 5), [one, Seated()]) == (COLD, 1, ())
    assert decide(said(3, 500, 5), [one, live(said(2, 900, 5))]) == (COLD, 0, ())


def test_a_conversation_goes_on_where_it_is_live() -> None:
    one, two, free = live(said(1, 900)), live(said(2, 300)), Seated()
    assert decide(said(2, 400), [one, two, free]) == (LIVE, 1, ())
    assert decide(said(1, 950), [one, two, free]) == (LIVE, 0, ())


def test_a_request_without_cache_takes_the_seat_that_costs_least_too() -> None:
    one, free = live(said(1, 900)), Seated()
    assert decide(said(1, 950), [one, free], reuses=False) == (COLD, 1, ())
    assert decide(said(1, 950), [one, live(said(2, 300))], reuses=False) == (COLD, 0, ())


def test_few_rows_in_common_are_no_reason_to_give_up_a_live_conversation() -> None:
    """A worker that shares its system prompt with the parent, which is live and long."""
    parent = live(said(1, 2000, 512), lineage=(1, 2, 3))
    parked = Parked("p", KEY.digest, said(2, 600, 512), (), (1, 2, 9), (), LAYOUT.digest, 0.0, 0.0)
    worker = said(3, 700, 512)
    assert decide(worker, [parent, Seated()], (parked,)) == (RAM, 1, ())
    assert decide(worker, [parent, live(said(4, 300))], (parked,)) == (RAM, 0, ())
    short = live(said(1, 600, 512), lineage=(1, 2))
    assert decide(worker, [Seated(), short], (parked,)) == (LIVE, 1, ()), "this one loses little"


def test_rows_that_all_seats_share_are_given_up_from_the_least_recently_used() -> None:
    one, two = live(said(1, 500)), live(said(2, 500))
    assert decide(said(3, 600), [one, two, Seated()], row_tokens=2048) == (COLD, 2, ())
    assert decide(said(3, 600), [one, two, Seated()], row_tokens=1536) == (COLD, 0, ())
    assert decide(said(3, 1200), [one, two, Seated()], row_tokens=1536) == (COLD, 0, (1,))
    assert decide(said(2, 1200), [one, two, Seated()], row_tokens=1536) == (LIVE, 1, (0,))


@pytest.mark.parametrize("seed", range(30))
def test_as_few_make_way_as_are_enough(seed: int) -> None:
    random = np.random.default_rng(seed)
    positions = [int(random.choice([0, random.integers(1, 2000)])) for _ in range(4)]
    seat, tokens, total = int(random.integers(4)), int(random.integers(1, 3000)), 256 * int(random.integers(12, 24))

    def fits(gone: tuple[int, ...]) -> bool:
        kept = [held for each, held in enumerate(positions) if each != seat and each not in gone]
        return sum(-(-rows // 256) for rows in [*kept, tokens]) * 256 <= total

    others = [each for each in range(4) if each != seat and positions[each]]
    choices = [tuple(others[:count]) for count in range(len(others) + 1)]
    expected = next((gone for gone in choices if fits(gone)), tuple(others))
    assert displaced(positions, seat, tokens, total) == expected
    assert displaced(positions, seat, tokens, 0) == ()


def _can_all_end(row_tokens: int, turns: Sequence[tuple[int, int]]) -> bool:
    """By trying every order."""

    def blocks(rows: int) -> int:
        return -(-rows // 256) * 256

    def runs(order: Sequence[tuple[int, int]]) -> bool:
        left = row_tokens - sum(blocks(rows) for rows, _ in turns)
        for rows, most in order:
            if left < 0 or blocks(most) - blocks(rows) > left:
                return False
            left += blocks(rows)
        return True

    return any(runs(order) for order in permutations(turns))


@pytest.mark.parametrize("seed", range(40))
def test_turns_are_under_way_at_once_only_if_all_can_end(seed: int) -> None:
    rng = random.Random(seed)
    total = 256 * rng.randint(2, 12)
    seen = set()
    for _ in range(30):
        mosts = [rng.randint(1, total) for _ in range(rng.randint(1, 4))]
        turns = [(rng.randint(1, most), most) for most in mosts]
        safe = _can_all_end(total, turns)
        assert is_safe(total, turns) is safe, (total, turns)
        seen.add(safe)
    assert seen == {True, False}


def test_a_turn_begins_with_the_rows_that_its_answer_is_expected_to_need() -> None:
    assert first_rows(100, None, 8192) == 100 + ANSWER_TOKENS + AHEAD_TOKENS
    assert first_rows(100, 5000, 8192) == 100 + ANSWER_TOKENS + AHEAD_TOKENS
    assert first_rows(100, 20, 8192) == 100 + 20 + AHEAD_TOKENS
    assert first_rows(8000, None, 8192) == 8192
