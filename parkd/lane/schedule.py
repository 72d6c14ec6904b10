"""Who runs next, and until when: pure decisions over the turns that are there.

A turn that waits, is paused or runs is a job. One that runs is not stopped before its slice is over, which is so long
that stopping it and going on takes a small share of it. Then the first of these goes on:

    overdue      has waited longer than its patience, the most overdue first; not if another key that is there had less,
                 unless its whole key has waited as long: a flood is overdue for ever, and would take all
    short        needs little of what the longest needs: a title, a question of its own; unless its key is far ahead
    others       of the key that used least; what has begun to read its prompt; then what used least, or needs least
    batch        the same, behind all others
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from parkd.types import TurnClass

LEAST_SLICE_S = 0.25
"""Stopping costs some milliseconds of itself, however small the state is."""
SWITCH_SHARE = 0.05
"""The most of a slice, and of what stopping and going on takes, that the latter may be."""
SHORT_S = 1.0
"""A job that needs no longer is short."""
SHORT_SHARE = 0.1
"""So is one that needs no more than this of what the longest needs."""
SHORT_LEAD_S = 10.0
"""Short jobs of a key that had this much more than another of those there are as its others: many of them are long."""
PATIENCE_ROUNDS = 2.0
"""How often all others may have a slice each while one waits."""
BATCH_ROUNDS = 8.0
STRETCH = 3.0
"""A job that has not answered yet waits for this many times what its first token takes."""
HALF_LIFE_S = 60.0
"""What a key used counts half after this long."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a turn needs from now on, as far as that is known. Seconds of the engine's time."""

    kind: TurnClass = TurnClass.INTERACTIVE
    first_s: float = 0.0
    """To its first token; 0 once that is there."""
    left_s: float = 0.0
    """To its end."""
    switch_s: float = 0.0
    """To park it and restore it later."""
    can_pause: bool = True


NO_WORK = Work()


@dataclass(frozen=True, slots=True)
class Job:
    """A turn, as far as its place in the order depends on it."""

    number: int
    """In the order of arrival."""
    work: Work = NO_WORK
    has_begun: bool = False
    waited_s: float = 0.0
    """Since it ran last, or since it came."""
    ran_s: float = 0.0
    """In its present slice."""
    used_s: float = 0.0
    """What it had of the engine, where one that came later begins with what the one that used least had then."""
    owner_used_s: float = 0.0
    """What its key had of the engine lately."""
    owner_waited_s: float = math.inf
    """Since its key had the engine."""

    @property
    def slice_s(self) -> float:
        """How long it runs at least before it gives way."""
        return max(LEAST_SLICE_S, self.work.switch_s * (1 / SWITCH_SHARE - 1))


class Schedule(Protocol):
    """An order of jobs."""

    def next(self, jobs: Sequence[Job], now_s: float) -> Job:
        """The job that runs now; there is at least one."""

    def until_s(self, running: Job, others: Sequence[Job], now_s: float) -> float | None:
        """When the running job is to give way to others, or is to be asked again, if that is later than now; None: it
        runs to its end unless another job comes."""


@dataclass(frozen=True)
class Fifo:
    """In the order of arrival, each to its end."""

    def next(self, jobs: Sequence[Job], now_s: float) -> Job:  # noqa: ARG002
        return min(jobs, key=lambda job: job.number)

    def until_s(self, running: Job, others: Sequence[Job], now_s: float) -> float | None:  # noqa: ARG002
        return None


@dataclass(frozen=True)
class Fair:
    """Short ones within a slice, the others in turns."""

    def next(self, jobs: Sequence[Job], now_s: float) -> Job:  # noqa: ARG002
        round_s = sum(job.slice_s for job in jobs)
        short_s = max(SHORT_S, SHORT_SHARE * max(job.work.left_s for job in jobs))
        used_s = [job.owner_used_s for job in jobs if job.work.kind is not TurnClass.BATCH]
        least_s = min(used_s, default=math.inf)
        least_of_all_s = min(job.owner_used_s for job in jobs)

        def place(job: Job) -> tuple[float, ...]:
            is_behind = job.owner_used_s <= (least_of_all_s if job.work.kind is TurnClass.BATCH else least_s)
            return _place(job, round_s, short_s, least_s + SHORT_LEAD_S, is_behind=is_behind)

        return min(jobs, key=place)

    def until_s(self, running: Job, others: Sequence[Job], now_s: float) -> float | None:
        if not others or not running.work.can_pause:
            return None
        left_s = running.slice_s - running.ran_s
        if left_s > 0:
            return now_s + left_s
        if self.next([running, *others], now_s).number != running.number:
            return now_s
        return now_s + running.slice_s


