"""`logprobs` through the whole server: in every form, streamed and whole, and the same after a restore."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fakes.engine import FakeEngine
from tests.integration.api.api_harness import Running, body_of, running

pytestmark = pytest.mark.anyio
LONG = "Long ago " * 200
ASKED = {"logprobs": True, "top_logprobs": 2, "max_tokens": 12}


async def chat(server: Running, text: str, **fields: Any) -> Any:
    body = body_of([{"role": "user", "content": text}], **{**ASKED, **fields})
    response = await server.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def frames(server: Running, path: str, body: Any) -> list[Any]:
    async with server.client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        return [json.loads(line[6:]) async for line in response.aiter_lines() if line.startswith("data: {")]


async def test_chat_streams_what_it_gives_whole_and_the_same_after_a_restore() -> None:
    """Found by use 25."""
    async with running(FakeEngine(end_odds=10**9)) as server:
        choice = (await chat(server, LONG))["choices"][0]
        tokens, text = choice["logprobs"]["content"], choice["message"]["content"]
        assert [token["token"] for token in tokens] == list(text)
        assert all(len(token["top_logprobs"]) == 2 and token["bytes"] == [ord(token["token"])] for token in tokens)
        assert len({token["logprob"] for token in tokens}) > 3
        await server.settled()
        await chat(server, "Another")
        await server.settled()
        again = await chat(server, LONG)
        assert again["timings"]["cache"] == "restored-ram"
        assert again["choices"][0]["logprobs"] == choice["logprobs"]
        body = body_of([{"role": "user", "content": LONG}], **ASKED)
        chunks = [frame["choices"][0] for frame in await frames(server, "/v1/chat/completions", body)]
        told = [chunk["logprobs"]["content"] for chunk in chunks if chunk["logprobs"]]
        assert [token for some in told for token in some] == tokens
        plain = (await chat(server, LONG, logprobs=False, top_logprobs=None))["choices"][0]
        assert (plain["logprobs"], plain["message"]["content"]) == (None, text)


async def test_completions_and_responses_have_the_same_numbers() -> None:
    async with running(FakeEngine(end_odds=10**9)) as server:
        body = {"prompt": "Once", "max_tokens": 9, "temperature": 0, "logprobs": 2}
        whole = (await server.client.post("/v1/completions", json=body)).json()["choices"][0]
        legacy = whole["logprobs"]
        assert "".join(legacy["tokens"]) == whole["text"]
        assert legacy["text_offset"] == list(range(9))
        parts = [frame["choices"][0]["logprobs"] for frame in await frames(server, "/v1/completions", body)]
        assert [number for part in parts if part for number in part["token_logprobs"]] == legacy["token_logprobs"]
        tokens = (await chat(server, "Hi", max_tokens=9))["choices"][0]["logprobs"]["content"]
        asked = {
            "input": "Hi",
            "max_output_tokens": 9,
            "temperature": 0,
            "top_logprobs": 2,
            "include": ["message.output_text.logprobs"],
        }
        document = (await server.client.post("/v1/responses", json=asked)).json()
        assert document["output"][0]["content"][0]["logprobs"] == tokens
        assert document["top_logprobs"] == 2
        events = await frames(server, "/v1/responses", asked)
        deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
        assert [token for some in deltas for token in some] == tokens
        done = next(event for event in events if event["type"] == "response.output_text.done")
        assert done["logprobs"] == tokens


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"top_logprobs": 2}, "top_logprobs"),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("/v1/chat/completions", {"logprobs": 3}, "logprobs"),
        ("/v1/completions", {"prompt": "a", "logprobs": -1}, "logprobs"),
    ],
)
async def test_what_cannot_be_had_is_refused_by_name(path: str, body: Any, param: str) -> None:
    async with running(FakeEngine()) as server:
        refused = await server.client.post(path, json={**body_of([{"role": "user", "content": "a"}]), **body})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
