"""A model that guesses ahead, through the HTTP API: answers, counts, cuts and grammars are those of single steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from parkd.answers.base import OutputFormat
from parkd.answers.structured import StructuredOutput
from parkd.config import ModelConfig
from parkd.engine_adapter.torch_engine.engine import TorchEngine
from parkd.state import EngineConfig
from parkd.types import TokenMask, TurnRequest
from tests.integration.api.api_harness import Messages, Running, running

pytestmark = pytest.mark.anyio
MODEL = "random:tiny-qwen3.5-mtp-echo"
OTHERS = ("random:tiny-qwen4-exp-mtp-echo", "random:tiny-deepseek-v3-mtp-echo", "random:tiny-glm4-lite-mtp-echo")
"""Heads with an index, and of latents."""
A1: Messages = [{"role": "user", "content": "A server holds one conversation in memory. " * 8}]
B1: Messages = [{"role": "user", "content": "The quick brown fox jumps over the lazy dog. " * 6}]
SCHEMA = {"type": "object", "properties": {"n": {"type": "boolean"}}, "required": ["n"], "additionalProperties": False}


def load(folder: Path, draft_tokens: int, model: str = MODEL) -> TorchEngine:
    layout = EngineConfig(devices=("cpu", "cpu"), context_tokens=768, batch_tokens=256, draft_tokens=draft_tokens)
    return TorchEngine.load(ModelConfig(model, folder, layout=layout), fresh_seed=lambda: 4)


@pytest.fixture(scope="module")
def guessing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchEngine]:
    engine = load(tmp_path_factory.mktemp("cache"), 2)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchEngine]:
    engine = load(tmp_path_factory.mktemp("cache"), 0)
    yield engine
    engine.close()


async def in_turn(engine: TorchEngine, *requests: tuple[Messages, dict[str, Any]]) -> list[tuple[str, str]]:
    engine.reset()
    async with running(engine) as server:  # type: ignore[arg-type]
        answers = [await server.chat(messages, **fields) for messages, fields in requests]
        return [(answer.text, answer.finish_reason) for answer in answers]


async def test_limits_and_stop_strings_cut_where_single_steps_would(guessing: TorchEngine, plain: TorchEngine) -> None:
    """In the middle of what was accepted at once; and the turn after goes on from there."""
    [(whole, _)] = await in_turn(plain, (A1, {"max_tokens": 24}))
    cuts: list[tuple[Messages, dict[str, Any]]] = [(A1, {"max_tokens": count}) for count in (2, 3)]
    cuts += [(A1, {"max_tokens": 24, "stop": whole[at : at + 3]}) for at in (2, 5)]
    cuts = [pair for cut in cuts for pair in (cut, (A1, {"max_tokens": 12}))]
    assert await in_turn(guessing, *cuts) == await in_turn(plain, *cuts)


async def counted(server: Running, messages: Messages) -> tuple[str, int, int]:
    answer = await server.chat(messages, max_tokens=24)
    return answer.text, answer.timings["draft_n"], answer.timings["draft_n_accepted"]


async def test_a_b_a_guesses_as_well_as_if_it_had_stayed(guessing: TorchEngine, plain: TorchEngine) -> None:
    await guesses_stay_as_good(guessing, plain)


@pytest.mark.parametrize("model", OTHERS)
async def test_so_do_heads_of_other_makes(model: str, tmp_path: Path) -> None:
    engines = [load(tmp_path, guesses, model) for guesses in (2, 0)]
    try:
        await guesses_stay_as_good(*engines)
    finally:
        for engine in engines:
            engine.close()


async def guesses_stay_as_good(guessing: TorchEngine, plain: TorchEngine) -> None:
    answers: list[list[tuple[str, int, int]]] = []
    for leaves in (False, True):
        guessing.reset()
        async with running(guessing) as server:  # type: ignore[arg-type]
            first = await counted(server, A1)
            if leaves:
                await server.chat(B1)
            a2 = [*A1, {"role": "assistant", "content": first[0]}, {"role": "user", "content": "And then?"}]
            again = await server.chat(a2, max_tokens=24)
            assert again.cache == ("restored-ram" if leaves else "live")
            drafts = again.timings["draft_n"], again.timings["draft_n_accepted"]
            answers.append([first, (again.text, *drafts)])
    assert answers[0] == answers[1]
    assert all(0 < accepted < drafted for _, drafted, accepted in answers[0])
    turns = [(turn, {"max_tokens": 24}) for turn in (A1, a2)]
    assert [text for text, _ in await in_turn(plain, *turns)] == [text for text, _, _ in answers[0]]


async def test_what_was_guessed_and_accepted_is_counted(guessing: TorchEngine, plain: TorchEngine) -> None:
    guessing.reset()
    async with running(guessing) as server:  # type: ignore[arg-type]
        drafted = accepted = 0
        for _ in range(2):
            _, more, right = await counted(server, A1)
            drafted, accepted = drafted + more, accepted + right
        page = (await server.client.get("/metrics")).text
        assert f"parkd_draft_tokens_total {float(drafted)}" in page
        assert f"parkd_draft_tokens_accepted_total {float(accepted)}" in page
    plain.reset()
    async with running(plain) as server:  # type: ignore[arg-type]
        assert "draft_n" not in (await server.chat(A1)).timings


async def test_structured_answers_hold_their_schema(guessing: TorchEngine) -> None:
    structured = StructuredOutput(
        guessing.tokenizer_json(), guessing.info.vocab_size, end_token_ids=guessing.info.end_token_ids
    )

    def mask(request: TurnRequest, tail: str, _still_wanted: object) -> TokenMask | None:
        return structured.mask(request, OutputFormat(), tail)

    guessing.reset()
    async with running(guessing, build_mask=mask) as server:  # type: ignore[arg-type]
        fields = {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}
        for temperature in (0, 1.0):
            answer = await server.chat(A1, max_tokens=40, temperature=temperature, seed=3, **fields)
            assert answer.text in ('{"n": true}', '{"n": false}')
            assert answer.finish_reason == "stop"
