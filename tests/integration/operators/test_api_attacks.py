"""What was never tried: a park directory that goes, floods whose clients leave, keys with several seats."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from parkd.config import ProxyConfig
from parkd.types import NamedKey
from tests.fakes.engine import FakeEngine
from tests.integration.api.api_harness import Messages, Running, body_of, running
from tests.integration.api.disk_harness import running_on, written
from tests.integration.api.test_api_hybrids import tiny

pytestmark = pytest.mark.anyio
KEYS = {"k-anna": None, "k-ben": "team", "k-carl": "team"}
CONFIG = ProxyConfig(
    named_keys=tuple(NamedKey(key.removeprefix("k-"), key, space) for key, space in KEYS.items()),
    operator_keys=("op",),
    resend_grace_s=0.0,
    max_queue=24,
)


def asked(text: str, times: int = 12) -> Messages:
    return [{"role": "system", "content": "You answer. " * 60}, {"role": "user", "content": text * times}]


@pytest.mark.parametrize("gone", ["directory", "files"])
async def test_a_park_directory_that_vanishes_costs_only_what_was_in_it(gone: str, tmp_path: Path) -> None:
    park = tmp_path / "park"
    talks = [asked(f"Talk {number}. ") for number in range(6)]
    async with running(FakeEngine(), answer_bytes=0) as other:
        expected = [(await other.chat(talk)).text for talk in talks]
    async with running_on(park, ram_bytes=96 * 1024) as server:
        assert [(await server.chat(talk)).text for talk in talks[:4]] == expected[:4]
        await written(server)
        if gone == "directory":
            shutil.rmtree(park)
        else:
            for path in park.iterdir():
                path.unlink()
        for _ in range(2):
            assert [(await server.chat(talk)).text for talk in talks] == expected
        assert (await server.client.get("/health")).status_code == 200


def slow(name: str, _number: int) -> None:
    if name in ("token", "chunk"):
        time.sleep(0.004)


async def seen_ids(server: Running, key: str, ids: set[str]) -> None:
    """Collects the ids of all turns that the events tell a key of."""
    async with (
        httpx.AsyncClient(base_url=server.url, timeout=60, trust_env=False) as client,
        client.stream("GET", "/parkd/events", headers={"x-api-key": key}) as answer,
    ):
        async for line in answer.aiter_lines():
            if line.startswith("data:"):
                state = orjson.loads(line.removeprefix("data:"))
                ids.update(turn["request_id"] for turn in (*state.get("running", ()), *state.get("waiting", ())))


@contextlib.asynccontextmanager
async def watched(server: Running) -> AsyncIterator[dict[str, set[str]]]:
    ids: dict[str, set[str]] = {key: set() for key in (*KEYS, "op")}
    tasks = [asyncio.create_task(seen_ids(server, key, ids[key])) for key in ids]
    try:
        yield ids
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_flood_of_clients_that_leave_harms_nobody_and_tells_nobody() -> None:
    """One key asks without end and leaves in all states, paused ones too; the others get what they would get alone."""
    talks = {key: asked(f"I am {key}. ") for key in ("k-ben", "k-carl")}
    async with running(FakeEngine(batch_tokens=64, end_odds=1 << 40), answer_bytes=0) as alone:
        expected = {key: (await alone.chat(talk, max_tokens=150)).text for key, talk in talks.items()}
    engine = FakeEngine(batch_tokens=64, hook=slow, end_odds=1 << 40)
    async with running(engine, config=CONFIG, answer_bytes=0) as server, watched(server) as ids:
        statuses: list[int] = []

        async def flood(number: int) -> None:
            body = body_of(asked(f"Flood {number}. "), 200, stream=number % 2 == 0)
            headers = {"x-api-key": "k-anna", "x-request-id": f"anna-{number}"}
            with contextlib.suppress(httpx.TimeoutException):
                sent = await server.client.post(
                    "/v1/chat/completions", json=body, headers=headers, timeout=0.05 + 0.11 * (number % 9)
                )
                statuses.append(sent.status_code)

        async def ask(key: str) -> str:
            headers = {"x-api-key": key, "x-request-id": f"{key[2:]}-0"}
            sent = await server.client.post(
                "/v1/chat/completions", json=body_of(talks[key], 150), headers=headers, timeout=60
            )
            assert sent.status_code == 200, sent.text
            text: str = sent.json()["choices"][0]["message"]["content"]
            return text

        floods, asks = [], []
        for number in range(60):
            floods.append(asyncio.create_task(flood(number)))
            if number in (15, 20):
                asks.append(asyncio.create_task(ask("k-ben" if number == 15 else "k-carl")))
            await asyncio.sleep(0.04)
        assert await asyncio.gather(*asks) == [expected["k-ben"], expected["k-carl"]]
        await asyncio.gather(*floods)
        await server.settled()
        assert set(statuses) <= {200, 503}
        lane, store = server.server.proxy.lane, server.store
        assert store is not None
        assert (lane.waiting, lane.paused, lane.busy, store.stats().leased) == (0, 0, False, 0)
        assert sum(conversation.keepers for conversation in store.table.all()) == 0
        await asyncio.sleep(0.6)
        for key in KEYS:
            assert {name.partition("-")[0] for name in ids[key]} <= {key[2:]}
        assert {name.partition("-")[0] for name in ids["op"]} == {"anna", "ben", "carl"}


async def test_keys_with_three_seats_get_their_answers_and_see_only_their_own(tmp_path: Path) -> None:
    engine = tiny(tmp_path, "tiny-qwen3", seats=3)
    said: dict[str, list[str]] = {}
    for seats in (1, 3):
        config = CONFIG if seats == 3 else ProxyConfig()
        async with running(engine, config=config, answer_bytes=0) as server:  # type: ignore[arg-type]

            async def talk(key: str) -> list[str]:
                messages, answers = asked(f"I am {key}. "), list[str]()
                for number in range(3):
                    headers = {"x-api-key": key, "x-request-id": f"{key[2:]}-{number}"}
                    sent = await server.client.post(
                        "/v1/chat/completions", json=body_of(messages, 12), headers=headers, timeout=120
                    )
                    assert sent.status_code == 200, sent.text
                    answers.append(sent.json()["choices"][0]["message"]["content"])
                    messages = [
                        *messages,
                        {"role": "assistant", "content": answers[-1]},
                        {"role": "user", "content": "And?"},
                    ]
                return answers

            if seats == 1:  # one after another, and each in a seat of its own
                for key in KEYS:
                    said[key] = await talk(key)
                continue
            async with watched(server) as ids:
                found = await asyncio.gather(*(talk(key) for key in KEYS))
            assert dict(zip(KEYS, found, strict=True)) == said
            others = set[str]()
            for key in KEYS:
                assert {name.partition("-")[0] for name in ids[key]} <= {key[2:]}
                listed: Any = (await server.client.get("/parkd/conversations", headers={"x-api-key": key})).json()
                mine = {each["id"] for each in listed["conversations"]}
                assert mine
                assert not mine & others
                assert all(each["live"] for each in listed["conversations"]), "alone it would have three seats"
                others |= mine
                assert all(not name.startswith("live-") for name in mine)
