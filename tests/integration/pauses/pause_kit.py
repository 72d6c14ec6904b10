"""Turns that are paused wherever a test says, with another conversation in the engine meanwhile."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from parkd.lane.schedule import Job
from parkd.lane.turn import Turn
from tests.integration.api.api_harness import Messages, Running, body_of, until

NOISE: Messages = [{"role": "user", "content": "Something else altogether, which overwrites what is live. " * 2}]
"""A conversation that runs in each pause."""
NOISE_TOKENS = 1
LONGEST_S = 120.0


class PausesOne:
    """A schedule that asks one turn to pause all the time, and lets others run to their end meanwhile."""

    def __init__(self, number: int = 1) -> None:
        self._number = number

    def next(self, jobs: Sequence[Job], now_s: float) -> Job:
        return max(jobs, key=lambda job: job.number)

    def until_s(self, running: Job, others: Sequence[Job], now_s: float) -> float | None:
        return now_s if running.number == self._number else None


def everywhere(_boundary: int) -> bool:
    return True


def at_random(seed: int, share: float) -> Callable[[int], bool]:
    rng = random.Random(seed)
    return lambda _boundary: rng.random() < share


@dataclass
class Pauser:
    """Pauses the next turn of a server at the boundaries `where`, by their number; runs a turn in each pause, then
    `between`. Nothing runs beside it."""

    server: Running
    where: Callable[[int], bool] = everywhere
    between: Callable[[], Awaitable[None]] | None = None
    noise: Messages | None = None
    pauses: int = 0
    boundaries: int = 0

    def __post_init__(self) -> None:
        lane = self.server.server.proxy.lane
        self._lane, self._pause, self._is_to_pause = lane, lane.pause, lane.is_to_pause
        lane.schedule, lane.width = PausesOne(lane._number + 1), 1
        lane.pause = self.pause  # type: ignore[method-assign]
        lane.is_to_pause = self.is_to_pause  # type: ignore[method-assign]

    def is_to_pause(self, turn: Turn) -> bool:
        self.boundaries += 1
        return self._is_to_pause(turn) and self.where(self.boundaries)

    async def pause(self, turn: Turn) -> None:
        self.pauses += 1
        asked: asyncio.Task[None] | None = None
        if self.noise is not None:
            asked = asyncio.create_task(self._ask(self.noise))
            await until(lambda: self._lane.waiting > 0)
        await self._pause(turn)
        if asked is not None:
            await asked
        if self.between is not None:
            await self.between()

    async def _ask(self, messages: Messages) -> None:
        response = await self.server.client.post("/v1/chat/completions", json=body_of(messages, NOISE_TOKENS))
        assert response.status_code == 200, response.text


async def post(
    server: Running, body: dict[str, Any], path: str = "/v1/chat/completions", **headers: str
) -> dict[str, Any]:
    response = await server.client.post(path, json=body, headers=headers, timeout=LONGEST_S)
    assert response.status_code == 200, response.text
    document: dict[str, Any] = response.json()
    return document


def steady(document: dict[str, Any]) -> dict[str, Any]:
    """What of a chat answer must not depend on pauses: its text, calls, logprobs, end and counts."""
    for choice in document["choices"]:
        for call in choice["message"].get("tool_calls") or ():
            call["id"] = "some"
    return {"choices": document["choices"], "usage": document["usage"]}
