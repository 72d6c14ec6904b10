"""Simulates the lane under a schedule: turns of known length, one at a time, with what stopping them costs.

Decisions are the lane's own. A turn can be stopped between two steps. What a schedule is told of a turn's length is
what `believed` makes of it, since a server does not know it either.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from parkd.lane.schedule import SCHEDULES, Accounts, Job, Schedule, Work
from parkd.replay.trace import TraceHeader, TurnRecord
from parkd.state import Costs
from parkd.types import TurnClass

SIDE_TOKENS = 64
"""A trace does not say what a request asked for: an answer of at most so many tokens counts as a side job."""
STEP_S = 0.1
"""About a chunk of a prompt, or a few tokens of an answer."""


@dataclass(frozen=True, slots=True)
class Task:
    """A turn. Seconds of the engine's time."""

    at_s: float
    read_s: float
    answer_s: float
    switch_s: float = 0.0
    """To park it and restore it."""
    owner: str = ""
    kind: TurnClass = TurnClass.INTERACTIVE

    @property
    def needs_s(self) -> float:
        return self.read_s + self.answer_s


@dataclass
class Done:
    """How a turn went."""

    task: Task
    first_s: float = 0.0
    """From its arrival to its first token."""
    end_s: float = 0.0
    """From its arrival to its end."""
    longest_wait_s: float = 0.0
    """In one piece, before it ran or between two slices."""
    pauses: int = 0


@dataclass
class Simulation:
    """What came of all turns."""

    turns: list[Done]
    ran_s: float = 0.0
    switched_s: float = 0.0
    """For pauses alone."""
    end_s: float = 0.0
    longest_round_s: float = 0.0
    """A slice for each of those that were there at once, at most."""


@dataclass(eq=False)
class _Live:
    done: Done
    ran_s: float = 0.0
    waits_since_s: float = 0.0

    @property
    def left_s(self) -> float:
        return self.done.task.needs_s - self.ran_s


Believed = Callable[[Task, float], float]
"""(turn, seconds it had) -> the seconds that it is believed to need yet."""


def known(task: Task, ran_s: float) -> float:
    return task.needs_s - ran_s


def simulate(
    tasks: Iterable[Task], schedule: Schedule, *, step_s: float = STEP_S, believed: Believed = known
) -> Simulation:
    """Runs all turns to their end, in the order of their arrival if the schedule says no other."""
    coming = sorted(tasks, key=lambda task: task.at_s)
    result = Simulation([Done(task) for task in coming])
    accounts, jobs = Accounts(), dict[int, _Live]()
    running: int | None = None
    now_s, arrived = 0.0, 0

    def job(number: int) -> Job:
        live = jobs[number]
        task = live.done.task
        first_s = max(0.0, task.read_s - live.ran_s)
        work = Work(task.kind, first_s, max(first_s, believed(task, live.ran_s)), task.switch_s)
        return accounts.job(number, work, now_s)

    while arrived < len(coming) or jobs:
        if not jobs:
            now_s = max(now_s, coming[arrived].at_s)
        while arrived < len(coming) and coming[arrived].at_s <= now_s:
            jobs[arrived] = _Live(result.turns[arrived], waits_since_s=coming[arrived].at_s)
            accounts.arrive(arrived, coming[arrived].owner, coming[arrived].at_s)
            arrived += 1
        if running is None:
            running = schedule.next([job(number) for number in jobs], now_s).number
            live = jobs[running]
            live.done.longest_wait_s = max(live.done.longest_wait_s, now_s - live.waits_since_s)
            if live.ran_s:
                now_s += live.done.task.switch_s
                result.switched_s += live.done.task.switch_s
            accounts.run(running, now_s)
            continue
        accounts.count(running, now_s)
        present = {number: job(number) for number in jobs}
        result.longest_round_s = max(result.longest_round_s, sum(each.slice_s for each in present.values()))
        others = [each for number, each in present.items() if number != running]
        until_s, live = schedule.until_s(present[running], others, now_s), jobs[running]
        if until_s is not None and until_s <= now_s and live.ran_s:
            accounts.rest(running, now_s)
            live.done.pauses += 1
            live.waits_since_s, running = now_s, None
            continue
        ends_s = now_s + live.left_s
        at_s = min(
            [ends_s, *([] if until_s is None else [until_s]), *(each.at_s for each in coming[arrived : arrived + 1])]
        )
        ahead_s = min(live.left_s, max(1, math.ceil((at_s - now_s) / step_s - 1e-9)) * step_s)
        if live.ran_s < live.done.task.read_s <= live.ran_s + ahead_s + 1e-9:
            live.done.first_s = now_s + live.done.task.read_s - live.ran_s - live.done.task.at_s
        now_s += ahead_s
        live.ran_s += ahead_s
        result.ran_s += ahead_s
        if live.left_s <= 1e-9:
            live.done.end_s = now_s - live.done.task.at_s
            accounts.count(running, now_s)
            accounts.leave(running)
            del jobs[running]
            running = None
    result.end_s = now_s
    return result


@dataclass(frozen=True)
class Waits:
    """First tokens of one class, in seconds."""

    turns: int
    mean_s: float
    p95_s: float


def waits(done: Sequence[Done]) -> Mapping[TurnClass, Waits]:
    """By class, of those that there are."""
    by_class: dict[TurnClass, list[float]] = defaultdict(list)
    for each in done:
        by_class[each.task.kind].append(each.first_s)
    return {kind: _waits(sorted(by_class[kind])) for kind in TurnClass if kind in by_class}


def _waits(seconds: list[float]) -> Waits:
    last = math.ceil(0.95 * len(seconds)) - 1
    return Waits(len(seconds), sum(seconds) / len(seconds), seconds[last])


def tasks_of(
    header: TraceHeader, turns: Sequence[TurnRecord], read_s: Sequence[float], costs: Costs, decode_s: float
) -> list[Task]:
    """The turns of a trace: `read_s` is what each takes until its prompt is read, `decode_s` what a token takes."""
    tasks = []
    for turn, prompt_s in zip(turns, read_s, strict=True):
        answered = max(1, turn.live_tokens - turn.prompt_tokens)
        size = max(turn.live_tokens, turn.prompt_tokens) * sum(header.row_bytes) + sum(header.fixed_bytes)
        tasks.append(
            Task(
                turn.at_s,
                prompt_s + decode_s,
                (answered - 1) * decode_s,
                2 * costs.moving_s(size, from_disk=False),
                turn.key,
                TurnClass.SIDE if answered <= SIDE_TOKENS else TurnClass.INTERACTIVE,
            )
        )
    return tasks


def schedule_table(tasks: Sequence[Task]) -> str:
    """What each schedule makes of the same turns, as text."""
    heads = f"{'schedule':<10}{'class':<13}{'turns':>7}{'first token':>13}{'p95':>9}{'whole turn':>12}"
    lines = [f"{heads}{'pauses':>8}{'switching':>10}"]
    for name, schedule in SCHEDULES.items():
        done = simulate(tasks, schedule)
        share = done.switched_s / (done.ran_s + done.switched_s)
        for kind, seen in waits(done.turns).items():
            own = [each for each in done.turns if each.task.kind is kind]
            whole_s, pauses = sum(each.end_s for each in own) / len(own), sum(each.pauses for each in own)
            lines.append(
                f"{name:<10}{kind.value:<13}{seen.turns:>7,}{seen.mean_s:>11.1f} s{seen.p95_s:>7.1f} s"
                f"{whole_s:>10.1f} s{pauses:>8,}{share:>10.1%}"
            )
    return "\n".join(lines)
