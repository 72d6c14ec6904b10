"""The engine's thread where several turns are under way: what comes between what, and whose an error is."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from parkd.engine_adapter.base import Seat
from parkd.errors import EngineFailure
from parkd.lane.thread.engine_thread import EngineThread
from parkd.lane.thread.work import NextChunk, NextStep, Work, finished
from tests.fakes.engine import FakeEngine

pytestmark = pytest.mark.anyio


class Bench:
    """Works that note what they do, and take a second of a clock of their own for each part."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.ahead: list[list[Seat]] = []
        self.fails: Exception | None = None
        self.now_s = 0.0
        self.begin = threading.Event()

    def step_ahead(self, seats: Sequence[Seat]) -> None:
        self.ahead.append(list(seats))
        if self.fails is not None:
            raise self.fails

    def part(self, name: str, parts: int, kind: Callable[[int], NextStep | NextChunk], fails_at: int = -1) -> Work[str]:
        self.begin.wait(10)
        for number in range(parts):
            yield kind(parts - number)
            if number == fails_at:
                raise EngineFailure(name)
            self.done.append(name)
            self.now_s += 1.0
        return f"{name} ended"

    def answer(self, name: str, steps: int, fails_at: int = -1) -> Work[str]:
        seat = FakeEngine()
        return self.part(name, steps, lambda _left: NextStep(seat), fails_at)

    def prompt(self, name: str, chunks: int) -> Work[str]:
        return self.part(name, chunks, lambda left: NextChunk(left * 512))

    @asynccontextmanager
    async def thread(self, **settings: Any) -> AsyncIterator[EngineThread]:
        thread = EngineThread(step_ahead=self.step_ahead, monotonic=lambda: self.now_s, **settings)
        thread.start()
        try:
            yield thread
        finally:
            self.begin.set()
            assert await asyncio.to_thread(thread.stop, 10)

    async def all(self, thread: EngineThread, *works: Work[str]) -> list[Any]:
        """Begins all before any goes on."""
        asked = [asyncio.ensure_future(thread.work(work)) for work in works]
        await asyncio.sleep(0.02)
        self.begin.set()
        return await asyncio.gather(*asked, return_exceptions=True)


async def test_answers_step_together_and_each_ends_alone() -> None:
    bench = Bench()
    async with bench.thread() as thread:
        assert await bench.all(thread, bench.answer("a", 3), bench.answer("b", 1)) == ["a ended", "b ended"]
    assert bench.done == ["a", "b", "a", "a"]
    assert [len(seats) for seats in bench.ahead] == [2], "one alone needs no telling"


@pytest.mark.parametrize(("share", "expected"), [(0.5, "aPaPaPaPaP"), (0.25, "aPaaaPaaaP"), (0.75, "aPPPaPPPaP")])
async def test_chunks_come_between_steps_in_their_share_of_the_time(share: float, expected: str) -> None:
    bench = Bench()
    async with bench.thread(read_share=share) as thread:
        await bench.all(thread, bench.answer("a", 40), bench.prompt("P", 40))
    assert "".join(bench.done[: len(expected)]) == expected
    assert not bench.ahead, "one answer has nobody to step with"


async def test_calls_come_between_two_parts() -> None:
    bench = Bench()
    async with bench.thread() as thread:
        asked = asyncio.ensure_future(thread.work(bench.answer("a", 50)))
        call = asyncio.ensure_future(thread.run(lambda: bench.done.append("call")))
        await asyncio.sleep(0.02)
        bench.begin.set()
        await call
        assert await asked == "a ended"
    assert bench.done[:2] == ["call", "a"]


async def test_an_error_is_of_its_work_alone() -> None:
    bench = Bench()
    async with bench.thread() as thread:
        got = await bench.all(thread, bench.answer("a", 4), bench.answer("b", 4, fails_at=1), bench.prompt("P", 2))
    assert isinstance(got[1], EngineFailure)
    assert (got[0], got[2]) == ("a ended", "P ended")
    assert (bench.done.count("a"), bench.done.count("b")) == (4, 1)


@pytest.mark.parametrize("error", [EngineFailure("no room"), ValueError("a mistake of ours")])
async def test_what_cannot_be_made_at_once_is_made_alone(error: Exception) -> None:
    bench = Bench()
    bench.fails = error
    async with bench.thread() as thread:
        assert await bench.all(thread, bench.answer("a", 3), bench.answer("b", 3)) == ["a ended", "b ended"]
    assert len(bench.ahead) >= 3


async def test_a_thread_that_is_stopped_ends_what_is_under_way_first() -> None:
    bench = Bench()
    bench.begin.set()
    thread = EngineThread(step_ahead=bench.step_ahead, monotonic=lambda: bench.now_s)
    thread.start()
    asked = asyncio.ensure_future(thread.work(bench.answer("a", 2000)))
    await asyncio.sleep(0)
    assert await asyncio.to_thread(thread.stop, 10)
    assert await asked == "a ended"
    assert len(bench.done) == 2000


async def test_work_knows_whether_others_wait() -> None:
    bench, seen = Bench(), []

    def noting(thread: EngineThread) -> Work[None]:
        bench.begin.wait(10)
        for _ in range(3):
            yield NextChunk(1)
            seen.append(thread.is_shared)

    async with bench.thread() as thread:
        bench.begin.set()
        await thread.work(noting(thread))
        assert seen == [False] * 3
        bench.begin.clear()
        seen.clear()
        await asyncio.gather(thread.work(noting(thread)), bench.all(thread, bench.answer("a", 50)))
        assert seen == [True] * 3


def test_work_that_nothing_comes_between() -> None:
    bench = Bench()
    bench.begin.set()
    assert finished(bench.answer("a", 3)) == "a ended"
