"""The lane alone: slices, pauses, and who goes on."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import anyio.lowlevel
import pytest

from parkd.errors import Cancelled, EngineLost, ParkdError, QueueFull, ShuttingDown
from parkd.lane.lane import Lane
from parkd.lane.schedule import Job
from tests.integration.api.api_harness import until

pytestmark = pytest.mark.anyio


class InTurns:
    """The one that ran least recently goes on; all are asked to pause at once if there are others."""

    def next(self, jobs: Sequence[Job], now_s: float) -> Job:
        return max(jobs, key=lambda job: (job.waited_s, -job.number))

    def until_s(self, running: Job, others: Sequence[Job], now_s: float) -> float | None:
        return now_s if others else None


class Work:
    """A turn of so many steps, which writes its name at each."""

    def __init__(self, name: str, steps: int) -> None:
        self.name = name
        self.steps = steps
        self.asked = False
        self.stopped = False
        self.error: ParkdError | None = None
        self.hold = anyio.Event()

    def fail(self, error: ParkdError) -> None:
        self.error = error

    def stop(self) -> None:
        self.stopped = True

    def ask_to_pause(self) -> None:
        self.asked = True


class Bench:
    """A lane whose turns pause whenever they are asked to."""

    def __init__(self, max_queue: int = 8) -> None:
        self.said: list[str] = []
        self.ended: list[str] = []
        self.now_s = 0.0
        self.lane: Lane[Work] = Lane(self.run, max_queue=max_queue, monotonic=self.clock, schedule=InTurns())

    def clock(self) -> float:
        return self.now_s

    async def run(self, work: Work) -> None:
        try:
            for _ in range(work.steps):
                await anyio.lowlevel.checkpoint()
                self.said.append(work.name)
                self.now_s += 1.0
                if work.asked and self.lane.is_to_pause(work):
                    work.asked = False
                    await self.lane.pause(work)
        except ParkdError as error:
            work.fail(error)
            if isinstance(error, EngineLost):
                raise
        self.ended.append(work.name)


async def test_turns_go_on_where_they_were_paused() -> None:
    bench = Bench()
    async with anyio.create_task_group() as tasks:
        for work in (Work("a", 3), Work("b", 3), Work("c", 1)):
            bench.lane.submit(work)
        tasks.start_soon(bench.lane.serve)
        await anyio.sleep(0.05)
        tasks.cancel_scope.cancel()
    assert "".join(bench.said) == "abcabab"
    assert bench.ended == ["c", "a", "b"]


async def test_nothing_is_paused_for_nobody() -> None:
    bench = Bench()
    async with anyio.create_task_group() as tasks:
        bench.lane.submit(Work("a", 5))
        tasks.start_soon(bench.lane.serve)
        await anyio.sleep(0.02)
        tasks.cancel_scope.cancel()
    assert bench.ended == ["a"]
    assert not bench.lane.busy


class Held(Bench):
    """Its turn `a` is paused until the test has looked; the others wait for the test in their step."""

    async def run(self, work: Work) -> None:
        if work.name == "a":
            await super().run(work)
            return
        self.said.append(work.name)
        await work.hold.wait()
        if work.name == "lost":
            raise EngineLost("gone")
        self.ended.append(work.name)


async def held(bench: Held, other: Work) -> Work:
    first = Work("a", 9)
    bench.lane.submit(first)
    bench.lane.submit(other)
    await until(lambda: bench.lane.paused == 1 and bench.lane.running is other)
    return first


async def test_who_leaves_in_a_pause_does_not_disturb_the_other() -> None:
    bench, other = Held(), Work("b", 1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bench.lane.serve)
        first = await held(bench, other)
        assert bench.lane.leave(first) is False
        await anyio.sleep(0.01)
        assert isinstance(first.error, Cancelled)
        assert (bench.lane.paused, bench.lane.running, bench.lane.busy) == (0, other, True)
        other.hold.set()
        await bench.lane.idle()
        assert bench.ended == ["a", "b"]
        tasks.cancel_scope.cancel()


class Ending(Held):
    """Tells when its other turn is about to end."""

    def __init__(self) -> None:
        super().__init__()
        self.ending = anyio.Event()

    async def run(self, work: Work) -> None:
        await super().run(work)
        if work.name != "a":
            self.ending.set()


async def test_found_by_use_a_lane_with_paused_turns_alone_is_not_idle() -> None:
    """Between the end of one turn and the next slice of another, none runs."""
    bench, other = Ending(), Work("b", 1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bench.lane.serve)
        await held(bench, other)
        other.hold.set()
        await bench.ending.wait()
        assert (bench.lane.running, bench.lane.paused, bench.ended) == (None, 1, ["b"])
        await bench.lane.idle()
        assert bench.ended == ["b", "a"]
        tasks.cancel_scope.cancel()


class Compared(InTurns):
    """Notes what the key of each job used, as often as they are compared."""

    def __init__(self) -> None:
        self.seen: list[set[float]] = []

    def next(self, jobs: Sequence[Job], now_s: float) -> Job:
        self.seen.append({job.owner_used_s for job in jobs})
        return super().next(jobs, now_s)

    def until_s(self, running: Job, others: Sequence[Job], now_s: float) -> float | None:
        self.seen.append({job.owner_used_s for job in (running, *others)})
        return super().until_s(running, others, now_s)


async def test_jobs_of_one_key_are_compared_as_they_are_at_one_moment() -> None:
    """What a key used fades while the jobs are looked at, and would put one before another of the same key."""
    bench, schedule = Bench(), Compared()
    bench.lane.schedule = schedule

    def ticking() -> float:
        bench.now_s += 0.1
        return bench.now_s

    bench.clock = ticking  # type: ignore[method-assign]
    bench.lane._monotonic = ticking
    async with anyio.create_task_group() as tasks:
        for work in (Work("a", 3), Work("b", 3), Work("c", 3)):
            bench.lane.submit(work)
        tasks.start_soon(bench.lane.serve)
        await until(lambda: len(bench.ended) == 3)
        tasks.cancel_scope.cancel()
    assert len(schedule.seen) > 5
    assert [used for used in schedule.seen if len(used) > 1] == []


async def test_found_by_use_nobody_pauses_for_one_that_has_left() -> None:
    bench, first, other = Held(), Work("held", 1), Work("b", 1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bench.lane.serve)
        bench.lane.submit(first)
        await until(lambda: bench.lane.running is first)
        assert not bench.lane.is_to_pause(first)
        bench.lane.submit(other)
        assert first.asked
        assert bench.lane.is_to_pause(first)
        assert not bench.lane.is_to_pause(other)
        bench.lane.leave(other)
        assert not bench.lane.is_to_pause(first)
        tasks.cancel_scope.cancel()


async def test_paused_turns_count_as_waiting() -> None:
    bench, other = Held(max_queue=2), Work("b", 1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bench.lane.serve)
        await held(bench, other)
        bench.lane.submit(Work("c", 1))
        with pytest.raises(QueueFull, match="2 requests are waiting"):
            bench.lane.submit(Work("d", 1))
        tasks.cancel_scope.cancel()


async def test_a_lost_engine_ends_paused_turns_too() -> None:
    bench, other = Held(), Work("lost", 1)

    async def serve() -> None:
        with pytest.raises(EngineLost):
            await bench.lane.serve()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(serve)
        first = await held(bench, other)
        other.hold.set()
    assert isinstance(first.error, EngineLost)
    assert bench.lane.paused == 0


async def test_turns_that_have_begun_end_within_the_deadline_of_a_stop() -> None:
    bench, other = Held(), Work("b", 1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bench.lane.serve)
        await held(bench, other)
        other.hold.set()
        assert await bench.lane.drain(5.0) is True
        assert bench.ended == ["b", "a"]
        tasks.cancel_scope.cancel()


async def test_they_are_cut_behind_it() -> None:
    bench, other = Held(), Work("b", 1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bench.lane.serve)
        first = await held(bench, other)
        assert await bench.lane.drain(0.01) is False
        await anyio.sleep(0.01)
        assert isinstance(first.error, ShuttingDown)
        assert other.stopped
        assert not first.stopped
        other.hold.set()
        await bench.lane.idle()
        tasks.cancel_scope.cancel()
