"""A lane of several turns at once: who begins, who gives way, who ends."""

from __future__ import annotations

import random
from collections.abc import Sequence

import anyio
import anyio.lowlevel
import pytest

from parkd.errors import EngineLost, ParkdError, ShuttingDown
from parkd.lane.lane import Lane
from parkd.lane.schedule import Fair, Job, Schedule, Work
from parkd.lane.thread.rounds import Spent, next_prompt, reads_next
from parkd.types import TurnClass
from tests.integration.api.api_harness import until

pytestmark = pytest.mark.anyio


class Held:
    """A turn that runs until it is let go, or stopped."""

    def __init__(self, name: str, kind: TurnClass = TurnClass.INTERACTIVE) -> None:
        self.name = name
        self.kind = kind
        self.error: ParkdError | None = None
        self.ends = anyio.Event()
        self.raises: BaseException | None = None
        self.asked = 0

    def fail(self, error: ParkdError) -> None:
        self.error = self.error or error

    def stop(self) -> None:
        self.ends.set()

    def ask_to_pause(self) -> None:
        self.asked += 1


class Bench:
    def __init__(self, width: int, schedule: Schedule | None = None, **settings: object) -> None:
        self.now_s = 0.0
        self.began: list[str] = []
        self.ended: list[str] = []
        self.queued: list[str] = []
        self.most = 0
        self.lane: Lane[Held] = Lane(
            self.run,
            max_queue=64,
            monotonic=lambda: self.now_s,
            schedule=schedule,
            width=width,
            on_queued=lambda turn: self.queued.append(turn.name),
            **settings,  # type: ignore[arg-type]
        )

    async def run(self, turn: Held) -> None:
        self.began.append(turn.name)
        self.most = max(self.most, len(self.lane.running_turns))
        await turn.ends.wait()
        if turn.raises is not None:
            raise turn.raises
        self.ended.append(turn.name)

    def submit(self, *names: str) -> list[Held]:
        turns = [Held(name) for name in names]
        for turn in turns:
            self.lane.submit(turn)
        return turns


async def test_as_many_run_at_once_as_the_lane_is_wide() -> None:
    bench = Bench(2)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bench.lane.serve)
        a, b, c = bench.submit("a", "b", "c")
        await until(lambda: len(bench.began) == 2)
        await anyio.sleep(0.01)
        assert (bench.began, bench.lane.waiting, bench.lane.running) == (["a", "b"], 1, a)
        assert bench.lane.holds_up(a)
        b.ends.set()
        await until(lambda: bench.began == ["a", "b", "c"])
        assert bench.lane.running_turns == (a, c)
        assert not bench.lane.holds_up(a), "nobody waits"
        assert bench.lane.leave(a) is False
        await until(lambda: bench.ended == ["b", "a"])
        assert not c.ends.is_set(), "nobody but a was stopped"
        tasks.cancel_scope.cancel()
    assert bench.most == 2


async def test_only_who_waits_for_another_is_queued() -> None:
    bench = Bench(2)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bench.lane.serve)
        for name in "abc":
            bench.submit(name)
            await anyio.sleep(0.005)
        assert bench.queued == ["c"]
        tasks.cancel_scope.cancel()


async def test_who_cannot_join_waits_and_nobody_goes_before_it() -> None:
    bench = Bench(3, may_join=lambda turn, beside: turn.name != "big" or not beside)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bench.lane.serve)
        a, big, _ = bench.submit("a", "big", "c")
        await anyio.sleep(0.01)
        assert bench.began == ["a"]
        assert bench.lane.holds_up(a)
        a.ends.set()
        await until(lambda: bench.began == ["a", "big", "c"])
        big.ends.set()
        tasks.cancel_scope.cancel()


