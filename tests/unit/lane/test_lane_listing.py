"""The tree of conversations, and what is told of each."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from parkd.identity.chain import prefix_hashes
from parkd.lane.reports.explain import Explained
from parkd.lane.reports.listing import Shown, as_alone, document, parents
from parkd.lane.reports.roster import WORDS_CHARACTERS, Counts, FirstWords, Roster
from parkd.types import CacheOutcome, CacheReport, ConversationKey, PromptIdentity, TurnRequest

KEY = ConversationKey("", b"f" * 16)
BLOCK = 4


def shown(name: str, age_s: float, *tokens: int) -> Shown:
    units = np.array(tokens, dtype=np.uint64)
    hashes = tuple(prefix_hashes(units, KEY.digest, BLOCK))
    return Shown(name, (), units, hashes, "", KEY.digest, False, Counts(), age_s, 0.0)


def test_the_parent_is_the_older_one_that_shares_most() -> None:
    root = shown("root", 30, *range(9))
    fork = shown("fork", 20, *range(6), 90, 91, 92)
    leaf = shown("leaf", 10, *range(6), 90, 91, 80, 81)
    alone = shown("alone", 40, 7, 7, 7, 7, 7)
    short = shown("short", 5, 0, 1, 2)  # shares less than a block
    assert parents([leaf, alone, root, short, fork]) == {"fork": ("root", 6), "leaf": ("fork", 8)}


def used(name: str, last_s: float, ram_bytes: int, *, is_live: bool = False) -> Shown:
    row = SimpleNamespace(ram_bytes=ram_bytes)
    return replace(shown(name, 0.0), rows=(row,), counts=Counts(turns=1, last_s=last_s), is_live=is_live)  # type: ignore[arg-type]


def test_found_by_use_live_is_what_would_be_if_nobody_else_ran() -> None:
    old, mid, new, gone = used("old", 1.0, 5), used("mid", 2.0, 5), used("new", 3.0, 5), used("gone", 4.0, 0)

    def live(*some: Shown, seats: int) -> list[str]:
        return [each.name for each in as_alone(some, seats) if each.is_live]

    assert live(old, mid, new, gone, seats=1) == ["new"], "of the one used last, memory has no state"
    assert live(old, mid, new, gone, seats=3) == ["old", "mid", "new"]
    assert live(replace(old, is_live=True), mid, new, seats=2) == ["old", "new"]
    assert live(replace(old, is_live=True), replace(mid, is_live=True), new, seats=2) == ["old", "mid"]
    assert live(shown("never", 1.0), seats=1) == []


def test_two_equal_ones_have_one_parent_between_them() -> None:
    assert parents([shown("a", 2, 1, 2, 3, 4), shown("b", 1, 1, 2, 3, 4)]) == {"b": ("a", 4)}
    assert parents([shown("a", 1, 1, 2, 3, 4), shown("b", 1, 1, 2, 3, 4)]) == {"b": ("a", 4)}


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=13), max_size=8))
def test_parents_are_those_of_a_search_through_all_pairs(all_tokens: list[list[int]]) -> None:
    everyone = [shown(f"c{index}", float(index), *tokens) for index, tokens in enumerate(all_tokens)]
    found = parents(everyone)
    for at, tokens in enumerate(all_tokens):
        lengths = []
        for older in all_tokens[at + 1 :]:
            length = 0
            while length < min(len(tokens), len(older)) and tokens[length] == older[length]:
                length += 1
            lengths.append(length)
        best = max(lengths, default=0)
        name, shared = found.get(f"c{at}", ("", 0))
        assert shared == (best if best >= BLOCK else 0)
        if shared:
            assert lengths[int(name[1:]) - at - 1] == best


def explained(owner: str, name: str, outcome: CacheOutcome) -> Explained:
    nothing = np.zeros(0, np.int64)
    one = Explained(name, owner, PromptIdentity(KEY, nothing, nothing.view(np.uint64), ()), None, 7.0, arrived_s=100.0)
    one.report = CacheReport(outcome, 1, 0)
    return one


def test_turns_and_hits_are_counted_by_key_and_words_stay_with_their_owner() -> None:
    roster = Roster(limit=2)
    words = FirstWords("be kind", "hello")
    roster.note("c1", explained("anna", "r1", CacheOutcome.COLD), words)
    roster.note("c1", explained("anna", "r2", CacheOutcome.LIVE), words)
    roster.note("c1", explained("ben", "r3", CacheOutcome.RESTORED_RAM), None)
    known = roster.get("c1")
    assert known is not None
    mine, all_keys = known.seen_by("anna"), known.seen_by(None)
    assert (mine.turns, mine.hits, mine.words) == (2, 1, words)
    assert (all_keys.turns, all_keys.hits, all_keys.words) == (3, 2, None)
    assert known.seen_by("carol") == Counts()
    assert list(known.requests) == [("anna", "r1"), ("anna", "r2"), ("ben", "r3")]
    for name in ("c2", "c1", "c3"):
        roster.note(name, explained("anna", "r", CacheOutcome.COLD), None)
    assert (roster.get("c2"), len(roster)) == (None, 2), "the one whose last turn is longest ago makes room"


def test_first_words_are_bounded_and_on_one_line() -> None:
    messages = [
        {"role": "system", "content": "You\n are   kind. " + "x" * 500},
        {"role": "user", "content": "first"},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "last"}]},
    ]
    words = FirstWords.of(TurnRequest(messages))
    assert words.system.startswith("You are kind. xxx")
    assert len(words.system) == WORDS_CHARACTERS
    assert words.user == "last"
    assert FirstWords.of(TurnRequest(prompt="once upon")) == FirstWords("", "once upon")


def test_words_are_in_the_document_only_if_they_may_be_shown() -> None:
    assert "first_words" not in document(shown("a", 1, 1, 2), None)
