"""All dialects on one port share one conversation, and each speaks its own shapes."""

from __future__ import annotations

import pytest

from tests.fakes.engine import FakeEngine
from tests.integration.api.api_harness import running

pytestmark = pytest.mark.anyio
TEXT = "Hello there. " * 30


async def test_the_same_messages_are_the_same_conversation_in_every_dialect() -> None:
    async with running(FakeEngine()) as server:
        messages = [{"role": "user", "content": TEXT}]
        chat = await server.chat(messages)
        tokens = len(server.prompt_tokens(messages))
        anthropic = await server.client.post(
            "/v1/messages?beta=true", json={"model": "m", "messages": messages, "max_tokens": 8, "temperature": 0}
        )
        assert anthropic.status_code == 200, anthropic.text
        assert anthropic.json()["content"][0]["text"] == chat.text
        usage = anthropic.json()["usage"]
        assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (1, tokens - 1)
        responses = await server.client.post(
            "/v1/responses", json={"model": "m", "input": messages, "max_output_tokens": 8, "temperature": 0}
        )
        assert responses.status_code == 200, responses.text
        assert responses.json()["usage"]["input_tokens_details"]["cached_tokens"] == tokens - 1
        raw = await server.client.post("/v1/completions", json={"prompt": TEXT, "max_tokens": 3, "temperature": 0})
        assert raw.status_code == 200, raw.text


async def test_counted_tokens_are_the_prompts() -> None:
    async with running(FakeEngine()) as server:
        messages = [{"role": "user", "content": TEXT}]
        counted = await server.client.post("/v1/messages/count_tokens", json={"model": "m", "messages": messages})
        assert counted.json() == {"input_tokens": len(server.prompt_tokens(messages))}
        assert server.engine.position == 0


async def test_errors_are_in_the_shape_of_the_dialect_asked() -> None:
    async with running(FakeEngine(context_tokens=100)) as server:
        messages = [{"role": "user", "content": TEXT}]
        anthropic = await server.client.post("/v1/messages", json={"messages": messages, "max_tokens": 5})
        assert anthropic.status_code == 400
        assert anthropic.json()["type"] == "error"
        assert anthropic.headers["request-id"]
        chat = await server.client.post("/v1/chat/completions", json={"messages": messages})
        assert chat.json()["error"]["code"] == "context_length_exceeded"
