"""Schemas beyond the limits of the grammar library: refused before the answer where that shows, else in its middle, in
the words of each dialect, and the conversation goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from parkd.answers.base import OutputFormat, ToolFormat
from parkd.answers.structured import StructuredOutput
from parkd.config import ModelConfig
from parkd.engine_adapter.torch_engine.engine import TorchEngine
from parkd.state import EngineConfig
from parkd.types import TokenMask, TurnRequest
from tests.integration.api.api_harness import Messages, Running, running

pytestmark = pytest.mark.anyio
FORMAT = OutputFormat(ToolFormat.HERMES)
TALK: Messages = [{"role": "user", "content": "A server holds one conversation in memory. " * 8}]
WIDE = {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(3000)}}
LATE = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", "b"]}, "more": WIDE},
    "required": ["kind", "more"],
    "additionalProperties": False,
}
"""Nothing can tell before the choice of `kind` that `more` has too many properties."""
WIDE_TOOL = [{"type": "function", "function": {"name": "look", "parameters": WIDE}}]
DIALECTS: Mapping[str, Mapping[str, Any]] = {
    "/v1/chat/completions": {
        "messages": TALK,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": LATE}},
    },
    "/v1/responses": {"input": TALK, "text": {"format": {"type": "json_schema", "name": "n", "schema": LATE}}},
    "/v1/messages": {"messages": TALK, "output_config": {"format": {"type": "json_schema", "schema": LATE}}},
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchEngine]:
    layout = EngineConfig(devices=("cpu", "cpu"), context_tokens=768, batch_tokens=256)
    config = ModelConfig("random:tiny-qwen3", tmp_path_factory.mktemp("cache"), layout=layout)
    loaded = TorchEngine.load(config, fresh_seed=lambda: 4)
    yield loaded
    loaded.close()


def constrained(engine: TorchEngine) -> Any:
    structured = StructuredOutput(engine.tokenizer_json(), engine.info.vocab_size, engine.info.end_token_ids)

    def mask(request: TurnRequest, tail: str, _still_wanted: object) -> TokenMask | None:
        return structured.mask(request, FORMAT, tail)

    engine.reset()
    return running(engine, output=FORMAT, build_mask=mask)  # type: ignore[arg-type]


def data_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


async def goes_on(server: Running, cold: str) -> None:
    """The next turn starts from the rows that the broken one read, and answers as it would alone."""
    again = await server.chat(TALK)
    assert (again.text, again.cache) == (cold, "live")
    assert again.reused == len(server.prompt_tokens(TALK)) - 1


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_limit_met_in_the_answer_is_an_error_of_the_dialect(
    engine: TorchEngine, path: str, stream: bool
) -> None:
    async with constrained(engine) as server:
        cold = (await server.chat(TALK)).text
        limit = {"max_output_tokens": 90} if path == "/v1/responses" else {"max_tokens": 90}
        body = {"model": "m", "stream": stream, "temperature": 0, **limit, **DIALECTS[path]}
        response = await server.client.post(path, json=body)
        if stream:
            assert response.status_code == 200
            *before, last = data_of(response.text)
            assert len(before) > 5, "the answer had not begun"
            error = last["response"]["error"] if path == "/v1/responses" else last["error"]
        else:
            assert response.status_code == 400, response.text
            error = response.json()["error"]
        assert "too complex to be enforced" in error["message"]
        assert "Simplify it" in error["message"]
        assert error["code" if path != "/v1/messages" else "type"] in ("schema_too_complex", "invalid_request_error")
        await goes_on(server, cold)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": WIDE}}}, "response_format"),
        ({"tools": WIDE_TOOL, "tool_choice": "required"}, "tools[0]"),
    ],
)
async def test_a_limit_that_shows_at_once_is_refused_before_the_answer(
    engine: TorchEngine, fields: dict[str, Any], param: str
) -> None:
    async with constrained(engine) as server:
        cold = (await server.chat(TALK)).text
        body = {"model": "m", "messages": TALK, "stream": True, **fields}
        response = await server.client.post("/v1/chat/completions", json=body)
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["code"], error["param"]) == ("schema_too_complex", param)
        await goes_on(server, cold)
