"""The lane under its schedules, over the engine of arithmetic, slowed down."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from parkd.config import ProxyConfig
from parkd.lane.forecast import class_of
from parkd.proxy.access import Caller
from parkd.types import TurnClass, TurnRequest
from tests.fakes.engine import FakeEngine
from tests.integration.api.api_harness import Messages, Running, body_of, running, until

pytestmark = pytest.mark.anyio

LONG: Messages = [{"role": "user", "content": "Tell me everything. " * 20}]
SHORT: Messages = [{"role": "user", "content": "A title, please."}]
TOKEN_S = 0.01


def slow(name: str, _number: int) -> None:
    if name in ("token", "chunk"):
        time.sleep(TOKEN_S)


def engine() -> FakeEngine:
    return FakeEngine(batch_tokens=128, hook=slow, end_odds=1 << 40)


async def ends(server: Running, *bodies: dict[str, Any], apart_s: float = 0.3) -> list[tuple[int, dict[str, Any]]]:
    """Sends all, each a little after the one before. The numbers of those that have ended, in that order, with what
    they got."""
    ended: list[tuple[int, dict[str, Any]]] = []

    async def ask(number: int, body: dict[str, Any]) -> None:
        response = await server.client.post("/v1/chat/completions", json=body, timeout=60)
        assert response.status_code == 200, response.text
        ended.append((number, response.json()))

    asked = []
    for number, body in enumerate(bodies):
        asked.append(asyncio.create_task(ask(number, body)))
        await asyncio.sleep(apart_s)
    await asyncio.gather(*asked)
    return ended


async def test_a_short_job_does_not_wait_for_a_long_answer() -> None:
    async with running(engine(), answer_bytes=0) as server:
        alone = (await server.chat(LONG, max_tokens=300)).text
    async with running(engine(), answer_bytes=0) as server:
        got = await ends(server, body_of(LONG, 300), body_of(SHORT, 5))
        assert [number for number, _ in got] == [1, 0]
        long = got[1][1]
        assert long["choices"][0]["message"]["content"] == alone
        assert 1 <= long["timings"]["pauses"] <= 3
        page = (await server.client.get("/metrics")).text
        assert f"parkd_pauses_total {float(long['timings']['pauses'])}" in page
        assert 'parkd_wait_seconds_count{kind="side"} 1.0' in page
        assert 'parkd_wait_seconds_count{kind="interactive"} 1.0' in page


async def test_fifo_is_the_order_of_arrival() -> None:
    async with running(engine(), config=ProxyConfig(schedule="fifo")) as server:
        got = await ends(server, body_of(LONG, 100), body_of(SHORT, 5), body_of(SHORT, 6), apart_s=0.1)
        assert [number for number, _ in got] == [0, 1, 2]
        assert all("pauses" not in document["timings"] for _, document in got)


async def test_two_long_answers_go_on_in_turns() -> None:
    async with running(engine()) as server:
        other = [{"role": "user", "content": "Tell me everything else. " * 20}]
        got = await ends(server, body_of(LONG, 500), body_of(other, 500))
        pauses = [document["timings"]["pauses"] for _, document in sorted(got, key=lambda pair: pair[0])]
        assert min(pauses) >= 2


async def test_one_key_does_not_wait_for_all_of_another() -> None:
    config = ProxyConfig(api_keys=("anna-key", "ben-key"))
    async with running(engine(), config=config) as server:
        ended: list[str] = []

        async def ask(key: str, text: str) -> None:
            body = body_of([{"role": "user", "content": text * 20}], 120)
            headers = {"authorization": f"Bearer {key}"}
            response = await server.client.post("/v1/chat/completions", json=body, headers=headers, timeout=60)
            assert response.status_code == 200, response.text
            ended.append(key)

        tasks = [asyncio.create_task(ask("anna-key", f"Anna's number {number}. ")) for number in range(3)]
        await until(lambda: server.server.proxy.lane.waiting == 2)
        tasks.append(asyncio.create_task(ask("ben-key", "Ben's. ")))
        await asyncio.gather(*tasks)
        assert ended.index("ben-key") < 2


CLASSES: dict[str, tuple[dict[str, Any], str, str]] = {
    "plain": ({"max_tokens": 4000}, "", "interactive"),
    "no limit": ({}, "", "interactive"),
    "short": ({"max_tokens": 30}, "", "side"),
    "short with tools": (
        {"max_tokens": 30, "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
        "",
        "interactive",
    ),
    "flex": ({"service_tier": "flex"}, "", "batch"),
    "batch": ({"service_tier": "batch", "max_tokens": 5}, "", "batch"),
    "priority": ({"service_tier": "priority", "max_tokens": 5}, "", "interactive"),
    "auto": ({"service_tier": "auto"}, "", "interactive"),
    "odd tier": ({"service_tier": 7}, "", "interactive"),
    "metadata": ({"metadata": {"parkd_class": "batch"}, "service_tier": "priority"}, "", "batch"),
    "odd metadata": ({"metadata": "batch"}, "", "interactive"),
    "list in metadata": ({"metadata": {"parkd_class": ["batch"]}}, "", "interactive"),
    "object in metadata": ({"metadata": {"parkd_class": {"batch": 1}}}, "", "interactive"),
    "unknown in metadata": ({"metadata": {"parkd_class": "urgent"}}, "", "interactive"),
    "rule": ({"service_tier": "priority"}, "nightly-7", "batch"),
    "first rule": ({}, "nightly-chat", "interactive"),
    "another key": ({}, "anna", "interactive"),
}


@pytest.mark.parametrize("case", CLASSES)
def test_the_class_of_a_request(case: str) -> None:
    body, key, expected = CLASSES[case]
    rules = (("nightly-chat", TurnClass.INTERACTIVE), ("nightly-*", TurnClass.BATCH))
    request = TurnRequest(max_output_tokens=body.get("max_tokens"), tools=body.get("tools", ()))
    assert class_of(body, request, Caller("", key).name, rules) == expected


async def test_the_class_is_that_of_the_body_and_of_the_key() -> None:
    """As the turn in the lane has it."""
    seen: list[str] = []
    async with running(engine()) as server:
        lane, submit = server.server.proxy.lane, server.server.proxy.lane.submit

        def noted(turn: Any) -> None:
            seen.append(turn.kind.value)
            submit(turn)

        lane.submit = noted  # type: ignore[method-assign]
        for fields in ({"service_tier": "flex"}, {}, {"n": 2, "metadata": {"parkd_class": "batch"}}):
            await server.chat(SHORT, max_tokens=4, **fields)
    assert seen == ["batch", "side", "batch", "batch"]
