"""Decisions as pure functions over plain values: how much of a conversation to park, and who goes for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from parkd.store.records import ConversationId


class Evictable(NamedTuple):
    """A parked conversation that may go: neither leased nor pinned. A tuple: each eviction makes one of each."""

    id: ConversationId
    position: int
    freed_bytes: int
    """What its eviction frees now: what no one else holds, without its metadata."""
    parked_at_s: float
    last_used_s: float
    is_superseded: bool
    """The capture that room is made for will replace it."""


class Policy(Protocol):
    """Whom to evict. `victim` is asked again after each eviction, for what is shared then may be exclusive now."""

    name: str

    def victim(self, evictable: Sequence[Evictable], now_s: float) -> ConversationId:
        """One of `evictable`, which is not empty."""


class LruPolicy:
    """Superseded ones first, then the least recently used whose eviction frees something."""

    name = "lru"

    def victim(self, evictable: Sequence[Evictable], now_s: float) -> ConversationId:  # noqa: ARG002
        # A parent whose rows its workers all share frees nothing: evicting it would only forget it.
        return min(evictable, key=lambda e: (not e.is_superseded, e.freed_bytes == 0, e.last_used_s, e.parked_at_s)).id


def longest_position(longest: int, checkpoints: Sequence[int] | None, fits: Callable[[int], bool]) -> int:
    """The largest resumable position that fits, or 0.

    `checkpoints` are the resumable positions in ascending order; None means every token up to `longest`. `fits` must
    be monotone: what fits at a position fits at every earlier one.
    """
    if checkpoints is not None:
        return next((position for position in reversed(checkpoints) if fits(position)), 0)
    if fits(longest):
        return longest
    low, high = 0, longest
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low
