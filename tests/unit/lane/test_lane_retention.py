"""Pins with a deadline, within a share of the budget: over a store that only knows names."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from parkd.errors import Conflict
from parkd.lane.retention import KEPT_LIMIT, Retention
from parkd.store.records import ConversationGone
from parkd.types import ConversationKey, PromptIdentity

KEY = ConversationKey("", b"f" * 16)
ROW_BYTES = 10


@dataclass
class Shelf:
    """`{id: (hashes, position)}`"""

    parked: dict[str, tuple[tuple[bytes, ...], int]] = field(default_factory=dict)
    pins: set[str] = field(default_factory=set)
    config: Any = field(default_factory=lambda: SimpleNamespace(budget_bytes=10_000))
    layout: Any = field(default_factory=lambda: SimpleNamespace(row_bytes=ROW_BYTES))

    def candidates(self, key_digest: bytes, hashes: tuple[bytes, ...]) -> list[Any]:
        assert key_digest == KEY.digest
        return [
            (SimpleNamespace(id=name, position=position), len(set(own) & set(hashes)))
            for name, (own, position) in self.parked.items()
        ]

    def named(self, name: str) -> list[Any]:
        rows = [key for key in self.parked if key.partition(".")[0] == name]
        return [SimpleNamespace(id=key, position=self.parked[key][1]) for key in rows]

    def pin(self, name: str) -> None:
        assert name in self.parked
        self.pins.add(name)

    def unpin(self, name: str) -> None:
        if name not in self.parked:
            raise ConversationGone(name)
        self.pins.discard(name)


def prompt(*hashes: bytes) -> PromptIdentity:
    nothing = np.zeros(0, np.int64)
    return PromptIdentity(KEY, nothing, nothing.view(np.uint64), hashes)


@pytest.fixture
def kit() -> tuple[Shelf, Retention]:
    shelf = Shelf({"a": ((b"a1", b"a2"), 100), "b": ((b"b1",), 100)})
    return shelf, Retention(shelf)  # type: ignore[arg-type]


def test_what_is_wished_for_is_pinned_until_its_time(kit: tuple[Shelf, Retention]) -> None:
    shelf, retention = kit
    retention.wish(prompt(b"a1"), 300, 0)
    retention.apply(0)
    assert shelf.pins == {"a"}
    retention.apply(299)
    assert shelf.pins == {"a"}
    retention.apply(300)
    assert shelf.pins == set()


def test_what_is_parked_later_or_grows_is_pinned_then(kit: tuple[Shelf, Retention]) -> None:
    shelf, retention = kit
    retention.wish(prompt(b"c1"), 300, 0)
    retention.apply(0)
    assert shelf.pins == set()
    shelf.parked["c"] = ((b"c1",), 256)
    retention.apply(1)
    assert shelf.pins == {"c"}
    del shelf.parked["c"]
    shelf.pins = {"grown"}  # the store pins what supersedes in its ancestor's place
    shelf.parked["grown"] = ((b"c1", b"c2"), 300)
    retention.apply(2)
    assert retention.pinned == {"grown"}
    retention.apply(301)
    assert shelf.pins == set(), "the pin taken over ends with the wish"


def test_a_later_turn_prolongs_and_never_shortens(kit: tuple[Shelf, Retention]) -> None:
    shelf, retention = kit
    retention.wish(prompt(b"a1"), 3600, 0)
    retention.wish(prompt(b"a1", b"a2"), 300, 10)
    retention.apply(1000)
    assert shelf.pins == {"a"}
    retention.apply(3600)
    assert shelf.pins == set()


def test_found_by_use_a_key_neither_ends_nor_replaces_what_another_wished(kit: tuple[Shelf, Retention]) -> None:
    """A conversation of both is kept for the longest."""
    shelf, retention = kit
    retention.wish(prompt(b"a1"), 300, 0, "anna")
    retention.wish(prompt(b"a1"), 3600, 0, "ben")
    shelf.parked["c"] = ((b"a1", b"c2"), 50)
    shelf.parked["a"] = ((b"a1", b"a2"), 40)
    retention.wish(prompt(b"a1", b"a2"), 100, 0, "ben")  # goes on from his own only
    retention.apply(200)
    assert shelf.pins == {"a", "c"}, (
        "the longest of what begins so, for anna, and ben's own for as long as he said first"
    )
    retention.apply(301)
    assert shelf.pins == {"a"}
    retention.apply(3601)
    assert shelf.pins == set()


def test_found_by_use_many_wishes_of_one_key_push_out_none_of_another(kit: tuple[Shelf, Retention]) -> None:
    shelf, retention = kit
    shelf.config.budget_bytes = 4_000  # two conversations of 100 rows are half of it
    retention.wish(prompt(b"a1"), 3600, 0, "anna")
    for number in range(40):
        name = f"m{number}"
        shelf.parked[name] = ((name.encode(),), 100)
        retention.wish(prompt(name.encode()), 3600, 0, "ben")
    retention.apply(1)
    assert shelf.pins == {"a", "m39"}


def test_found_by_use_what_two_keys_keep_is_kept_until_both_let_go(kit: tuple[Shelf, Retention]) -> None:
    shelf, retention = kit
    retention.keep("a", math.inf, 0, "anna")
    retention.keep("a", 100, 0, "ben")
    retention.wish(prompt(b"a1"), 300, 0, "carl")
    assert [retention.kept_until_s("a", who) for who in ("anna", "ben", "carl", None)] == [
        math.inf,
        100,
        None,
        math.inf,
    ]
    assert [retention.is_wanted_by("a", who) for who in ("anna", "carl", "dora")] == [True, True, False]
    retention.let_go("a", 1, "anna")
    assert (shelf.pins, retention.kept_until_s("a")) == ({"a"}, 100)
    retention.apply(101)
    assert (shelf.pins, retention.kept_until_s("a")) == ({"a"}, None)
    retention.let_go("a", 102, "dora")
    assert shelf.pins == {"a"}, "carl's request still asks for it"
    retention.let_go("a", 103)
    assert shelf.pins == set()


def test_pins_take_half_the_budget_at_most_newest_first(kit: tuple[Shelf, Retention]) -> None:
    shelf, retention = kit
    shelf.parked = {name: ((name.encode(),), 200) for name in "abcd"}
    for name in "abcd":
        retention.wish(prompt(name.encode()), 300, 0)
        retention.apply(0)
    assert shelf.pins == {"c", "d"}
    assert len(shelf.pins) * 200 * ROW_BYTES <= shelf.config.budget_bytes / 2


def test_a_prompt_shorter_than_a_block_leaves_no_wish(kit: tuple[Shelf, Retention]) -> None:
    shelf, retention = kit
    retention.wish(prompt(), 300, 0)
    retention.apply(0)
    assert shelf.pins == set()


def test_what_is_kept_by_name_is_pinned_until_its_time_whatever_it_grows_to(kit: tuple[Shelf, Retention]) -> None:
    shelf, retention = kit
    retention.keep("a", 100, 0)
    assert shelf.pins == {"a"}
    assert retention.kept_until_s("a") == 100
    del shelf.parked["a"]
    shelf.parked["a.2"] = ((b"a1",), 120)
    shelf.pins = {"a.2"}  # the store pins what supersedes in its ancestor's place
    retention.apply(99)
    assert shelf.pins == {"a.2"}
    retention.apply(100)
    assert shelf.pins == set()
    assert retention.kept_until_s("a") is None


def test_kept_conversations_have_a_share_of_the_budget_and_one_too_many_is_refused(
    kit: tuple[Shelf, Retention],
) -> None:
    shelf, retention = kit  # half of 10,000 bytes at 10 a row: 500 rows
    shelf.parked["c"] = ((b"c1",), 401)
    retention.keep("a", math.inf, 0)
    with pytest.raises(Conflict, match="50% of the memory"):
        retention.keep("c", math.inf, 0)
    assert shelf.pins == {"a"}
    retention.let_go("a", 0)
    assert shelf.pins == set()
    retention.keep("c", math.inf, 0)
    assert shelf.pins == {"c"}
    with pytest.raises(ConversationGone):
        retention.keep("unknown", 10, 0)


def test_what_is_kept_comes_before_what_clients_wish_for(kit: tuple[Shelf, Retention]) -> None:
    shelf, retention = kit
    shelf.parked["a"] = ((b"a1",), 300)
    shelf.parked["b"] = ((b"b1",), 300)
    retention.wish(prompt(b"a1"), 300, 0)
    retention.apply(0)
    assert shelf.pins == {"a"}
    retention.keep("b", math.inf, 0)
    assert shelf.pins == {"b"}
    retention.let_go("b", 0)
    assert shelf.pins == {"a"}
    retention.let_go("a", 0)
    assert shelf.pins == set(), "a hand that unpins ends the client's wish too"


def test_one_that_grew_beyond_the_share_is_no_longer_pinned_and_others_are(kit: tuple[Shelf, Retention]) -> None:
    shelf, retention = kit
    retention.keep("a", math.inf, 0)
    retention.keep("b", math.inf, 0)
    shelf.parked["a"] = ((b"a1",), 501)
    retention.apply(1)
    assert shelf.pins == {"b"}


def test_so_many_are_kept_by_name(kit: tuple[Shelf, Retention]) -> None:
    shelf, retention = kit
    for number in range(KEPT_LIMIT + 1):
        shelf.parked[f"n{number}"] = ((b"n",), 1)
    for number in range(KEPT_LIMIT):
        retention.keep(f"n{number}", math.inf, 0)
    with pytest.raises(Conflict, match="the most"):
        retention.keep(f"n{KEPT_LIMIT}", math.inf, 0)
    retention.keep("n0", 5, 0)
    assert retention.kept_until_s("n0") == 5


def test_found_by_use_one_of_several_keys_keeps_half_of_what_all_may(kit: tuple[Shelf, Retention]) -> None:
    shelf, _ = kit  # half of 10,000 bytes at 10 a row: 500 rows, of which a key has 250
    retention = Retention(shelf, owners=2)  # type: ignore[arg-type]
    shelf.parked = {name: ((name.encode(),), 100) for name in "abcdef"}
    for name in "ab":
        retention.keep(name, math.inf, 0, "anna")
    with pytest.raises(Conflict, match="for one key, 25% of the memory"):
        retention.keep("c", math.inf, 0, "anna")
    for name in "ca":  # what both keep counts for each, and once for all
        retention.keep(name, math.inf, 0, "ben")
    with pytest.raises(Conflict, match="for one key"):
        retention.keep("d", math.inf, 0, "ben")
    assert shelf.pins == set("abc")
    shelf.parked["a"] = ((b"a",), 140)  # it grows, for both
    retention.apply(1)
    assert shelf.pins == set("abc")
    shelf.parked["a"] = ((b"a",), 160)
    retention.apply(2)
    assert shelf.pins == set("bc"), "for neither there is room, though there is for all"


def test_found_by_use_one_of_several_keys_keeps_half_as_many(kit: tuple[Shelf, Retention]) -> None:
    shelf, _ = kit
    retention = Retention(shelf, owners=3)  # type: ignore[arg-type]
    for number in range(KEPT_LIMIT + 2):
        shelf.parked[f"n{number}"] = ((b"n",), 1)
    half = KEPT_LIMIT // 2
    for number in range(half):
        retention.keep(f"n{number}", math.inf, 0, "anna")
    with pytest.raises(Conflict, match=f"{half} conversations are kept, which is the most for one key"):
        retention.keep(f"n{half}", math.inf, 0, "anna")
    for number in range(half, KEPT_LIMIT):
        retention.keep(f"n{number}", math.inf, 0, "ben")
    with pytest.raises(Conflict, match=f"{KEPT_LIMIT} conversations are kept, which is the most. Unpin"):
        retention.keep(f"n{KEPT_LIMIT}", math.inf, 0, "carl")