async def test_who_could_not_join_leaves_and_the_next_begins() -> None:
    bench = Bench(2, may_join=lambda turn, beside: turn.name != "big" or not beside)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bench.lane.serve)
        _, big, _ = bench.submit("a", "big", "c")
        await anyio.sleep(0.01)
        assert bench.lane.leave(big)
        await until(lambda: bench.began == ["a", "c"])
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("passes_over", [True, False])
async def test_who_awaits_what_another_computes_begins_when_it_is_there(passes_over: bool) -> None:
    ready: set[str] = set()
    bench = Bench(
        3,
        Fair(),
        awaits=lambda turn, begun: turn.name == "b" and any(each.name == "a" for each in begun) and not ready,
        passes_over=passes_over,
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bench.lane.serve)
        [a] = bench.submit("a")
        await until(lambda: bench.began == ["a"])
        bench.submit("b", "c")
        await anyio.sleep(0.01)
        assert bench.began == (["a", "c"] if passes_over else ["a"])
        assert a.asked == 0, "it is not to give way to one that waits for it"
        ready.add("a")
        bench.lane.look_again()
        await until(lambda: sorted(bench.began) == ["a", "b", "c"])
        tasks.cancel_scope.cancel()


async def test_nobody_is_asked_to_give_way_to_one_that_awaits_it() -> None:
    bench = Bench(1, Fair(), work_of=lambda _: Work(left_s=100.0), awaits=lambda turn, begun: bool(begun))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bench.lane.serve)
        [a] = bench.submit("a")
        await until(lambda: bench.began == ["a"])
        bench.now_s = 100.0
        bench.submit("b")
        await anyio.sleep(0.01)
        assert (a.asked, bench.lane.is_to_pause(a)) == (0, False)
        a.ends.set()
        await until(lambda: bench.began == ["a", "b"])
        tasks.cancel_scope.cancel()


async def test_of_those_that_run_as_many_are_asked_as_wait_the_last_in_the_order_first() -> None:
    kinds = {"batch": TurnClass.BATCH}
    bench = Bench(3, Fair(), work_of=lambda turn: Work(kinds.get(turn.name, TurnClass.INTERACTIVE), left_s=30.0))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bench.lane.serve)
        turns = bench.submit("a", "batch", "b")
        await until(lambda: len(bench.began) == 3)
        bench.now_s = 1.0  # all slices are over
        bench.submit("c")
        assert [turn.asked for turn in turns] == [0, 1, 0]
        bench.submit("d")
        assert sum(turn.asked for turn in turns) == 2
        bench.lane.keep_running(turns[1])
        assert turns[1].asked == 1, "its next slice has begun"
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("error", [EngineLost("gone"), KeyError("a mistake of ours")])
async def test_a_lost_engine_ends_all_that_run(error: BaseException) -> None:
    bench = Bench(3)
    async with anyio.create_task_group() as tasks:

        async def serve() -> None:
            with pytest.raises(EngineLost):
                await bench.lane.serve()

        tasks.start_soon(serve)
        a, b, c, d = bench.submit("a", "b", "c", "d")
        await until(lambda: len(bench.began) == 3)
        b.raises = error
        b.ends.set()
    assert all(isinstance(turn.error, EngineLost) for turn in (a, c, d))


async def test_a_drain_cuts_all_that_run() -> None:
    bench = Bench(2)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bench.lane.serve)
        a, b, c = bench.submit("a", "b", "c")
        await until(lambda: len(bench.began) == 2)
        assert await bench.lane.drain(0.01) is False
        await bench.lane.idle()
        assert all(isinstance(turn.error, ShuttingDown) for turn in (a, b, c))
        tasks.cancel_scope.cancel()


async def test_two_that_wait_for_idleness_both_learn_of_it() -> None:
    bench = Bench(2)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bench.lane.serve)
        a, b = bench.submit("a", "b")
        await until(lambda: len(bench.began) == 2)
        idle: list[int] = []

        async def wait(number: int) -> None:
            await bench.lane.idle()
            idle.append(number)

        tasks.start_soon(wait, 1)
        await anyio.sleep(0.005)
        a.ends.set()
        await anyio.sleep(0.005)
        tasks.start_soon(wait, 2)
        await anyio.sleep(0.005)
        assert not idle
        b.ends.set()
        await until(lambda: sorted(idle) == [1, 2])
        tasks.cancel_scope.cancel()


