"""The official SDKs where they must wait, are turned away, or stop waiting; and their asynchronous clients."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anthropic
import anyio
import openai
import pytest

from parkd.proxy.config import ProxyConfig
from tests.clients.client_kit import Served, serving
from tests.integration.api.api_harness import Gate, until

pytestmark = pytest.mark.anyio

HELLO = [{"role": "user", "content": "Hello"}]
LONG = [{"role": "user", "content": "a long story " * 400}]
"""Several chunks of the fake engine."""
CHUNK_TOKENS = 512
"""Which this engine reads at once."""


def openai_of(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="k", max_retries=0, timeout=20)


def anthropic_of(served: Served) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=served.url, api_key="k", max_retries=0, timeout=20)


@pytest.fixture(scope="module")
def full() -> Iterator[Served]:
    """One turn runs, one waits, and there is room for no other."""
    with serving("Hi.", config=ProxyConfig(max_queue=1, resend_grace_s=0), hook=(gate := Gate("chunk"))) as served:
        lane = served.server.proxy.lane
        with holding(served, LONG):
            anyio.run(until, gate.reached.is_set)  # or else the other, which has no chunk, may come and go before it
            with holding(served, HELLO):
                anyio.run(until, lambda: lane.waiting == 1)
                yield served
                gate.opened.set()


@contextmanager
def holding(served: Served, messages: list[Any]) -> Iterator[None]:
    """A client that asks on a thread of its own until the end."""
    with openai_of(served) as client:
        asked = threading.Thread(
            target=lambda: client.chat.completions.create(model="m", messages=messages, max_tokens=2)
        )
        asked.start()
        yield
        asked.join(20)
        assert not asked.is_alive()


OPENAI_CALLS: dict[str, Callable[[openai.OpenAI, bool], Any]] = {
    "chat": lambda client, stream: client.chat.completions.create(model="m", messages=HELLO, stream=stream),
    "responses": lambda client, stream: client.responses.create(model="m", input="Hello", stream=stream),
    "completions": lambda client, stream: client.completions.create(model="m", prompt="Hello", stream=stream),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", OPENAI_CALLS)
def test_a_full_queue_is_openais_error_with_a_time_to_come_back(full: Served, api: str, stream: bool) -> None:
    with openai_of(full) as client, pytest.raises(openai.InternalServerError) as refused:
        OPENAI_CALLS[api](client, stream)
    assert refused.value.status_code == 503
    assert refused.value.code == "overloaded"
    assert int(refused.value.response.headers["retry-after"]) >= 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_anthropics_error_with_a_time_to_come_back(full: Served, stream: bool) -> None:
    with anthropic_of(full) as client, pytest.raises(anthropic.OverloadedError) as refused:
        client.messages.create(model="m", max_tokens=5, messages=HELLO, stream=stream)
    assert refused.value.status_code == 529
    assert int(refused.value.response.headers["retry-after"]) >= 1
    assert isinstance(refused.value.body, dict)
    assert refused.value.body["error"]["type"] == "overloaded_error"


async def test_asynchronous_clients_at_once_each_get_their_own_answer() -> None:
    with serving(lambda prompt: f"Answer {prompt.split('number ')[-1].split('.')[0]}.") as served:
        chat = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="k", max_retries=0, timeout=20)
        claude = anthropic.AsyncAnthropic(base_url=served.url, api_key="k", max_retries=0, timeout=20)
        got: dict[str, str] = {}

        async def ask_chat(name: str, messages: list[Any]) -> None:
            stream = await chat.chat.completions.create(model="m", messages=messages, stream=True)
            got[name] = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        async def ask_responses(name: str, messages: list[Any]) -> None:
            async with chat.responses.stream(model="m", input=messages) as stream:
                got[name] = (await stream.get_final_response()).output_text

        async def ask_claude(name: str, messages: list[Any]) -> None:
            async with claude.messages.stream(model="m", max_tokens=50, messages=messages) as stream:
                got[name] = "".join([piece async for piece in stream.text_stream])

        async with chat, claude, anyio.create_task_group() as tasks:
            for place, ask in enumerate((ask_chat, ask_responses, ask_claude) * 3):
                tasks.start_soon(ask, f"{place}", [{"role": "user", "content": f"Say number {place}."}])
        assert got == {f"{place}": f"Answer {place}." for place in range(9)}


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
async def test_a_client_that_is_cancelled_in_its_prompt_frees_the_lane_and_what_was_read_stays(api: str) -> None:
    gate = Gate("chunk", nth=3)
    with serving("Right.", config=ProxyConfig(resend_grace_s=0), hook=gate) as served:
        chat = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="k", max_retries=0, timeout=20)
        claude = anthropic.AsyncAnthropic(base_url=served.url, api_key="k", max_retries=0, timeout=20)

        async def ask(messages: list[Any]) -> tuple[str, int]:
            """The text, and how many tokens of the prompt were known."""
            if api == "chat":
                answer = await chat.chat.completions.create(model="m", messages=messages)
                assert answer.usage is not None
                assert answer.usage.prompt_tokens_details is not None
                return answer.choices[0].message.content or "", answer.usage.prompt_tokens_details.cached_tokens or 0
            if api == "responses":
                response = await chat.responses.create(model="m", input=messages)
                assert response.usage is not None
                return response.output_text, response.usage.input_tokens_details.cached_tokens
            message = await claude.messages.create(model="m", max_tokens=50, messages=messages)
            assert message.content[0].type == "text"
            return message.content[0].text, message.usage.cache_read_input_tokens or 0

        async with chat, claude:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask, LONG)
                await gate.wait_reached()
                tasks.cancel_scope.cancel()
            lane = served.server.proxy.lane
            running = lane.running
            assert running is not None
            await until(running.channel.cancel.is_set)
            gate.opened.set()
            await until(lambda: not lane.busy)
            assert served.engine.position == 3 * CHUNK_TOKENS
            assert (await ask(HELLO))[0] == "Right."
            assert await ask(LONG) == ("Right.", 3 * CHUNK_TOKENS)
