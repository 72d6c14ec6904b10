"""Bars that add up, and what would fit by the rules that the store itself follows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parkd.engine_adapter.base import EngineInfo
from parkd.proxy.page import budget
from parkd.proxy.page.budget import Machine, Part
from parkd.state import Checksums
from parkd.store.records import Capture, CaptureRequest, RefusalReason, StoreConfig
from parkd.store.store import ConversationStore
from tests.fakes.engine import FakeEngine

MIB = 1 << 20
INFO: EngineInfo = FakeEngine().info
CONFIG = StoreConfig(4 * MIB, 256, slab_bytes=64 * 1024)


def store_of(config: StoreConfig = CONFIG) -> ConversationStore:
    return ConversationStore(config, INFO.layout, clock=lambda: 0.0)


def park(store: ConversationStore, seed: int, tokens: int) -> bool:
    units = np.full(tokens, seed, np.uint64)
    hashes = tuple(seed.to_bytes(8, "big") + block.to_bytes(8, "big") for block in range(tokens // 256))
    capture = store.begin_capture(CaptureRequest(b"k" * 16, units, hashes, (), store.layout.digest))
    if not isinstance(capture, Capture) or not capture.is_whole:
        return False
    sums = np.zeros((-(-tokens // 256), len(store.layout.stages)), np.uint64)
    store.commit(capture, Checksums(sums, np.zeros((0, len(store.layout.stages)), np.uint64)))
    return True


@given(st.lists(st.integers(0, 1 << 40), max_size=6), st.integers(1, 1 << 40))
def test_the_bar_of_the_process_adds_up_to_what_is_resident(sizes: list[int], resident: int) -> None:
    parts = [Part(f"part {number}", size) for number, size in enumerate(sizes)]
    shown = budget.process(parts, Machine(resident, 1, 2))
    whole = sum(part["bytes"] for part in shown["parts"])
    assert whole - shown["untouched_bytes"] == resident
    assert shown["untouched_bytes"] >= 0
    assert all(part["bytes"] >= 0 for part in shown["parts"])


def test_what_the_store_takes_is_told_part_by_part() -> None:
    store = store_of()
    assert park(store, 1, 1000)
    ram = store.stats()
    [told] = [part.bytes for part in budget.parts_of(INFO, ram, 0) if part.name == "parked"]
    assert told == ram.bytes_allocated > 0
    shown = budget.tiers(ram, None)["ram"]
    assert sum(part["bytes"] for part in shown["parts"]) == ram.bytes_allocated
    assert shown["used_bytes"] <= shown["limit_bytes"] == CONFIG.budget_bytes


def test_parts_of_stages_in_main_memory_are_added_up_and_those_on_cards_are_told_apart() -> None:
    info = replace(INFO, devices=("cpu", "cuda:0"), memory=({"weights": 5, "rows": 2}, {"weights": 7}))
    assert budget.parts_of(info, None, 0) == [Part("weights", 5), Part("rows", 2)]
    [card] = budget.devices(info)
    assert (card["device"], card["parts"]) == ("cuda:0", [{"name": "weights", "bytes": 7}])
    both = replace(INFO, devices=("cpu", "cpu"), memory=({"weights": 5}, {"weights": 7}))
    assert budget.parts_of(both, None, 3) == [Part("weights", 12), Part("remembered", 3)]
    upstream = replace(INFO, devices=("upstream",), memory=(), weights_bytes=9)
    assert budget.parts_of(upstream, None, 0) == [], "a llama-server's weights are in its own process"


@pytest.mark.parametrize("tokens", [300, 1000, 5000])
def test_what_is_said_to_fit_besides_is_what_the_store_takes(tokens: int) -> None:
    store = store_of(replace(CONFIG, budget_bytes=2 * MIB))
    for seed in range(3):
        assert park(store, seed, 700)
    more = budget.held(budget.sizes_for(INFO.layout, store.config), [tokens], store.room(), 4000)["fits"][0]["more"]
    evictions, taken = store.stats().evictions_total, 0
    while park(store, 100 + taken, tokens) and store.stats().evictions_total == evictions:
        taken += 1
    assert taken == more > 0


def test_another_budget_holds_what_a_store_of_that_budget_holds() -> None:
    planned = budget.held(budget.sizes_for(INFO.layout, CONFIG, MIB), [2000], None, 4000)
    assert planned["budget_bytes"] == MIB
    store, taken = store_of(replace(CONFIG, budget_bytes=MIB)), 0
    while park(store, taken, 2000) and not store.stats().evictions_total:
        taken += 1
    assert planned["fits"][0]["conversations"] == taken > 0
    assert planned["fits"][0]["more"] is None


def test_no_budget_holds_nothing() -> None:
    planned = budget.held(budget.sizes_for(INFO.layout, CONFIG, 0), [2000], None, 4000)
    assert (planned["longest_tokens"], planned["fits"][0]["conversations"]) == (0, 0)


def test_found_by_use_no_conversation_is_longer_than_the_context() -> None:
    sizes = budget.sizes_for(INFO.layout, CONFIG)
    fits = sizes.longest()
    assert [budget.held(sizes, [200], None, most)["longest_tokens"] for most in (fits - 1, fits + 1)] == [
        fits - 1,
        fits,
    ]


def test_lengths_are_the_middle_one_and_the_longest_of_those_seen() -> None:
    assert budget.example_tokens([9, 1, 5], 100) == [5, 9]
    assert budget.example_tokens([7], 100) == [7]
    assert budget.example_tokens([], 5000) == [2000, 5000]


def test_each_refusal_has_words() -> None:
    assert set(budget.REASONS) == set(RefusalReason)
