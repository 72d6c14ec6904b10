"""What the official SDKs meet less often: streams of the older API, failures inside a stream, ids, refused counts."""

from __future__ import annotations

import threading
from collections.abc import Callable

import anthropic
import openai
import pytest
from pydantic import BaseModel

from parkd.errors import EngineFailure
from parkd.proxy.config import ProxyConfig
from tests.clients.client_kit import SCHEMA, Served, serving

HELLO = [{"role": "user", "content": "Hello"}]
LONG = "word " * 4000


class Place(BaseModel):
    path: str
    depth: int


def openai_of(served: Served, key: str = "k") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0, timeout=20)


def anthropic_of(served: Served, key: str = "k") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=served.url, api_key=key, max_retries=0, timeout=20)


def breaking(after_tokens: int) -> Callable[[str, int], None]:
    """The engine fails once, some tokens into the first answer."""
    left = [after_tokens]

    def hook(name: str, _place: int) -> None:
        if name == "token":
            left[0] -= 1
            if left[0] == 0:
                raise EngineFailure("The device said no.")

    return hook


def test_a_streamed_completion_is_the_whole_ones_text_and_ends_with_its_usage() -> None:
    with serving("and on it goes.") as served, openai_of(served) as client:
        whole = client.completions.create(model="m", prompt="On", max_tokens=20)
        chunks = list(
            client.completions.create(
                model="m", prompt="On", max_tokens=20, stream=True, stream_options={"include_usage": True}
            )
        )
        assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
        assert chunks[-1].choices == []
        assert whole.usage is not None
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        for told in (chunks[-1], chunks[-2], whole):  # what the cache did is told in every form of the answer
            assert told.model_extra is not None
            assert told.model_extra["timings"]["prompt_n"] >= 1
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model="m", prompt="On", echo=True)
        assert refused.value.param == "echo"


@pytest.mark.parametrize("path", ["responses", "completions"])
def test_closing_a_stream_stops_the_engine_in_every_dialect(path: str) -> None:
    begun = threading.Event()
    with serving(LONG, hook=lambda name, _place: begun.set() if name == "token" else None) as served:
        with openai_of(served) as client:
            if path == "responses":
                stream = client.responses.create(model="m", input="Hello", stream=True)
            else:
                stream = client.completions.create(model="m", prompt="Hello", max_tokens=20_000, stream=True)
            next(iter(stream))
            assert begun.wait(10)
            stream.close()
            client.chat.completions.create(model="m", messages=HELLO, max_tokens=2)
        assert served.engine.position < 10_000


def test_a_failure_inside_a_stream_is_the_sdks_error() -> None:
    device_said_no = pytest.raises(openai.APIError, match="device said no")
    with serving(LONG, hook=breaking(5)) as served, openai_of(served) as client, device_said_no:
        list(client.chat.completions.create(model="m", messages=HELLO, stream=True))
    with serving(LONG, hook=breaking(5)) as served, openai_of(served) as client:
        events = list(client.responses.create(model="m", input="Hello", stream=True))
        assert events[-1].type == "response.failed"
        assert events[-1].response.error is not None
        assert "device said no" in events[-1].response.error.message
    with serving(LONG, hook=breaking(5)) as served, anthropic_of(served) as client:
        with pytest.raises(anthropic.APIStatusError, match="device said no") as failed:
            list(client.messages.create(model="m", max_tokens=30_000, messages=HELLO, stream=True))
        assert isinstance(failed.value.body, dict)
        assert failed.value.body["error"]["type"] == "api_error"
        assert failed.value.body["request_id"].startswith("req_")


def test_both_sdks_find_the_requests_id() -> None:
    with serving("Hi.") as served:
        with openai_of(served) as client:
            answer = client.chat.completions.create(model="m", messages=HELLO)
            assert answer._request_id is not None
            assert answer._request_id in answer.id
        with anthropic_of(served) as claude:
            message = claude.messages.create(model="m", max_tokens=5, messages=HELLO)
            assert message._request_id is not None
            assert message.id == "msg_" + message._request_id.removeprefix("req_")


def test_structured_output_is_streamed_to_the_anthropic_sdk() -> None:
    asked = {"model": "m", "max_tokens": 100, "messages": HELLO, "output_format": Place}
    with (
        serving('{"path": "a/b", "depth": 3}') as served,
        anthropic_of(served) as client,
        client.messages.stream(**asked) as stream,
    ):
        assert stream.get_final_message().parsed_output == Place(path="a/b", depth=3)


def test_counts_and_models_are_refused_in_anthropics_shape() -> None:
    with serving("x", config=ProxyConfig(api_keys=("right",))) as served:
        with anthropic_of(served, "wrong") as client:
            for call in (
                lambda: client.messages.count_tokens(model="m", messages=HELLO),
                lambda: client.models.list(),
            ):
                with pytest.raises(anthropic.AuthenticationError) as refused:
                    call()
                assert refused.value.body["error"]["type"] == "authentication_error"
        with anthropic_of(served, "right") as client:
            with pytest.raises(anthropic.BadRequestError, match="messages"):
                client.messages.count_tokens(model="m", messages=[])
            with pytest.raises(anthropic.NotFoundError) as missing:
                client.models.retrieve("other")
            assert missing.value.body["error"]["type"] == "not_found_error"
            with pytest.raises(anthropic.NotFoundError) as batch:
                client.messages.batches.list()
            assert batch.value.body["type"] == "error"


def test_tools_that_are_narrowed_by_name_are_still_tools() -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
    named = {"type": "function", "function": {"name": "look"}}
    with serving("No.") as served, openai_of(served) as client:
        for mode, calls in (("auto", None), ("required", ["look"])):
            choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named]}}
            message = client.chat.completions.create(
                model="m", messages=HELLO, tools=[tool], tool_choice=choice, max_tokens=400
            ).choices[0].message  # fmt: skip
            assert (message.tool_calls and [call.function.name for call in message.tool_calls]) == calls


@pytest.mark.parametrize("api", ["responses", "messages"])
def test_a_grammar_without_its_rules_is_refused_by_every_api(api: str) -> None:
    extra = {"grammar": "root ::= x"}
    with serving("x") as served, openai_of(served) as client, anthropic_of(served) as claude:
        if api == "responses":
            with pytest.raises(openai.BadRequestError, match="grammar"):
                client.responses.create(model="m", input="Hello", extra_body=extra)
        else:
            with pytest.raises(anthropic.BadRequestError, match="grammar"):
                claude.messages.create(model="m", max_tokens=5, messages=HELLO, extra_body=extra)
