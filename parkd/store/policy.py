"""Eviction as pure functions over plain values: the score of each conversation, and how far one can be parked.

A policy scores every conversation that may be evicted; the lowest score goes first. What comes before and after the
scores is the same for all policies, see `rank`:

    superseded ones -> those that free something, by score -> the other side of the switch -> those that free nothing
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from parkd.state import Costs
from parkd.store.history import History
from parkd.store.records import ConversationId


class Evictable(NamedTuple):
    """A parked conversation that may be evicted (not leased, pinned or awaited), or the one to be parked. A tuple, for
    speed: a capture that must make room may build one for each conversation."""

    id: ConversationId
    position: int
    freed_bytes: int
    """What its eviction would free: state that no other conversation holds, without metadata. For the one to be parked,
    what it takes."""
    parked_at_s: float
    last_used_s: float
    freed_tokens: int = 0
    """The tokens of `freed_bytes`: the last ones of the conversation, since beginnings are what is shared."""
    history: History = History()
    floor: float = 0.0
    """The score of the last one evicted when this one was last used (GDSF's clock)."""
    is_on_disk: bool = False
    """Whether all of it is also on disk, so that its eviction costs at most a promotion."""
    is_expected: bool = False
    """Whether its last answer asked for something that its client sends back."""

    def saved_s(self, costs: Costs) -> float:
        """Seconds a return would save by finding in memory what only this conversation holds; never negative."""
        start = self.position - self.freed_tokens
        saved_s = costs.reading_s(start, self.position) - costs.moving_s(self.freed_bytes, from_disk=False)
        if self.is_on_disk:
            saved_s = min(saved_s, costs.moving_s(self.freed_bytes, from_disk=True))
        return max(0.0, saved_s)


STEADY_SHARE = 0.05
"""A score may be used again for this share of the time in which it changes noticeably."""
SLACK = 0.5
"""How far the median of the next gap exceeds the usual gap, as a share, at a jitter of 1. It shrinks with the jitter,
so a regular conversation is overdue soon."""


class Policy(Protocol):
    """What to evict first."""

    @property
    def name(self) -> str: ...

    @property
    def margin(self) -> float:
        """A capture is refused unless its score is this many times the score of what would be evicted; 0: never
        refused."""

    def score(self, candidate: Evictable, costs: Costs, now_s: float) -> float:
        """The lowest score is evicted first."""

    def steady_s(self, history: History, idle_s: float) -> float:
        """Seconds for which a score may be used again if nothing but time changes."""


@dataclass(frozen=True)
class LruPolicy:
    """The least recently used is evicted."""

    name: str = "lru"
    margin: float = 0.0

    def score(self, candidate: Evictable, costs: Costs, now_s: float) -> float:  # noqa: ARG002
        return candidate.last_used_s

    def steady_s(self, history: History, idle_s: float) -> float:  # noqa: ARG002
        return math.inf


@dataclass(frozen=True)
class GdsfPolicy:
    """Greedy-dual size with frequency: uses x seconds saved per MiB, plus the highest score evicted before its last
    use, so that unused conversations fall behind as others are evicted."""

    name: str = "gdsf"
    margin: float = 0.0

    def score(self, candidate: Evictable, costs: Costs, now_s: float) -> float:  # noqa: ARG002
        uses = candidate.history.turns + candidate.history.forks
        return candidate.floor + uses * candidate.saved_s(costs) * (1 << 20) / max(1, candidate.freed_bytes)

    def steady_s(self, history: History, idle_s: float) -> float:  # noqa: ARG002
        return math.inf


@dataclass(frozen=True)
class ValuePolicy:
    """Expected seconds saved, per byte and second of holding it.

        P(it returns | turns, idle) x (seconds to read again - seconds to restore) / (bytes x expected wait)

    P starts low, at `first_return`, for a conversation of one turn, and grows with each turn. It falls once the
    conversation is idle for longer than usual. Because of the wait, agents that take turns are not evicted just before
    theirs: of equal ones, the one that is needed last goes first.
    """

    name: str = "value"
    margin: float = 1.3
    """Above 1, so that conversations of equal worth do not evict each other in turns."""
    first_return: float = 0.22
    """Probability that a conversation of one turn has a second."""
    turn_gain: float = 0.12
    """Added for each further turn, up to `most_return`."""
    most_return: float = 0.7
    shape: float = 1.7
    """Shape of the log-logistic distribution of gaps at a jitter of 1; regular gaps have a steeper one."""

    def score(self, candidate: Evictable, costs: Costs, now_s: float) -> float:
        return (
            self.return_probability(candidate.history, now_s - candidate.last_used_s, is_expected=candidate.is_expected)
            * candidate.saved_s(costs)
            / (max(1, candidate.freed_bytes) * self.wait_s(candidate.history, now_s - candidate.last_used_s))
        )

    def steady_s(self, history: History, idle_s: float) -> float:
        return STEADY_SHARE * (history.gap_s * history.jitter + max(0.0, idle_s))

    def return_probability(self, history: History, idle_s: float, *, is_expected: bool = False) -> float:
        uses = history.turns + history.forks - 1
        prior = self.most_return if is_expected else min(self.most_return, self.first_return + self.turn_gain * uses)
        ratio = max(0.0, idle_s) / ((1.0 + SLACK * history.jitter) * max(history.gap_s, 1e-3))
        # The limit keeps the power finite far in the tail, where its exact value does not matter.
        survives = 1.0 / (1.0 + math.exp(min(60.0, self.shape / history.jitter * math.log(max(ratio, 1e-9)))))
        return prior * survives / (prior * survives + 1.0 - prior)

    def wait_s(self, history: History, idle_s: float) -> float:
        """Expected seconds until the conversation returns, if it does."""
        idle_s = max(0.0, idle_s)
        return max(history.gap_s - idle_s, 0.0) + history.jitter * (history.gap_s + idle_s) + 1e-3


POLICIES: tuple[Policy, ...] = (ValuePolicy(), GdsfPolicy(), LruPolicy())
"""The default first."""


def policy_named(name: str) -> Policy:
    """Raises KeyError."""
    return {policy.name: policy for policy in POLICIES}[name]


Rank = tuple[bool, int, float, float]


def rank(candidate: Evictable, score: float, *, is_superseded: bool, is_partner: bool) -> Rank:
    """Sorts conversations so that the first to be evicted comes first. `is_superseded`: the capture that needs the room
    will replace it. `is_partner`: it is the other side of the switch."""
    # Evicting a parent whose rows are all shared by its workers would free nothing and lose its last position.
    last = 2 if candidate.freed_bytes == 0 else int(is_partner)
    return (not is_superseded, last, score, candidate.parked_at_s)


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
