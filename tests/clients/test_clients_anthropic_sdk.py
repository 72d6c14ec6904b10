"""The official Anthropic SDK against the running server."""

from __future__ import annotations

import threading

import anthropic
import pytest
from pydantic import BaseModel

from parkd.proxy.config import ProxyConfig
from tests.clients.client_kit import CALL, CALLS, SCHEMA, Served, serving

TOOL = {"name": "look", "description": "Looks.", "input_schema": SCHEMA}
HELLO = [{"role": "user", "content": "Hello"}]


class Place(BaseModel):
    path: str
    depth: int


def client_of(served: Served, key: str = "k") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=served.url, api_key=key, max_retries=0, timeout=20)


def test_a_stream_gives_the_message_that_a_request_without_one_gives() -> None:
    with serving("<think>\nA greeting.\n</think>\n\nHéllo 😀.") as served, client_of(served) as client:
        whole = client.messages.create(model="m", max_tokens=100, messages=HELLO)
        assert [block.type for block in whole.content] == ["thinking", "text"]
        with client.messages.stream(model="m", max_tokens=100, messages=HELLO) as stream:
            assert "".join(stream.text_stream) == "Héllo 😀."
            streamed = stream.get_final_message()
        shown = [block.to_dict() | {"parsed_output": None} for block in streamed.content]
        assert shown == [block.to_dict() | {"parsed_output": None} for block in whole.content]
        assert streamed.stop_reason == whole.stop_reason == "end_turn"
        assert streamed.usage.cache_read_input_tokens == whole.usage.input_tokens - 1
        assert streamed.usage.input_tokens == 1


def test_the_count_is_the_prompts() -> None:
    with serving("Hi.") as served, client_of(served) as client:
        asked = {"model": "m", "messages": HELLO, "system": "Be short.", "tools": [TOOL]}
        counted = client.messages.count_tokens(**asked)
        used = client.messages.create(max_tokens=5, **asked).usage
        assert counted.input_tokens == used.input_tokens + (used.cache_read_input_tokens or 0)


def test_calls_come_as_blocks_and_go_back_as_results() -> None:
    with serving(lambda prompt: CALLS if "result" not in prompt else "Nothing.") as served, client_of(served) as client:
        with client.messages.stream(model="m", max_tokens=400, messages=HELLO, tools=[TOOL]) as stream:
            message = stream.get_final_message()
        assert message.stop_reason == "tool_use"
        assert [block.type for block in message.content] == ["text", "tool_use", "tool_use"]
        assert [block.input for block in message.content if block.type == "tool_use"] == [
            {"path": "a/b", "depth": 2},
            {"path": "c"},
        ]
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "result"}]}
            for block in message.content
            if block.type == "tool_use"
        ]
        talk = [*HELLO, {"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
        after = client.messages.create(model="m", max_tokens=50, messages=talk, tools=[TOOL])
        assert after.content[0].type == "text"
        assert after.content[0].text == "Nothing."
        # the whole first prompt, and every generated token but the end
        first = message.usage
        before = first.input_tokens + (first.cache_read_input_tokens or 0)
        assert after.usage.cache_read_input_tokens == before + first.output_tokens - 1


def test_the_tool_runner_sends_the_whole_history() -> None:
    """Left alone, it would send what is new and count on the server for the rest."""
    prompts: list[str] = []

    def script(prompt: str) -> str:
        prompts.append(prompt)
        return "Nothing." if "a result" in prompt else CALL

    @anthropic.beta_tool
    def look(path: str, depth: int = 1) -> str:
        """Looks."""
        return "a result"

    with serving(script) as served, client_of(served) as client:
        runner = client.beta.messages.tool_runner(model="m", max_tokens=400, messages=HELLO, tools=[look])
        last = runner.until_done()
    assert last.content[0].type == "text"
    assert last.content[0].text == "Nothing."
    assert len(prompts) == 2
    assert all(word in prompts[1] for word in ("look", "Hello", "I look.", "a result"))


def test_one_call_is_forced_by_name() -> None:
    with serving("No.") as served, client_of(served) as client:
        message = client.messages.create(
            model="m",
            max_tokens=400,
            messages=HELLO,
            tools=[TOOL],
            tool_choice={"type": "tool", "name": "look", "disable_parallel_tool_use": True},
        )
        assert [block.name for block in message.content if block.type == "tool_use"] == ["look"]


def test_structured_output_is_parsed_into_a_model() -> None:
    with serving('{"path": "a/b", "depth": 3}') as served, client_of(served) as client:
        message = client.messages.parse(model="m", max_tokens=100, messages=HELLO, output_format=Place)
        assert message.parsed_output == Place(path="a/b", depth=3)


def test_models_in_the_sdks_shape() -> None:
    with serving("x") as served, client_of(served) as client:
        (model,) = client.models.list().data
        assert client.models.retrieve(model.id).type == "model"


def test_errors_are_the_sdks_own() -> None:
    with serving("x", context_tokens=64, config=ProxyConfig(api_keys=("right",))) as served:
        with client_of(served, "wrong") as client, pytest.raises(anthropic.AuthenticationError):
            client.messages.create(model="m", max_tokens=5, messages=HELLO)
        with client_of(served, "right") as client:
            long = [{"role": "user", "content": "word " * 50}]
            with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 63 maximum"):
                client.messages.create(model="m", max_tokens=5, messages=long)
            with pytest.raises(anthropic.NotFoundError):
                client.models.retrieve("other")


def test_closing_a_stream_stops_the_engine() -> None:
    begun = threading.Event()
    with serving("word " * 4000, hook=lambda name, _place: begun.set() if name == "token" else None) as served:
        with client_of(served) as client:
            with client.messages.stream(model="m", max_tokens=30000, messages=HELLO) as stream:
                next(iter(stream.text_stream))
                assert begun.wait(10)
            after = client.messages.create(model="m", max_tokens=2, messages=HELLO)
            assert after.usage.input_tokens == 1
        assert served.engine.position < 10_000


def test_a_call_in_a_stream_with_the_beta_query() -> None:
    with serving(CALL) as served, client_of(served) as client:
        message = client.beta.messages.create(
            model="m", max_tokens=400, messages=HELLO, tools=[TOOL], betas=["token-efficient-tools-2025-02-19"]
        )
        assert message.stop_reason == "tool_use"
