"""Turns of tiny models of every family, paused at random places: tokens and logprobs are those of the turn never
paused, bit for bit."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from parkd_engine.families.presets.shapes import ECHO, PRESETS

from parkd.answers.base import OutputFormat, ToolFormat
from parkd.answers.formats import THINK
from parkd.answers.structured import StructuredOutput
from parkd.answers.thinking import ThinkingLimits
from parkd.config import ModelConfig
from parkd.engine_adapter.torch_engine.engine import TorchEngine
from parkd.state import EngineConfig
from parkd.types import TokenMask, TurnRequest
from tests.integration.api.api_harness import Messages, body_of, running
from tests.integration.api.test_api_images import picture
from tests.integration.pauses.pause_kit import NOISE, Pauser, at_random, everywhere, post, steady

pytestmark = pytest.mark.anyio

A1: Messages = [
    {"role": "system", "content": "You park conversations."},
    {"role": "user", "content": "A server holds one conversation in memory. " * 9},
]
FAMILIES = [name for name in PRESETS if name.startswith("tiny")]
SAMPLED = {
    "temperature": 1.0,
    "seed": 12,
    "top_p": 0.95,
    "presence_penalty": 0.7,
    "frequency_penalty": 0.4,
    "repetition_penalty": 1.2,
}
SCORED = {"logprobs": True, "top_logprobs": 5}

Body = dict[str, Any]


def load(folder: Path, family: str, stages: int = 2, kv_format: str | None = None) -> TorchEngine:
    layout = EngineConfig(
        devices=("cpu",) * stages, context_tokens=1024, batch_tokens=128, draft_tokens=2, kv_format=kv_format
    )
    return TorchEngine.load(ModelConfig(f"random:{family}", folder, layout=layout), fresh_seed=lambda: 4)


async def same_if_paused(engine: TorchEngine, body: Body, where: Callable[[int], bool], **options: Any) -> int:
    """Compares the answer with that of a turn never paused. Returns the number of pauses."""
    engine.reset()
    async with running(engine, answer_bytes=0, **options) as server:  # type: ignore[arg-type]
        expected = await post(server, body)
    engine.reset()
    async with running(engine, answer_bytes=0, **options) as server:  # type: ignore[arg-type]
        pauser = Pauser(server, where, noise=NOISE)
        assert steady(await post(server, body)) == steady(expected)
    return pauser.pauses


def seen(family: str) -> Messages:
    """A prompt; with a picture where the model reads any."""
    if "-vl" not in family:
        return A1
    url = "data:image/png;base64," + base64.b64encode(picture(1)).decode()
    image = {"type": "image_url", "image_url": {"url": url}}
    text = {"type": "text", "text": "A server holds one conversation in memory. " * 6}
    return [{"role": "user", "content": [text, image, text, image]}]


@pytest.mark.parametrize("family", FAMILIES)
async def test_every_family(family: str, tmp_path: Path) -> None:
    engine = load(tmp_path, family)
    body = body_of(seen(family), 10, **SAMPLED, **SCORED)
    assert await same_if_paused(engine, body, at_random(3, 0.5)) > 1
    if ECHO in family:
        greedy = body_of(seen(family), 24, **SCORED)
        assert await same_if_paused(engine, greedy, everywhere) > 6
    engine.close()


@pytest.mark.parametrize("kv_format", [None, "int8"])
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("family", ["tiny-llama", "tiny-qwen3.5", "tiny-gemma3"])
async def test_every_token_and_chunk(family: str, stages: int, kv_format: str | None, tmp_path: Path) -> None:
    engine = load(tmp_path, family, stages, kv_format)
    assert await same_if_paused(engine, body_of(A1, 24, **SAMPLED, **SCORED), everywhere) > 16
    engine.close()


@pytest.mark.parametrize("family", ["tiny-llama", "tiny-qwen3.5", "tiny-gemma3"])
async def test_two_seats(family: str, tmp_path: Path) -> None:
    """The other conversation runs in the other seat, so that nothing is copied back."""
    layout = EngineConfig(devices=("cpu", "cpu"), context_tokens=1024, batch_tokens=128, seats=2)
    engine = TorchEngine.load(ModelConfig(f"random:{family}", tmp_path, layout=layout), fresh_seed=lambda: 4)
    body = body_of(A1, 12, **SAMPLED, **SCORED)
    async with running(engine, answer_bytes=0) as server:  # type: ignore[arg-type]
        expected = await post(server, body)
    for seat in engine.seats:
        seat.reset()
    async with running(engine, answer_bytes=0) as server:  # type: ignore[arg-type]
        pauser = Pauser(server, everywhere, noise=NOISE)
        assert steady(await post(server, body)) == steady(expected)
        assert pauser.pauses > 8
        await server.settled()
        assert server.store is not None
        assert server.store.stats().leases_total <= 1
    engine.close()


LOOK = {
    "type": "object",
    "properties": {"a": {"const": "媽"}, "n": {"type": "integer"}},
    "required": ["a", "n"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": LOOK}}
BOUND: dict[str, Body] = {
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": LOOK}}},
    "call": {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
    "budget": {
        "thinking_budget": 6,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": LOOK}},
    },
}


@pytest.mark.parametrize("bound", BOUND)
@pytest.mark.parametrize("family", ["tiny-qwen3.5-mtp-echo", "tiny-llama"])
async def test_answers_under_a_grammar(family: str, bound: str, tmp_path: Path) -> None:
    engine, output = load(tmp_path, family), OutputFormat(ToolFormat.HERMES, THINK)
    info = engine.info
    structured = StructuredOutput(engine.tokenizer_json(), info.vocab_size, info.end_token_ids)
    limits = ThinkingLimits(THINK, None, info.vocab_size, engine.tokenizer.encode, engine.text_stream)

    def mask(request: TurnRequest, tail: str, _still_wanted: object) -> TokenMask | None:
        return limits.over(request, tail, structured.mask(request, output, tail))

    body = body_of([{"role": "user", "content": "hi <think>"}], 60, **SAMPLED, **BOUND[bound])
    assert await same_if_paused(engine, body, at_random(5, 0.5), output=output, build_mask=mask) > 6
    engine.close()


async def test_stop_strings_that_a_pause_cuts(tmp_path: Path) -> None:
    engine = load(tmp_path, "tiny-llama")
    async with running(engine, answer_bytes=0) as server:  # type: ignore[arg-type]
        whole = (await server.chat(A1, max_tokens=24, **SAMPLED)).text
    for at in range(0, len(whole) - 4, 4):
        body = body_of(A1, 24, **SAMPLED, **SCORED, stop=whole[at : at + 4])
        await same_if_paused(engine, body, everywhere)
    engine.close()
