"""No body makes a 500, and none disturbs a stream in flight.

PARKD_FUZZ_BODIES says how many bodies are sent (10000 for a thorough run); PARKD_FUZZ_SEED chooses others.
"""

from __future__ import annotations

import copy
import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import anyio
import httpx
import pytest

from parkd.answers.structured import StructuredOutput
from parkd.proxy.config import ProxyConfig
from tests.clients.client_kit import CALL, FORMAT, byte_tokenizer
from tests.fakes.engine import FakeEngine
from tests.integration.api.api_harness import Running, read_stream, running

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(1800)]
BODIES = int(os.environ.get("PARKD_FUZZ_BODIES", "300"))
SEED = int(os.environ.get("PARKD_FUZZ_SEED", "1"))
BATCH = 100
SENDERS = 8
FULL = (503, 529)
"""The queue is full: an answer like any other here."""

PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}, "n": {"type": "integer"}}, "required": ["n"]}
TOOL = {"type": "function", "function": {"name": "look", "description": "d", "parameters": PARAMETERS}}
TALK = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": [{"type": "text", "text": "Look."}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"n": 1}'}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "found"},
    {"role": "user", "content": "And?"},
]
CHAT = {
    "model": "m",
    "messages": TALK,
    "tools": [TOOL],
    "tool_choice": "auto",
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 40,
    "seed": 1,
    "stop": ["\n\n"],
    "max_tokens": 4,
    "stream": False,
    "stream_options": {"include_usage": True},
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": PARAMETERS}},
    "logit_bias": {"5": 1},
    "chat_template_kwargs": {"enable_thinking": False},
    "reasoning_effort": "low",
    "cache_prompt": True,
    "cache_salt": "s",
    "prompt_cache_key": "k",
    "steering": {},
}
MESSAGES = {
    "model": "m",
    "max_tokens": 4,
    "system": [{"type": "text", "text": "x-anthropic-billing-header: a", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {"n": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "found"}]},
    ],
    "tools": [{"name": "look", "input_schema": PARAMETERS}],
    "tool_choice": {"type": "auto"},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": PARAMETERS}},
    "diagnostics": {"previous_message_id": "msg_1"},
    "stop_sequences": ["x"],
    "metadata": {"user_id": "u"},
}
RESPONSES = {
    "model": "m",
    "instructions": "Be short.",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Look."}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "parkd1:aGk="},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "found"},
    ],
    "tools": [{"type": "function", "name": "look", "parameters": PARAMETERS}, {"type": "namespace", "name": "n"}],
    "text": {"format": {"type": "json_schema", "name": "n", "schema": PARAMETERS}},
    "reasoning": {"effort": "low"},
    "max_output_tokens": 4,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_options": {"comparison_response_id": "resp_1"},
}
SEEDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {"messages": TALK[-1:], "max_tokens": 3, "stream": True}),
    ("/v1/messages?beta=true", MESSAGES),
    ("/v1/messages", {"max_tokens": 3, "messages": [{"role": "user", "content": "Hi"}], "stream": True}),
    ("/v1/messages/count_tokens", MESSAGES),
    ("/v1/responses", RESPONSES),
    ("/v1/responses", {"input": "Hi", "stream": True, "max_output_tokens": 3}),
    ("/v1/completions", {"prompt": "On and", "max_tokens": 3, "echo": False, "best_of": 1}),
    ("/tokenize", {"content": "some text", "with_pieces": True}),
    ("/apply-template", {"messages": TALK, "tools": [TOOL]}),
)
READS = ("/v1/models", "/v1/models/x", "/props", "/slots", "/health", "/metrics", "/parkd/explain/x", "/", "/nowhere")
JUNK: tuple[Any, ...] = (
    None, True, False, 0, -1, 1.5, 10**30, -(2**63), 1e300, "", "x", "auto", "text", "é😀\x00\x1f", "<|im_end|>",
    "a" * 5000, [], [[]], {}, {"type": "text"}, {"type": "image", "source": {"data": "x"}}, [None], ["x", 1],
    {"type": "object", "properties": {"a": {"$ref": "#/x"}}}, {"role": "user"}, {"": ""}, [{}] * 20,
)  # fmt: skip
RAW = (
    b"", b"{", b"null", b"[]", b'"x"', b"\xff\xfe", b'{"messages": [}', b'{"a": 1e999}', b'{"a": "\\ud800"}',
    b"[" * 3000, b'{"messages":' * 400, b"{}" * 2, b'{"model": "m", "model": 1}', b"\x00" * 10,
)  # fmt: skip


