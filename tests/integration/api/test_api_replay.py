"""Answers that clients send back in their own spelling are found whole."""

from __future__ import annotations

import json
from typing import Any

import pytest

from parkd.answers.base import OutputFormat, ReasoningMarks, ToolFormat
from tests.fakes.engine import FakeEngine
from tests.integration.api.api_harness import running

pytestmark = pytest.mark.anyio

FORMAT = OutputFormat(ToolFormat.HERMES, ReasoningMarks("<think>", "</think>"))
CALL = (
    'Sure.\n<tool_call>\n{"name": "look", "arguments": {"path": "a/b", "deep": {"z": 1.0, "a": [1,  2]}}}\n</tool_call>'
)
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
LONG = "Look at the files, please. " * 40


def scripted(prompt: str) -> str | None:
    return CALL if prompt.count("<|im_start|>assistant") == 1 else None


def resorted(arguments: str) -> str:
    """As a client would write them again."""
    return json.dumps(json.loads(arguments), sort_keys=True, separators=(",", ":"))


async def test_resorted_arguments_are_the_generated_tokens() -> None:
    async with running(FakeEngine(script=scripted), output=FORMAT) as server:
        ask = [{"role": "user", "content": LONG}]
        first = await server.client.post("/v1/chat/completions", json=body(ask))
        message = first.json()["choices"][0]["message"]
        (call,) = message["tool_calls"]
        assert json.loads(call["function"]["arguments"])["path"] == "a/b"
        call["function"]["arguments"] = resorted(call["function"]["arguments"])
        result = {"role": "tool", "tool_call_id": call["id"], "content": "nothing there"}
        second = await server.client.post("/v1/chat/completions", json=body([*ask, message, result]))
        usage, before = second.json()["usage"], first.json()["usage"]
        reused = usage["prompt_tokens_details"]["cached_tokens"]
        # the prompt, and every generated token but the end token, whose row was never computed
        assert reused == before["prompt_tokens"] + before["completion_tokens"] - 1
        assert server.answers is not None
        assert server.answers.spliced == 1


async def test_strict_replay_reads_the_answer_again() -> None:
    async with running(FakeEngine(script=scripted), output=FORMAT, answer_bytes=0) as server:
        ask = [{"role": "user", "content": LONG}]
        first = (await server.client.post("/v1/chat/completions", json=body(ask))).json()
        turns = [*ask, first["choices"][0]["message"], {"role": "user", "content": "And?"}]
        second = (await server.client.post("/v1/chat/completions", json=body(turns))).json()
        reused = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert first["usage"]["prompt_tokens"] <= reused
        assert reused < first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"] - 1


async def test_a_stop_string_cuts_and_what_was_cut_never_comes_back() -> None:
    async with running(FakeEngine(script=lambda _prompt: "one STOP two three"), output=FORMAT) as server:
        ask = [{"role": "user", "content": LONG}]
        first = await server.chat(ask, stop=["STOP"], max_tokens=50)
        assert first.text == "one "
        turns = [*ask, {"role": "assistant", "content": first.text}, {"role": "user", "content": "And?"}]
        second = await server.chat(turns)
        prompt = server.prompt_tokens(turns)
        assert second.usage["prompt_tokens"] == len(prompt)
        assert second.reused == len(server.prompt_tokens(ask)) + len(b"one ")


async def test_a_request_that_leaves_no_trace_leaves_no_answer() -> None:
    async with running(FakeEngine(script=scripted), output=FORMAT) as server:
        headers = {"x-parkd-cache-mode": "read"}
        await server.client.post(
            "/v1/chat/completions", json=body([{"role": "user", "content": LONG}]), headers=headers
        )
        assert server.answers is not None
        assert server.answers.memory_bytes == 0


def body(messages: list[dict[str, Any]]) -> dict[str, Any]:
    return {"messages": messages, "tools": [TOOL], "max_tokens": 200, "temperature": 0}
