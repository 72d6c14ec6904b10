"""llama-server's own endpoints for raw text, and filling in the middle through every API that has it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fakes.engine import FakeEngine
from tests.fakes.text import SPECIAL_TOKENS, FakeTokenizer
from tests.integration.api.api_harness import running

pytestmark = pytest.mark.anyio
MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
FILLED = "<|fim_prefix|>def f(<|fim_suffix|>): pass<|fim_middle|>"


class Filling(FakeEngine):
    """Its vocabulary has the tokens; it answers the prompts that it was given, and remembers them."""

    def __init__(self) -> None:
        super().__init__(script=self.answer)
        self.tokenizer = FakeTokenizer((*SPECIAL_TOKENS, *MARKS))
        self.prompts: list[str] = []

    def answer(self, prompt: str) -> str:
        self.prompts.append(prompt)
        return "x, y<|file_sep|>"


async def test_a_gap_is_filled_through_every_api() -> None:
    """Found by use 25: `/infill` was a 404, `suffix` a 400."""
    async with running(Filling()) as server:
        asked: dict[str, Any] = {"input_prefix": "def f(", "input_suffix": "): pass"}
        infill = (await server.client.post("/infill", json=asked)).json()
        assert (infill["content"], infill["stop_type"]) == ("x, y", "word")
        legacy = {"prompt": "def f(", "suffix": "): pass"}
        completion = (await server.client.post("/v1/completions", json=legacy)).json()
        assert completion["choices"][0]["text"] == "x, y"
        ollama = (await server.client.post("/api/generate", json={**legacy, "stream": False})).json()
        assert ollama["response"] == "x, y"
        assert server.engine.prompts == [FILLED] * 3  # type: ignore[attr-defined]
        for wrong, param in (
            ({"input_prefix": "a"}, "input_suffix"),
            ({**asked, "input_extra": [1]}, "input_extra[0]"),
        ):
            refused = await server.client.post("/infill", json=wrong)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        listed = (await server.client.get("/v1/models")).json()["data"][0]
        assert listed["capabilities"] == ["completion", "insert"]


async def test_a_model_without_the_tokens_says_so() -> None:
    async with running(FakeEngine()) as server:
        for path, body in (
            ("/infill", {"input_prefix": "a", "input_suffix": "b"}),
            ("/v1/completions", {"prompt": "a", "suffix": "b"}),
            ("/api/generate", {"prompt": "a", "suffix": "b"}),
        ):
            refused = await server.client.post(path, json=body)
            assert refused.status_code == 400
            assert "fill in the middle" in refused.text
        assert (await server.client.get("/v1/models")).json()["data"][0]["capabilities"] == ["completion"]


async def test_raw_text_in_llama_servers_own_form() -> None:
    """Found by use 25: `/completion`, which many tools use, was a 404."""
    async with running(FakeEngine(end_odds=10**9)) as server:
        body = {"prompt": "Once", "n_predict": 9, "temperature": 0}
        whole = (await server.client.post("/completion", json=body)).json()
        legacy = {"prompt": "Once", "max_tokens": 9, "temperature": 0}
        text = (await server.client.post("/v1/completions", json=legacy)).json()["choices"][0]["text"]
        assert whole["content"] == text
        assert (whole["stop"], whole["stop_type"], whole["tokens_predicted"]) == (True, "limit", 9)
        assert whole["tokens_evaluated"] == 4
        assert whole["timings"]["predicted_n"] == 9
        async with server.client.stream("POST", "/completions", json={**body, "stream": True}) as response:
            lines = [line async for line in response.aiter_lines() if line]
        frames = [json.loads(line.removeprefix("data: ")) for line in lines]
        assert "".join(frame["content"] for frame in frames) == text
        assert [frame["stop"] for frame in frames] == [False] * (len(frames) - 1) + [True]
        refused = await server.client.post("/completion", json={**body, "n_probs": 3})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n_probs")


async def test_responses_count_their_input() -> None:
    """Found by use 34: `/v1/responses/input_tokens` was a 404."""
    async with running(FakeEngine()) as server:
        asked = {"input": "Hello there", "instructions": "Be brief."}
        counted = await server.client.post("/v1/responses/input_tokens", json=asked)
        answered = await server.client.post("/v1/responses", json={**asked, "max_output_tokens": 2})
        assert counted.json() == {
            "object": "response.input_tokens",
            "input_tokens": answered.json()["usage"]["input_tokens"],
        }
        assert (await server.client.post("/v1/responses/input_tokens", json={"input": []})).status_code == 400
