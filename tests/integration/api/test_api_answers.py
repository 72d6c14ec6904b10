"""Several answers to one prompt: `n` of chat and completions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from parkd.proxy.config import ProxyConfig
from tests.fakes.engine import FakeEngine
from tests.integration.api.api_harness import Gate, body_of, running, until

pytestmark = pytest.mark.anyio
ASK = [{"role": "user", "content": "Long ago " * 100}]
SEEDED = {"temperature": 1.0, "seed": 5, "max_tokens": 9}


@pytest.mark.parametrize("fixed_bytes", [0, 64], ids=["rows", "hybrid"])
async def test_each_answer_is_that_of_its_own_seed_and_the_prompt_is_read_once(fixed_bytes: int) -> None:
    """Found by use 25: `n` above 1 was a 400."""
    async with running(FakeEngine(end_odds=10**9)) as server:
        alone = [(await server.chat(ASK, **{**SEEDED, "seed": seed})).text for seed in (5, 6, 7)]
    assert len(set(alone)) == 3
    async with running(FakeEngine(end_odds=10**9, fixed_bytes=fixed_bytes)) as server:
        if fixed_bytes:
            alone = [(await server.chat(ASK, **{**SEEDED, "seed": seed})).text for seed in (5, 6, 7)]
            await server.chat([{"role": "user", "content": "Another"}])
            await server.settled()
        read = server.engine.read_tokens
        body = body_of(ASK, **SEEDED, n=3)
        document = (await server.client.post("/v1/chat/completions", json=body)).json()
        prompt = len(server.prompt_tokens(ASK))
        assert server.engine.read_tokens - read <= prompt + 2 * 16
        choices = document["choices"]
        assert [(choice["index"], choice["message"]["content"]) for choice in choices] == list(enumerate(alone))
        usage = document["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt, 27)
        assert usage["total_tokens"] == prompt + 27
        asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
        async with server.client.stream("POST", "/v1/chat/completions", json=asked) as response:
            lines = [line async for line in response.aiter_lines() if line]
        assert lines.count("data: [DONE]") == 1
        assert lines[-1] == "data: [DONE]"
        chunks = [json.loads(line[6:]) for line in lines[:-1]]
        texts, ends = ["", "", ""], []
        for choice in (choice for chunk in chunks for choice in chunk["choices"]):
            texts[choice["index"]] += choice["delta"].get("content") or ""
            ends += [choice["index"]] if choice["finish_reason"] else []
        assert (texts, ends) == (alone, [0, 1, 2])
        assert [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk.get("usage")] == [27]


async def test_completions_give_several_too() -> None:
    async with running(FakeEngine(end_odds=10**9)) as server:
        body = {"prompt": "Once", **SEEDED, "n": 2}
        document: Any = (await server.client.post("/v1/completions", json=body)).json()
        assert [choice["index"] for choice in document["choices"]] == [0, 1]
        for seed, choice in zip((5, 6), document["choices"], strict=True):
            alone = await server.client.post("/v1/completions", json={**body, "n": 1, "seed": seed})
            assert alone.json()["choices"][0]["text"] == choice["text"]
        for path, fields in (
            ("/v1/completions", {"n": 9}),
            ("/v1/completions", {"best_of": 2}),
            ("/completion", {"n": 2}),
        ):
            refused = await server.client.post(path, json={**body, "n": 1, **fields})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, next(iter(fields)))


async def test_a_client_that_leaves_ends_all_answers() -> None:
    gate, tokens = Gate("token", 12), [0]

    def hook(name: str, number: int) -> None:
        tokens[0] += name == "token"
        gate(name, number)

    engine = FakeEngine(end_odds=10**9, hook=hook)
    async with running(engine, config=ProxyConfig(resend_grace_s=0)) as server:
        asked = body_of(ASK, **{**SEEDED, "max_tokens": 8, "n": 4}, stream=True)
        async with server.client.stream("POST", "/v1/chat/completions", json=asked) as response:
            lines = response.aiter_lines()  # kept: the response is closed with it
            async for line in lines:
                if '"index":1' in line.replace(" ", ""):
                    break
            await gate.wait_reached()
        running_turn = server.server.proxy.lane.running
        assert running_turn is not None
        await until(running_turn.channel.cancel.is_set)
        gate.opened.set()
        await server.settled()
        assert tokens[0] < 16, "neither the rest of the second answer nor the next ones were generated"
        assert (await server.chat([{"role": "user", "content": "Next"}])).finish_reason == "length"
