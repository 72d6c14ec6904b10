"""The engine's thread, the event channel, and bodies."""

from __future__ import annotations

import threading

import anyio
import pytest

from parkd.errors import Cancelled, EngineFailure, InvalidRequest
from parkd.lane.events import EVENT_CHARACTERS, UNREAD_LIMIT_CHARACTERS, EventChannel
from parkd.lane.thread.engine_thread import EngineThread
from parkd.proxy.requests import parse_object
from parkd.types import CacheOutcome, CacheReport, Finished, FinishReason, Progress, Started, TextDelta, Timings

pytestmark = pytest.mark.anyio
REPORT = CacheReport(CacheOutcome.COLD, 1, 0)
END = Finished(FinishReason.STOP, REPORT, Timings())


async def test_calls_run_in_order_on_one_thread_that_is_not_the_loops() -> None:
    thread = EngineThread()
    thread.start()
    seen: list[tuple[int, int]] = []

    async def call(number: int) -> None:
        await thread.run(lambda: seen.append((number, threading.get_ident())))

    async with anyio.create_task_group() as tasks:
        for number in range(20):
            tasks.start_soon(call, number)
    assert [number for number, _ in seen] == list(range(20))
    assert len({ident for _, ident in seen}) == 1
    assert seen[0][1] != threading.get_ident()
    assert thread.stop(5)


@pytest.mark.parametrize("error", [ValueError, SystemExit, StopIteration])
async def test_whatever_a_call_raises_reaches_its_caller_and_the_thread_lives(error: type[BaseException]) -> None:
    thread = EngineThread()
    thread.start()

    def fail() -> None:
        raise error

    with pytest.raises((error, RuntimeError)):
        await thread.run(fail)
    assert await thread.run(lambda: 5) == 5
    assert thread.stop(5)


async def test_a_caller_that_is_cancelled_does_not_break_the_thread() -> None:
    thread, opened = EngineThread(), threading.Event()
    thread.start()
    with anyio.move_on_after(0.01):
        await thread.run(opened.wait, 10)
    opened.set()
    assert await thread.run(lambda: "next") == "next"
    assert thread.stop(5)


async def test_unread_text_is_joined_and_only_the_newest_progress_is_kept() -> None:
    channel = EventChannel()
    for event in (Started(REPORT), Progress(1, 9), Progress(5, 9), TextDelta("a"), TextDelta("b"), END):
        channel.push(event)
    read = [await channel.next(1) for _ in range(4)]
    assert read == [Started(REPORT), Progress(5, 9), TextDelta("ab"), END]
    assert channel.closed


async def test_waiting_ends_with_an_event_or_with_none() -> None:
    channel = EventChannel()
    assert await channel.next(0.01) is None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_push_later, channel)
        assert await channel.next(5) == TextDelta("late")


async def test_a_failure_comes_after_what_was_said_before_it() -> None:
    channel = EventChannel()
    channel.push(TextDelta("a"))
    channel.fail(EngineFailure("broken"))
    channel.push(TextDelta("b"))
    assert await channel.next(1) == TextDelta("a")
    with pytest.raises(EngineFailure):
        await channel.next(1)


async def test_a_reader_too_far_behind_is_given_up_and_its_text_let_go() -> None:
    channel, told = EventChannel(), []
    channel.on_overflow = lambda: told.append(True)
    piece = "x" * 1000
    for _ in range(UNREAD_LIMIT_CHARACTERS // 1000 + 1):
        channel.push(TextDelta(piece))
    assert channel.cancel.is_set()
    assert told == [True]
    with pytest.raises(Cancelled):
        await channel.next(1)


async def test_a_reader_that_keeps_up_is_never_given_up() -> None:
    channel = EventChannel()
    for _ in range(UNREAD_LIMIT_CHARACTERS // EVENT_CHARACTERS * 3):
        channel.push(TextDelta("x" * 200))
        await channel.next(1)
    assert not channel.cancel.is_set()


async def _push_later(channel: EventChannel) -> None:
    await anyio.sleep(0.01)
    channel.push(TextDelta("late"))


async def test_a_body_nested_too_deeply_is_refused() -> None:
    def nested(levels: int) -> bytes:
        return b'{"a":' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"

    assert await parse_object(nested(100))
    with pytest.raises(InvalidRequest, match="levels deep"):
        await parse_object(nested(101))


async def test_a_second_reader_reads_from_the_first_event_on() -> None:
    channel = EventChannel()
    channel.push(Started(REPORT))
    for text in ("a", "b"):
        channel.push(TextDelta(text))
    assert await channel.next(1) == Started(REPORT)
    assert channel.rewind()
    channel.push(END)
    told = [await channel.next(1) for _ in range(4)]
    assert told[0] == Started(REPORT)
    assert "".join(event.text for event in told if isinstance(event, TextDelta)) == "ab"
    assert told[-1] == END


async def test_an_answer_too_long_to_keep_or_one_that_failed_is_not_read_again() -> None:
    channel = EventChannel()
    for _ in range(3):
        channel.push(TextDelta("x" * (UNREAD_LIMIT_CHARACTERS // 2 - 2 * EVENT_CHARACTERS)))
        await channel.next(1)
    assert not channel.can_rewind
    assert not channel.rewind()
    failed = EventChannel()
    failed.fail(Cancelled("gone"))
    assert not failed.rewind()
