"""Two turns as each agent sends them: no request is refused, and the second reads the new text only.

The bodies have the shapes that the agents' own requests have, with texts of ours. The answers of the second turn go
back the way the agent would write them: re-sorted arguments, content as parts, hints that have moved.

What may not be reused of the second prompt: the end token of the first answer, whose row was never computed, and all
behind it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.clients.client_kit import CALL, Served, serving

SYSTEM = "You are a careful assistant that edits files. " * 20
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}, "depth": {"type": "integer"}}}
TEXT = "The file holds a list."


def script(prompt: str) -> str:
    if "title" in prompt[-400:]:
        return "A title"
    return CALL if "tools\n" in prompt and "a result" not in prompt else TEXT


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(script) as server:
        yield server


@dataclass
class Turn:
    """What came back of one request."""

    message: dict[str, Any]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int

    @property
    def reusable_next(self) -> int:
        return self.prompt_tokens + self.output_tokens - 1


def events(client: httpx.Client, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> list[Any]:
    with client.stream("POST", path, json=body, headers=headers) as response:
        assert response.status_code == 200, response.read()
        lines = [line for line in response.iter_lines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def chat(client: httpx.Client, body: Mapping[str, Any]) -> Turn:
    """Puts a streamed chat answer together, as agents do."""
    chunks = events(client, "/v1/chat/completions", body, {"authorization": "Bearer k"})
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            message["content"] += choice["delta"].get("content") or ""
            for piece in choice["delta"].get("tool_calls") or ():
                call = calls.setdefault(piece["index"], {"id": "", "name": "", "arguments": ""})
                call["id"] = piece.get("id") or call["id"]
                call["name"] = piece["function"].get("name") or call["name"]
                call["arguments"] += piece["function"].get("arguments") or ""
    if calls:
        message["tool_calls"] = [
            {"id": c["id"], "type": "function", "function": {"name": c["name"], "arguments": c["arguments"]}}
            for c in calls.values()
        ]
    usage = chunks[-1]["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Turn(message, usage["prompt_tokens"], cached, usage["completion_tokens"])


def messages(client: httpx.Client, body: Mapping[str, Any], headers: Mapping[str, str]) -> Turn:
    """Puts a streamed Anthropic answer together."""
    blocks: list[dict[str, Any]] = []
    usage: dict[str, Any] = {}
    for event in events(client, "/v1/messages?beta=true", body, headers):
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            blocks[-1]["text"] = blocks[-1].get("text", "") + delta.get("text", "")
            blocks[-1]["json"] += delta.get("partial_json", "")
        elif event["type"] == "message_delta":
            usage = event["usage"]
    content = [
        {"type": "tool_use", "id": b["id"], "name": b["name"], "input": json.loads(b["json"] or "{}")}
        if b["type"] == "tool_use"
        else {"type": "text", "text": b["text"]}
        for b in blocks
    ]
    cached = usage["cache_read_input_tokens"]
    prompt = usage["input_tokens"] + cached + usage["cache_creation_input_tokens"]
    return Turn({"role": "assistant", "content": content}, prompt, cached, usage["output_tokens"])


def check(name: str, first: Turn, second: Turn) -> None:
    print(f"{name}: {first.prompt_tokens} then {second.prompt_tokens} tokens, {second.cached_tokens} reused")
    assert second.cached_tokens == first.reusable_next, name


def resorted(arguments: str) -> str:
    return json.dumps(json.loads(arguments), sort_keys=True, separators=(",", ":"))


def client_of(served: Served) -> httpx.Client:
    return httpx.Client(base_url=served.url, timeout=20, trust_env=False)


def claude_code(number: int, talk: list[Any], system: str = SYSTEM, **changes: Any) -> dict[str, Any]:
    """Billing header that varies, system as parts, a cache hint on the last block, betas and context management."""
    hint = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    return {
        "model": "claude-something-9",
        "max_tokens": 32000,
        "stream": True,
        "system": [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=1.{number}; cch={number}a;"},
            {"type": "text", "text": system, **hint},
        ],
        "messages": [*talk[:-1], _hinted(talk[-1], hint)],
        "tools": [
            {"name": "look", "description": "Looks.", "input_schema": PARAMETERS},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        ],
        "metadata": {"user_id": f"user_1_session_{number}"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        "thinking": {"type": "adaptive"},
        "temperature": 1,
        **changes,
    }


def _hinted(message: dict[str, Any], hint: Mapping[str, Any]) -> dict[str, Any]:
    content = message["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
    return {**message, "content": [*parts[:-1], {**parts[-1], **hint}]}


CLAUDE_HEADERS = {
    "x-api-key": "k",
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
    "user-agent": "claude-cli/9 (external, cli)",
}


def test_claude_code(served: Served) -> None:
    """Reports 21, 25, 33 and 34."""
    with client_of(served) as client:
        assert client.head("/").status_code == 200
        assert client.head("/api/hello").status_code == 200
        ask = [{"role": "user", "content": "Look at a/b. [claude]"}]
        first = messages(client, claude_code(1, ask), CLAUDE_HEADERS)
        call = first.message["content"][-1]
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "a result"}
        reminder = {"type": "text", "text": "<system-reminder>Be brief.</system-reminder>"}
        talk = [*ask, first.message, {"role": "user", "content": [result, reminder]}]
        # A title job between the turns has another prompt and must cost nothing.
        title = {"model": "m", "max_tokens": 20, "stream": True, "messages": [{"role": "user", "content": "title?"}]}
        messages(client, title, CLAUDE_HEADERS)
        second = messages(client, claude_code(2, talk), CLAUDE_HEADERS)
        check("Claude Code", first, second)
        noted = {"role": "system", "content": "The user opened a file."}
        third = messages(
            client, claude_code(3, [*talk, second.message, noted, {"role": "user", "content": "And?"}]), CLAUDE_HEADERS
        )
        check("Claude Code, a system message inside", second, third)


def codex(items: list[Any]) -> dict[str, Any]:
    """Leading developer items, a namespace of tools, a vendor's tool, nothing stored."""
    developer = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": SYSTEM}]}
    return {
        "model": "gpt-something-codex",
        "instructions": "You are a coding agent.",
        "input": [developer, *items],
        "tools": [
            {"type": "function", "name": "look", "strict": False, "parameters": PARAMETERS},
            {
                "type": "namespace",
                "name": "mcp__files",
                "tools": [{"type": "function", "name": "list", "parameters": PARAMETERS}],
            },
            {"type": "web_search"},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199-a-conversation",
        "text": {"verbosity": "medium"},
    }


def responses(client: httpx.Client, body: Mapping[str, Any]) -> Turn:
    told = events(client, "/v1/responses", body, {"authorization": "Bearer k", "originator": "codex_cli_rs"})
    assert told[0]["type"] == "response.created"
    assert told[-1]["type"] == "response.completed"
    assert all("type" in event for event in told)
    done = [event["item"] for event in told if event["type"] == "response.output_item.done"]
    usage = told[-1]["response"]["usage"]
    cached = usage["input_tokens_details"]["cached_tokens"]
    return Turn({"items": done}, usage["input_tokens"], cached, usage["output_tokens"])


def test_codex(served: Served) -> None:
    """Reports 37 and 42."""
    with client_of(served) as client:
        ask = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Look. [codex]"}]}
        first = responses(client, codex([ask]))
        items = first.message["items"]
        assert [item["type"] for item in items] == ["message", "function_call"]
        call = {**items[1], "arguments": resorted(items[1]["arguments"])}
        said = {"type": "message", "role": "assistant", "content": items[0]["content"]}
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "a result"}
        second = responses(client, codex([ask, said, call, output]))
        check("Codex", first, second)
        refused = client.post("/v1/responses", json={**codex([ask]), "previous_response_id": "resp_1"})
        assert refused.status_code == 400


