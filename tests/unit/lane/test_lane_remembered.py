"""What is remembered outside the parking budget: each memory is bounded, and counts about what it takes."""

from __future__ import annotations

import gc
import secrets
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from parkd.lane.groups import HASH_BYTES, HASHES_LIMIT, Groups
from parkd.lane.reports.explain import EXPLAINED_BYTES, Explained, RequestMemory
from parkd.store.history import (
    GHOST_BYTES,
    GHOST_LIMIT,
    GONE_BYTES,
    GONE_LIMIT,
    Ghosts,
    GoneMemory,
    History,
)
from parkd.types import ConversationKey, PromptIdentity, SegmentSpan

KEY = ConversationKey("", b"f" * 16)


def hashes(count: int) -> tuple[bytes, ...]:
    return tuple(secrets.token_bytes(16) for _ in range(count))


def prompt(tokens: int, segments: int = 4) -> PromptIdentity:
    ids = np.arange(tokens, dtype=np.int64)
    spans = tuple(SegmentSpan(at, at + 1, f"message {at} (of some role)") for at in range(segments))
    units = ids.astype(np.uint64)
    return PromptIdentity(KEY, ids, units, hashes(tokens // 256), spans, boundaries=tuple(range(1000, 1000 + segments)))


class NoStore:
    def candidates(self, *_: object) -> list[Any]:
        return []


def requests() -> tuple[Callable[[int], None], Callable[[], int], int]:
    memory = RequestMemory()
    return (
        lambda number: memory.add(Explained(f"request-{number}", "", prompt(4000 + number % 7), None, 0.0)),
        lambda: memory.bytes,
        EXPLAINED_BYTES,
    )


def ghosts() -> tuple[Callable[[int], None], Callable[[], int], int]:
    memory = Ghosts()

    def feed(number: int) -> None:
        for each in range(20):
            at_s = 1000.5 * number + each
            memory.note(hashes(1), 10_000 + number, History().returned(at_s).returned(at_s + 7.25), at_s)

    return feed, lambda: len(memory) * GHOST_BYTES, GHOST_LIMIT * GHOST_BYTES


def gone() -> tuple[Callable[[int], None], Callable[[], int], int]:
    memory = GoneMemory()
    return (
        lambda number: memory.remember(
            secrets.token_bytes(16), hashes(64), "evicted", f"reason {number}", number + 0.5
        ),
        lambda: len(memory) * GONE_BYTES,
        GONE_LIMIT * GONE_BYTES,
    )


def groups() -> tuple[Callable[[int], None], Callable[[], int], int]:
    memory = Groups(NoStore())  # type: ignore[arg-type]
    return (
        lambda number: memory.used(f"group {number % 40}", prompt(256 * 300)),
        lambda: memory.memory_bytes,
        HASHES_LIMIT * HASH_BYTES,
    )


@pytest.mark.parametrize("make", [requests, ghosts, gone, groups])
def test_found_by_use_memory_over_a_day_is_bounded_and_counted(
    make: Callable[[], tuple[Callable[[int], None], Callable[[], int], int]],
) -> None:
    """Issue 22: a server grew for 13,500 turns, and nothing told by what and how far. Twice as many turns as fill a
    memory take no more than its limit, and what they take is about what it counts."""
    feed, counted, limit = make()
    feed(0)
    gc.collect()
    tracemalloc.start()
    try:
        taken = []
        for rounds in range(2):
            for number in range(600):
                feed(1 + rounds * 600 + number)
            gc.collect()
            taken.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert counted() <= limit
    assert 0.6 * counted() <= taken[1] <= 1.4 * counted()
    assert taken[1] <= 1.1 * taken[0]


def test_a_group_that_alone_has_too_many_hashes_keeps_its_newest() -> None:
    memory = Groups(NoStore())  # type: ignore[arg-type]
    for _ in range(3):
        memory.used("one", prompt(256 * (HASHES_LIMIT // 2)))
    memory.used("one", prompt(256 * (HASHES_LIMIT // 2)))
    assert memory.memory_bytes == HASHES_LIMIT * HASH_BYTES
    memory.used("two", prompt(256))
    assert memory.memory_bytes == HASH_BYTES
    assert len(memory) == 1