def patience_s(job: Job, round_s: float) -> float:
    """How long a job waits at most before it is overdue, if a slice for each takes `round_s`."""
    rounds = BATCH_ROUNDS if job.work.kind is TurnClass.BATCH else PATIENCE_ROUNDS
    return max(rounds * round_s, STRETCH * job.work.first_s)


def _place(job: Job, round_s: float, short_s: float, most_used_s: float, *, is_behind: bool) -> tuple[float, ...]:
    """The lowest runs first. A short job is no longer than `short_s`, of a key that had at most `most_used_s`. One that
    `is_behind` is of a key that had no more than another before which it would not run anyway."""
    patience = patience_s(job, round_s)
    overdue = job.waited_s / patience
    if overdue > 1 and (is_behind or job.owner_waited_s > patience):
        return (0, -overdue, job.number)
    work = job.work
    if work.kind is not TurnClass.BATCH and work.left_s <= short_s and job.owner_used_s <= most_used_s:
        return (1, work.left_s, job.number)
    # Two prompts read by turns would both be late.
    reads = job.has_begun and work.first_s > 0
    rank = 3 if work.kind is TurnClass.BATCH else 2
    return (rank, job.owner_used_s, not reads, job.used_s, work.left_s, job.number)


@dataclass
class _Account:
    owner: str
    used_s: float
    since_s: float
    """Since when it waits, or runs."""
    counted_s: float | None = None
    """Up to when its present slice is counted; None: it does not run."""
    has_begun: bool = False


@dataclass
class Accounts:
    """What each job and each key used: the memory that the decisions need. The lane and simulations keep one each."""

    _jobs: dict[int, _Account] = field(default_factory=dict)
    _owners: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Owner -> seconds used, and when that was so."""

    def arrive(self, number: int, owner: str, now_s: float) -> None:
        used_s = min((account.used_s for account in self._jobs.values()), default=0.0)
        self._jobs[number] = _Account(owner, used_s, now_s)

    def leave(self, number: int) -> None:
        self._jobs.pop(number, None)
        if not self._jobs:
            self._owners.clear()  # nobody is there to be fair to

    def run(self, number: int, now_s: float) -> None:
        """A job begins a slice."""
        account = self._jobs[number]
        account.since_s = account.counted_s = now_s
        account.has_begun = True

    def rest(self, number: int, now_s: float) -> None:
        """A job ends its slice, and waits."""
        self.count(number, now_s)
        account = self._jobs[number]
        account.since_s, account.counted_s = now_s, None

    def count(self, number: int, now_s: float) -> float:
        """Counts what the running job used up to now, before a decision. Returns the seconds since it was counted."""
        account = self._jobs[number]
        if account.counted_s is None:
            return 0.0
        seconds, account.counted_s = max(0.0, now_s - account.counted_s), now_s
        account.used_s += seconds
        self._owners[account.owner] = (self._owner_used_s(account.owner, now_s) + seconds, now_s)
        return seconds

    def job(self, number: int, work: Work, now_s: float) -> Job:
        account = self._jobs[number]
        since_s = max(0.0, now_s - account.since_s)
        waited_s, ran_s = (since_s, 0.0) if account.counted_s is None else (0.0, since_s)
        owner_used_s = self._owner_used_s(account.owner, now_s)
        _, owner_ran_s = self._owners.get(account.owner, (0.0, -math.inf))
        owner_waited_s = now_s - owner_ran_s
        return Job(number, work, account.has_begun, waited_s, ran_s, account.used_s, owner_used_s, owner_waited_s)

    def _owner_used_s(self, owner: str, now_s: float) -> float:
        used_s, at_s = self._owners.get(owner, (0.0, now_s))
        return float(used_s * 0.5 ** ((now_s - at_s) / HALF_LIFE_S))


SCHEDULES: dict[str, Schedule] = {"fair": Fair(), "fifo": Fifo()}