class ByNumber:
    """Whoever came last goes first, in slices of no time."""

    def next(self, jobs: Sequence[Job], now_s: float) -> Job:
        return max(jobs, key=lambda job: (job.waited_s, job.number))

    def until_s(self, running: Job, others: Sequence[Job], now_s: float) -> float | None:
        return now_s if others else None


@pytest.mark.parametrize("seed", range(12))
async def test_random_turns_all_end_and_never_more_run_than_the_lane_is_wide(seed: int) -> None:
    rng = random.Random(seed)
    width = rng.randint(1, 4)
    lane: Lane[Held]
    ended: list[Held] = []
    most = 0

    async def run(turn: Held) -> None:
        nonlocal most
        try:
            for _ in range(rng.randint(1, 12)):
                most = max(most, len(lane.running_turns))
                assert turn in lane.running_turns
                await anyio.lowlevel.checkpoint()
                if turn.ends.is_set():
                    break
                if turn.asked:
                    turn.asked = 0
                    if lane.is_to_pause(turn) and rng.random() < 0.8:
                        await lane.pause(turn)
                    else:
                        lane.keep_running(turn)
        except ParkdError as error:
            turn.fail(error)
        ended.append(turn)

    lane = Lane(
        run,
        max_queue=64,
        monotonic=lambda: float(len(ended)),
        schedule=ByNumber(),
        width=width,
        may_join=lambda turn, beside: turn.name != "big" or len(beside) < 2,
    )
    left, turns = [], []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lane.serve)
        for _ in range(20):
            turns.append(Held(rng.choice(["small", "big"])))
            lane.submit(turns[-1])
            if rng.random() < 0.5:
                await anyio.lowlevel.checkpoint()
            if rng.random() < 0.2:
                gone = rng.choice(turns)
                if lane.leave(gone):
                    left.append(gone)
        await lane.idle()
        await until(lambda: len(ended) + len(left) == len(turns))
        tasks.cancel_scope.cancel()
    assert most <= width
    assert not lane.busy
    assert not lane.waiting


@pytest.mark.parametrize("share", [0.2, 0.5, 0.75])
def test_prompts_have_their_share_of_the_time(share: float) -> None:
    rng, spent = random.Random(1), Spent()
    for _ in range(4000):
        if reads_next(spent, share):
            spent = Spent(spent.reading_s + rng.uniform(0.05, 0.4), spent.stepping_s)
        else:
            spent = Spent(spent.reading_s, spent.stepping_s + rng.uniform(0.01, 0.03))
    assert spent.reading_s / (spent.reading_s + spent.stepping_s) == pytest.approx(share, abs=0.02)


def test_a_short_prompt_is_read_soon_and_a_long_one_is_not_forgotten() -> None:
    left, chunks, ended_at = [9000, 700, 8000], 0, dict[int, int]()
    while any(left):
        there = [index for index, tokens in enumerate(left) if tokens]
        chosen = there[next_prompt([left[index] for index in there], chunks)]
        left[chosen] = max(0, left[chosen] - 500)
        chunks += 1
        if not left[chosen]:
            ended_at[chosen] = chunks
    assert ended_at[1] == 3, "its two chunks, and one of the first between them"
    assert ended_at[0] < ended_at[2] == 18 + 2 + 16


@pytest.mark.parametrize("can_pause", [True, False])
async def test_what_a_newcomer_costs_grows_with_those_that_are_there_and_not_with_their_square(can_pause: bool) -> None:
    """Hundreds run at once before another server. `asked` counts what is asked of the turns."""
    asked = 0

    def work_of(_turn: Held) -> Work:
        nonlocal asked
        asked += 1
        return Work(first_s=1.0, left_s=2.0)

    bench = Bench(40, Fair(), work_of=work_of, can_pause=can_pause)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bench.lane.serve)
        running = bench.submit(*(f"running {number}" for number in range(40)))
        await until(lambda: len(bench.began) == 40)
        waiting = bench.submit(*(f"waiting {number}" for number in range(40)))
        before = asked
        [last] = bench.submit("last")
        assert asked - before <= (3 * 81 if can_pause else 0)
        for turn in [*running, *waiting, last]:
            turn.ends.set()
        await until(lambda: len(bench.ended) == 81)
        tasks.cancel_scope.cancel()
