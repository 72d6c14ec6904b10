"""The lane alone: order, bound, leaving, closing."""

from __future__ import annotations

import anyio
import pytest

from parkd.errors import EngineLost, ParkdError, QueueFull, ShuttingDown
from parkd.lane.lane import LONGEST_RETRY_AFTER_S, Lane

pytestmark = pytest.mark.anyio


class Job:
    def __init__(self) -> None:
        self.error: ParkdError | None = None
        self.stopped = anyio.Event()

    def ask_to_pause(self) -> None:
        raise AssertionError("a queue in order of arrival pauses nothing")

    def fail(self, error: ParkdError) -> None:
        self.error = error

    def stop(self) -> None:
        self.stopped.set()


async def until_stopped(job: Job) -> None:
    await job.stopped.wait()


def make(run=until_stopped, *, max_queue: int = 2, monotonic=lambda: 0.0) -> Lane[Job]:  # type: ignore[no-untyped-def]
    return Lane(run, max_queue=max_queue, monotonic=monotonic)


async def test_a_job_that_waits_leaves_and_one_that_runs_is_stopped() -> None:
    lane, first, second = make(), Job(), Job()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lane.serve)
        lane.submit(first)
        await anyio.sleep(0.001)
        lane.submit(second)
        assert lane.leave(second) is True
        assert lane.leave(first) is False
        await lane.idle()
        assert not second.stopped.is_set()
        assert lane.leave(first) is False  # long gone: nothing to do
        tasks.cancel_scope.cancel()


async def test_the_bound_counts_those_that_wait() -> None:
    lane = make(max_queue=2)
    lane.submit(Job())
    lane.submit(Job())
    with pytest.raises(QueueFull) as full:
        lane.submit(Job())
    assert 1 <= full.value.retry_after_s <= LONGEST_RETRY_AFTER_S
    assert lane.waiting == 2


async def test_one_key_takes_at_most_half_of_the_queue() -> None:
    """Found by use 3: one key could take every place of the queue, so that all others got a 503."""
    owners: dict[Job, str] = {}
    lane = Lane(until_stopped, max_queue=4, monotonic=lambda: 0.0, owners=2, owner_of=lambda job: owners[job])

    def submit(owner: str) -> None:
        job = Job()
        owners[job] = owner
        lane.submit(job)

    submit("anna")
    submit("anna")
    lane.check_room("ben")
    for refused in (lane.check_room, submit):
        with pytest.raises(QueueFull, match="2 requests of this key are waiting"):
            refused("anna")
    submit("ben")
    submit("ben")
    with pytest.raises(QueueFull, match="4 requests are waiting"):
        submit("carl")


async def test_retry_after_follows_the_length_of_turns() -> None:
    now = [0.0]

    async def slow(_job: Job) -> None:
        now[0] += 40.0

    lane = make(slow, max_queue=1, monotonic=lambda: now[0])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lane.serve)
        for _ in range(20):
            lane.submit(Job())
            await anyio.sleep(0.001)
        tasks.cancel_scope.cancel()
    lane.submit(Job())
    with pytest.raises(QueueFull) as full:
        lane.submit(Job())
    assert 35 <= full.value.retry_after_s <= 41


async def test_a_drain_refuses_who_waits_and_cuts_who_runs_too_long() -> None:
    lane, first, second = make(), Job(), Job()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lane.serve)
        lane.submit(first)
        await anyio.sleep(0.001)
        lane.submit(second)
        assert await lane.drain(0.01) is False
        assert isinstance(second.error, ShuttingDown)
        assert isinstance(first.error, ShuttingDown)
        await lane.idle()
        with pytest.raises(ShuttingDown):
            lane.submit(Job())
        assert await lane.drain(0.01) is True
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("error", [EngineLost("gone"), KeyError("a mistake of ours")])
async def test_an_error_that_ends_the_lane_is_told_to_everyone(error: Exception) -> None:
    async def broken(_job: Job) -> None:
        raise error

    lane, first, second = make(broken), Job(), Job()
    lane.submit(first)
    lane.submit(second)
    with pytest.raises(EngineLost):
        await lane.serve()
    assert isinstance(second.error, EngineLost)
    with pytest.raises(EngineLost):
        lane.submit(Job())