Change = Callable[[dict[str, Any]], dict[str, Any]]


def _same(message: dict[str, Any]) -> dict[str, Any]:
    return message


def _as_parts(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _resorted_calls(message: dict[str, Any]) -> dict[str, Any]:
    calls = [
        {**call, "function": {**call["function"], "arguments": resorted(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "content": message["content"] or None, "tool_calls": calls}


def _index_and_null(message: dict[str, Any]) -> dict[str, Any]:
    calls = [{**call, "index": place} for place, call in enumerate(message["tool_calls"])]
    return {**message, "tool_calls": calls, "refusal": None, "function_call": None, "audio": None}


AGENTS: dict[str, tuple[dict[str, Any], Change, str]] = {
    # name: fields of every request, how the answer is sent back, the role of the system prompt
    "opencode": ({"tools": True, "max_tokens": 32000, "tool_choice": "auto"}, _resorted_calls, "system"),
    "Cline": ({"temperature": 0, "parts": True}, _as_parts, "developer"),
    "Roo": ({"parallel_tool_calls": False, "tools": True}, _index_and_null, "system"),
    "Continue": ({"tools": True, "max_completion_tokens": 4096}, _resorted_calls, "system"),
    "Zed": ({"tools": True, "parallel_tool_calls": True, "prompt_cache_key": "thread-1"}, _index_and_null, "system"),
    "Open WebUI": ({"session_id": "s", "chat_id": "c", "background_tasks": {"title": True}}, _same, "system"),
    "LibreChat": ({"user": "u", "top_p": 1}, _same, "system"),
    "aider": ({"temperature": 0}, _same, "system"),
    "langchain": ({"tools": True, "n": 1}, _index_and_null, "system"),
    "pydantic-ai": ({"tools": True, "tool_choice": "auto"}, _resorted_calls, "system"),
    "llm": ({}, _same, "system"),
}


@pytest.mark.parametrize("name", AGENTS)
def test_agents_that_speak_chat(served: Served, name: str) -> None:
    given, change, role = AGENTS[name]
    fields = dict(given)
    tool = {"type": "function", "function": {"name": "look", "parameters": PARAMETERS, "strict": False}}
    if fields.pop("tools", False):
        fields["tools"] = [tool]
    parts = fields.pop("parts", False)
    hint = {"cache_control": {"type": "ephemeral"}}

    def asked(talk: list[dict[str, Any]]) -> dict[str, Any]:
        system: dict[str, Any] = {"role": role, "content": SYSTEM + name}
        if parts:  # the hint is on the last user message only, so it moves
            last = {**talk[-1], "content": [{"type": "text", "text": talk[-1]["content"], **hint}]}
            system = {"role": role, "content": [{"type": "text", "text": SYSTEM + name, **hint}]}
            talk = [*talk[:-1], last]
        return {
            "model": "m",
            "messages": [system, *talk],
            "stream": True,
            "stream_options": {"include_usage": True},
            **fields,
        }

    with client_of(served) as client:
        title = [{"role": "user", "content": f"A title for this chat, please: title [{name}]"}]
        talk: list[dict[str, Any]] = [{"role": "user", "content": "Look at a/b."}]
        first = chat(client, asked(talk))
        chat(client, asked(title))
        talk.append(change(first.message))
        if "tool_calls" in first.message:
            call_id = first.message["tool_calls"][0]["id"]
            talk.append({"role": "tool", "tool_call_id": call_id, "name": "look", "content": "a result"})
        else:
            talk.append({"role": "user", "content": "And what else?"})
        second = chat(client, asked(talk))
        check(name, first, second)


def test_a_clock_in_the_system_prompt_is_named(served: Served) -> None:
    """Report 23: nothing is rewritten; what differs is said."""

    def asked(minute: int) -> dict[str, Any]:
        system = {"role": "system", "content": f"The time is 12:{minute}. " + SYSTEM}
        return {"messages": [system, {"role": "user", "content": "Hello [clock]"}], "max_tokens": 2}

    with client_of(served) as client:
        client.post("/v1/chat/completions", json=asked(10))
        second = client.post("/v1/chat/completions", json=asked(25))
        assert second.headers["x-parkd-divergence"].endswith(
            "in system is the first that differs: '25.' where '10.' was known"
        )


def test_a_resumed_sub_agent_with_another_first_line_is_its_own_conversation(served: Served) -> None:
    """Report 26: it neither takes the other one's state beyond what they share, nor costs it any."""
    lines = ("Task: read. [agent 1]", "Task: write. [agent 2]")
    with client_of(served) as client:
        firsts = [
            messages(client, claude_code(1, [{"role": "user", "content": line}]), CLAUDE_HEADERS) for line in lines
        ]
        # where they part: the fake engine's tokens are bytes and two marks of turns
        behind = len("write. [agent 2]\nassistant\n") + 2
        assert firsts[1].cached_tokens == firsts[1].prompt_tokens - behind
        for line, first in zip(lines, firsts, strict=True):
            again = messages(client, claude_code(2, [{"role": "user", "content": line}]), CLAUDE_HEADERS)
            assert again.cached_tokens == first.prompt_tokens - 1
