"""The official OpenAI SDK against the running server: chat, Responses, legacy completions, models."""

from __future__ import annotations

import json
import threading

import openai
import pytest
from pydantic import BaseModel

from parkd.proxy.config import ProxyConfig
from tests.clients.client_kit import CALL, CALLS, SCHEMA, Served, serving

TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": SCHEMA}}
RESPONSES_TOOL = {"type": "function", "name": "look", "description": "Looks.", "parameters": SCHEMA}
HELLO = [{"role": "user", "content": "Hello"}]


class Place(BaseModel):
    path: str
    depth: int


def client_of(served: Served, key: str = "k") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0, timeout=20)


def test_an_answer_with_its_thinking_apart() -> None:
    with serving("<think>\nA greeting.\n</think>\n\nHéllo 😀.") as served, client_of(served) as client:
        check_thinking(client)


def check_thinking(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="m", messages=HELLO)
    message = whole.choices[0].message
    assert message.content == "Héllo 😀."
    assert message.model_extra is not None
    assert message.model_extra["reasoning_content"] == "A greeting."
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None
    assert whole.usage.completion_tokens_details is not None
    assert whole.usage.completion_tokens_details.reasoning_tokens
    text, usage = "", None
    for chunk in client.chat.completions.create(
        model="m", messages=HELLO, stream=True, stream_options={"include_usage": True}
    ):
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        usage = chunk.usage or usage
    assert text == message.content
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)


def test_logprobs_are_read_by_the_sdk() -> None:
    """Found by use 25. Thinking is not in the answer's text, so its tokens are not told."""
    with serving("<think>\nA greeting.\n</think>\n\nHéllo 😀.") as served, client_of(served) as client:
        choice = client.chat.completions.create(model="m", messages=HELLO, logprobs=True, top_logprobs=2).choices[0]
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        written = b"".join(bytes(token.bytes or ()) for token in choice.logprobs.content)
        assert written.decode() == choice.message.content == "Héllo 😀."
        assert {len(token.top_logprobs) for token in choice.logprobs.content} == {2}
        with client.chat.completions.stream(model="m", messages=HELLO, logprobs=True, top_logprobs=2) as stream:
            for _ in stream:
                pass
            streamed = stream.get_final_completion().choices[0].logprobs
        assert streamed is not None
        assert streamed.content is not None
        assert [token.logprob for token in streamed.content] == [token.logprob for token in choice.logprobs.content]


def test_the_sdk_counts_the_tokens_of_an_input() -> None:
    """Found by use 34."""
    with serving("Hi.") as served, client_of(served) as client:
        counted = client.responses.input_tokens.count(model="m", input="Hello")
        answered = client.responses.create(model="m", input="Hello")
        assert answered.usage is not None
        assert counted.input_tokens == answered.usage.input_tokens > 0


def test_several_answers_are_told_apart_by_the_sdk() -> None:
    """Found by use 25."""
    with serving("Hi.") as served, client_of(served) as client:
        whole = client.chat.completions.create(model="m", messages=HELLO, n=3)
        assert [(choice.index, choice.message.content) for choice in whole.choices] == [(n, "Hi.") for n in range(3)]
        with client.chat.completions.stream(model="m", messages=HELLO, n=2) as stream:
            for _ in stream:
                pass
            streamed = stream.get_final_completion().choices
        assert [(choice.index, choice.message.content) for choice in streamed] == [(0, "Hi."), (1, "Hi.")]


def test_streamed_tool_calls_are_put_together_by_the_sdk() -> None:
    with serving(CALLS) as served, client_of(served) as client:
        with client.chat.completions.stream(model="m", messages=HELLO, tools=[TOOL]) as stream:
            for _ in stream:
                pass
            message = stream.get_final_completion().choices[0].message
        assert message.content == "I look."
        assert message.tool_calls is not None
        assert [json.loads(call.function.arguments) for call in message.tool_calls] == [
            {"path": "a/b", "depth": 2},
            {"path": "c"},
        ]
        assert len({call.id for call in message.tool_calls}) == 2
        single = client.chat.completions.create(
            model="m", messages=HELLO, tools=[TOOL], parallel_tool_calls=False
        ).choices[0]
        assert single.finish_reason == "tool_calls"
        assert single.message.tool_calls is not None
        assert len(single.message.tool_calls) == 1
        ignored = client.chat.completions.create(model="m", messages=HELLO, tools=[TOOL], tool_choice="none")
        assert ignored.choices[0].message.tool_calls is None


def test_a_forced_call_is_one_whatever_the_model_would_say() -> None:
    with serving("No, I will not.") as served, client_of(served) as client:
        named = {"type": "function", "function": {"name": "look"}}
        for choice in ("required", named):
            answer = client.chat.completions.create(
                model="m", messages=HELLO, tools=[TOOL], tool_choice=choice, max_tokens=400
            ).choices[0]
            assert answer.message.tool_calls is not None
            assert {call.function.name for call in answer.message.tool_calls} == {"look"}