def nodes(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (holder, key) in a document."""
    pairs: list[tuple[Any, Any]] = list(value.items()) if isinstance(value, dict) else []
    pairs += enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield value, key
        yield from nodes(inner)


def mutated(chance: random.Random, body: dict[str, Any]) -> bytes:
    body = copy.deepcopy(body)
    for _ in range(chance.choice((0, 1, 1, 1, 2, 3))):
        places = list(nodes(body))
        if not places:
            break
        holder, key = chance.choice(places)
        match chance.randrange(6):
            case 0 | 1:
                holder[key] = copy.deepcopy(chance.choice(JUNK))
            case 2:
                del holder[key]
            case 3 if isinstance(holder, list):
                holder.insert(key, copy.deepcopy(chance.choice([*holder, *JUNK])))
            case 3:
                holder[chance.choice(["x", "type", "content", "name", "role"])] = copy.deepcopy(holder[key])
            case 4:
                other_holder, other_key = chance.choice(places)
                holder[key] = copy.deepcopy(other_holder.get(other_key) if isinstance(other_holder, dict) else JUNK[7])
            case _:
                nested: Any = holder[key]
                for _ in range(chance.choice((1, 40, 200))):
                    nested = chance.choice(([nested], {"properties": {"a": nested}}))
                holder[key] = nested
    data = json.dumps(body).encode()
    if chance.random() < 0.05:
        return data[: chance.randrange(len(data))]
    return data


async def send(server: Running, chance: random.Random, seen: Counter[str]) -> None:
    roll = chance.random()
    if roll < 0.03:
        response = await server.client.request(chance.choice(("GET", "HEAD", "POST", "PUT")), chance.choice(READS))
        body = b""
    else:
        path, seed = chance.choice(SEEDS)
        body = chance.choice(RAW) if roll < 0.08 else mutated(chance, seed)
        headers = {"content-type": "application/json"}
        if chance.random() < 0.1:
            headers["x-parkd-cache-mode"] = chance.choice(("off", "read", "use", "none", ""))
        response = await server.client.post(path, content=body, headers=headers)
    seen[str(response.status_code)] += 1
    unforeseen = response.status_code >= 500 and response.status_code not in FULL
    if unforeseen or "engine_failure" in response.text:
        asked = f"{response.request.method} {response.request.url.path}"
        pytest.fail(f"{asked} {response.status_code}\n{body!r}\n{response.text[:500]}")


async def stream(server: Running, seed: int) -> str:
    body = {
        "messages": [{"role": "user", "content": "Tell me a long story."}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 60,
        "temperature": 1,
        "seed": seed,
    }
    async with server.client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        return (await read_stream(response)).text


def script(prompt: str) -> str | None:
    return CALL if "tools\n" in prompt else None


async def test_no_body_makes_a_500_and_none_disturbs_a_stream() -> None:
    engine = FakeEngine(context_tokens=16384, script=script)
    structured = StructuredOutput(byte_tokenizer().to_str(), engine.info.vocab_size, engine.info.end_token_ids)
    config = ProxyConfig(max_output_tokens=64, max_queue=64, keep_alive_s=0.05)
    seen: Counter[str] = Counter()
    async with running(
        engine,
        config=config,
        output=FORMAT,
        build_mask=lambda request, tail, _: structured.mask(request, FORMAT, tail),
    ) as server:
        server.client.timeout = httpx.Timeout(60)
        expected = await stream(server, 7)
        assert len(expected) > 5
        for batch in range(-(-BODIES // BATCH)):
            texts: list[str] = []

            async def listen(texts: list[str] = texts) -> None:
                texts.append(await stream(server, 7))

            async def sender(number: int, batch: int = batch) -> None:
                chance = random.Random(f"{SEED}-{batch}-{number}")
                for _ in range(number, min(BATCH, BODIES - batch * BATCH), SENDERS):
                    await send(server, chance, seen)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(listen)
                for number in range(SENDERS):
                    tasks.start_soon(sender, number)
            assert texts == [expected]
        assert (await server.client.get("/health")).json()["status"] == "ok"
    print(dict(seen))
    assert sum(seen.values()) == BODIES
    assert seen["200"] > BODIES // 10, "most bodies never reached a turn"
    assert seen["400"] > BODIES // 10
