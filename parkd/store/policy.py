"""Decisions as pure functions over plain values: how much of a conversation to park, and who goes for it.

A policy gives every conversation that may go a score; the lowest goes first. The order around the score is the same for
all of them and lives in `rank`:

    superseded ones -> those that free something, by score -> the other side of the switch -> those that free nothing
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from parkd.store.history import History
from parkd.store.records import ConversationId


class Evictable(NamedTuple):
    """A parked conversation that may go (neither leased, pinned nor awaited), or one that may come. A tuple: each
    capture that must make room builds one of each."""

    id: ConversationId
    position: int
    freed_bytes: int
    """What its eviction frees now: what no one else holds, without its metadata. Of one that comes, what it takes."""
    parked_at_s: float
    last_used_s: float
    freed_tokens: int = 0
    """The tokens behind `freed_bytes`: the last of the conversation, since heads are what is shared."""
    history: History = History()
    floor: float = 0.0
    """The score of the last one evicted when this one was last used (GDSF's clock)."""
    is_on_disk: bool = False
    """All of it: evicting it costs a promotion at most."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds as measured on this machine. Reading token number t costs `read_s + t * read_growth_s`."""

    read_s: float = 1e-3
    read_growth_s: float = 0.0
    bytes_per_s: float = 8e9
    """Of a restore."""
    disk_bytes_per_s: float = 1e9
    """Of a promotion, which comes before."""

    def reading_s(self, start: int, stop: int) -> float:
        """Seconds to read the tokens `[start, stop)`."""
        count = stop - start
        return count * (self.read_s + self.read_growth_s * (start + stop - 1) / 2)

    def saved_s(self, candidate: Evictable) -> float:
        """Seconds a return would save by finding in memory what only this conversation holds; never negative."""
        start = candidate.position - candidate.freed_tokens
        saved_s = self.reading_s(start, candidate.position) - candidate.freed_bytes / self.bytes_per_s
        if candidate.is_on_disk:
            saved_s = min(saved_s, candidate.freed_bytes / self.disk_bytes_per_s)
        return max(0.0, saved_s)


STEADY_SHARE = 0.05
"""Of the time scale on which a score changes, for which it may stand."""


SLACK = 0.5
"""The median of the next gap over the usual one, beyond 1, at a jitter of 1: who is regular is overdue soon."""


class Policy(Protocol):
    """Whom to evict."""

    @property
    def name(self) -> str: ...

    @property
    def margin(self) -> float:
        """A capture is refused unless it scores so many times what would go for it; 0: who comes always wins."""

    def score(self, candidate: Evictable, costs: Costs, now_s: float) -> float:
        """The lowest goes first."""

    def steady_s(self, history: History, idle_s: float) -> float:
        """How long a score may stand while nothing but time changes."""


@dataclass(frozen=True)
class LruPolicy:
    """The least recently used goes."""

    name: str = "lru"
    margin: float = 0.0

    def score(self, candidate: Evictable, costs: Costs, now_s: float) -> float:  # noqa: ARG002
        return candidate.last_used_s

    def steady_s(self, history: History, idle_s: float) -> float:  # noqa: ARG002
        return math.inf


@dataclass(frozen=True)
class GdsfPolicy:
    """Greedy-dual size with frequency: uses x seconds saved a MiB, over the score of the last that went when it was
    last used, so that what is not used sinks as others go."""

    name: str = "gdsf"
    margin: float = 0.0

    def score(self, candidate: Evictable, costs: Costs, now_s: float) -> float:  # noqa: ARG002
        uses = candidate.history.turns + candidate.history.forks
        return candidate.floor + uses * costs.saved_s(candidate) * (1 << 20) / max(1, candidate.freed_bytes)

    def steady_s(self, history: History, idle_s: float) -> float:  # noqa: ARG002
        return math.inf


@dataclass(frozen=True)
class ValuePolicy:
    """Expected seconds saved, per byte and second of holding it.

        P(it returns | turns, idle) x (seconds to read again - seconds to restore) / (bytes x expected wait)

    P starts at `first_return` for a conversation of one turn, which is therefore on probation, and grows with each
    turn. It falls once the idle time passes what is usual for the conversation. The wait is why agents that go round
    are not evicted just before their turn: of equals, the one whose turn is furthest off goes, also if it came last.
    """

    name: str = "value"
    margin: float = 1.3
    """Over 1, so that equals do not push each other out in turns."""
    first_return: float = 0.22
    """Probability that a conversation of one turn has a second."""
    turn_gain: float = 0.12
    """What each further turn adds to it, up to `most_return`."""
    most_return: float = 0.7
    shape: float = 1.7
    """Of the log-logistic law of the gaps, at a jitter of 1; regular gaps have a steeper one."""

    def score(self, candidate: Evictable, costs: Costs, now_s: float) -> float:
        return (
            self.return_probability(candidate.history, now_s - candidate.last_used_s)
            * costs.saved_s(candidate)
            / (max(1, candidate.freed_bytes) * self.wait_s(candidate.history, now_s - candidate.last_used_s))
        )

    def steady_s(self, history: History, idle_s: float) -> float:
        return STEADY_SHARE * (history.gap_s * history.jitter + max(0.0, idle_s))

    def return_probability(self, history: History, idle_s: float) -> float:
        uses = history.turns + history.forks - 1
        prior = min(self.most_return, self.first_return + self.turn_gain * uses)
        ratio = max(0.0, idle_s) / ((1.0 + SLACK * history.jitter) * max(history.gap_s, 1e-3))
        # Past the law's tail the exact exponent means nothing; the bound keeps the power finite.
        survives = 1.0 / (1.0 + math.exp(min(60.0, self.shape / history.jitter * math.log(max(ratio, 1e-9)))))
        return prior * survives / (prior * survives + 1.0 - prior)

    def wait_s(self, history: History, idle_s: float) -> float:
        """Expected seconds until it returns, if it does."""
        idle_s = max(0.0, idle_s)
        return max(history.gap_s - idle_s, 0.0) + history.jitter * (history.gap_s + idle_s) + 1e-3


POLICIES: tuple[Policy, ...] = (ValuePolicy(), GdsfPolicy(), LruPolicy())
"""The default first."""


def policy_named(name: str) -> Policy:
    """Raises KeyError."""
    return {policy.name: policy for policy in POLICIES}[name]


Rank = tuple[bool, int, float, float]


def rank(candidate: Evictable, score: float, *, is_superseded: bool, is_partner: bool) -> Rank:
    """Sorts who goes first to the front. `is_superseded`: the capture that room is made for will replace it;
    `is_partner`: it is the other side of the switch."""
    # A parent whose rows its workers all share frees nothing: evicting it would only forget it.
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