def test_structured_output_is_parsed_into_a_model() -> None:
    with serving('{"path": "a/b", "depth": 3}') as served, client_of(served) as client:
        chat = client.chat.completions.parse(model="m", messages=HELLO, response_format=Place)
        assert chat.choices[0].message.parsed == Place(path="a/b", depth=3)
        response = client.responses.parse(model="m", input="Hello", text_format=Place)
        assert response.output_parsed == Place(path="a/b", depth=3)
        with client.responses.stream(model="m", input="Hello", text_format=Place) as stream:
            for _ in stream:
                pass
            assert stream.get_final_response().output_parsed == Place(path="a/b", depth=3)


def test_a_schema_that_cannot_be_enforced_is_named() -> None:
    with serving("x") as served, client_of(served) as client:
        schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?<=x)y"}}}
        wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        with pytest.raises(openai.BadRequestError, match=r"properties\.a"):
            client.chat.completions.create(model="m", messages=HELLO, response_format=wanted)


def test_responses_are_items_with_calls_and_thinking() -> None:
    with serving("<think>Look first.</think>" + CALL) as served, client_of(served) as client:
        with client.responses.stream(model="m", input="Hello", tools=[RESPONSES_TOOL]) as stream:
            kinds = [event.type for event in stream]
            response = stream.get_final_response()
        assert kinds[0] == "response.created"
        assert kinds[-1] == "response.completed"
        assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
        call = response.output[-1]
        assert call.type == "function_call"
        assert json.loads(call.arguments) == {"path": "a/b", "depth": 2}
        assert response.output_text == "I look."
        again = client.responses.create(
            model="m",
            input=[
                {"role": "user", "content": "Hello"},
                *[item.model_dump(exclude_none=True) for item in response.output],
                {"type": "function_call_output", "call_id": call.call_id, "output": "nothing"},
            ],
            tools=[RESPONSES_TOOL],
        )
        assert again.usage is not None
        assert response.usage is not None
        assert again.usage.input_tokens_details.cached_tokens >= response.usage.input_tokens


def test_what_needs_stored_state_is_refused_with_what_to_do() -> None:
    with serving("x") as served, client_of(served) as client, pytest.raises(openai.BadRequestError, match="history"):
        client.responses.create(model="m", input="Hello", previous_response_id="resp_1")


def test_legacy_completions_and_models() -> None:
    with serving("and on.") as served, client_of(served) as client:
        assert client.completions.create(model="m", prompt="On", max_tokens=20).choices[0].text == "and on."
        (model,) = client.models.list().data
        assert client.models.retrieve(model.id).id == model.id
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("other")


def test_errors_are_the_sdks_own() -> None:
    with serving("x", context_tokens=64, config=ProxyConfig(api_keys=("right",))) as served:
        with client_of(served, "wrong") as client, pytest.raises(openai.AuthenticationError):
            client.chat.completions.create(model="m", messages=HELLO)
        with client_of(served, "right") as client:
            long = [{"role": "user", "content": "word " * 50}]
            with pytest.raises(openai.BadRequestError) as refused:
                client.chat.completions.create(model="m", messages=long)
            assert refused.value.code == "context_length_exceeded"
            assert "This model's maximum context length is 64 tokens" in str(refused.value)
            with pytest.raises(openai.BadRequestError) as several:
                client.chat.completions.create(model="m", messages=HELLO, n=9)
            assert several.value.param == "n"
            with pytest.raises(openai.BadRequestError) as grammar:
                client.chat.completions.create(model="m", messages=HELLO, extra_body={"grammar": "root ::= x"})
            assert grammar.value.param == "grammar"
            events = list(client.responses.create(model="m", input="word " * 50, stream=True))
            assert events[-1].type == "response.failed"
            assert events[-1].response.error is not None
            assert events[-1].response.error.code == "context_length_exceeded"


def test_closing_a_stream_stops_the_engine() -> None:
    begun = threading.Event()
    with serving("word " * 4000, hook=lambda name, _place: begun.set() if name == "token" else None) as served:
        with client_of(served) as client:
            stream = client.chat.completions.create(model="m", messages=HELLO, stream=True)
            next(iter(stream))
            assert begun.wait(10)
            stream.close()
            after = client.chat.completions.create(model="m", messages=HELLO, max_tokens=2)
            assert after.usage is not None
            assert after.usage.prompt_tokens_details is not None
            assert after.usage.prompt_tokens_details.cached_tokens == after.usage.prompt_tokens - 1
        assert served.engine.position < 10_000
