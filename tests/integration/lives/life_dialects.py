"""How a client of each dialect sends the same turn, and what it makes of the answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jiter

from tests.clients import said
from tests.clients.said import Said
from tests.integration.api.api_harness import Messages, body_of

if TYPE_CHECKING:
    from tests.integration.lives.life_talks import Ask

Body = dict[str, Any]
TOOL_TEXT = "Looks."
ENDS = ("stop", "stop string", "length", "calls")


@dataclass(frozen=True)
class Expected:
    """An answer, in no dialect's words."""

    text: str
    ended: str
    """One of `ENDS`."""
    thinking: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    """Name, and arguments as far as they were written."""


@dataclass(frozen=True)
class Dialect:
    path: str
    body: Callable[[Ask], Body]
    from_stream: Callable[[bytes], Said]
    from_document: Callable[[Mapping[str, Any]], Said]
    ends: tuple[str, str, str, str]
    """Its words for `ENDS`."""
    arguments: Callable[[str], Any]
    """What it gives of a call's arguments; None: it leaves the call out."""
    reused: Callable[[Mapping[str, Any]], int | None]
    """Tokens that were not read, by a whole answer; None: it does not say."""
    has_budgets: bool = True

    def said(self, expected: Expected) -> Said:
        """That answer, as a client of this dialect has it."""
        given = [(name, self.arguments(arguments)) for name, arguments in expected.calls]
        calls = [(name, arguments) for name, arguments in given if arguments is not None]
        return expected.thinking, expected.text, calls, self.ends[ENDS.index(expected.ended)]


def chat(ask: Ask) -> Body:
    body = body_of(ask.messages, ask.max_tokens, stream=ask.streams, **_steering(ask))
    if ask.stop:
        body["stop"] = ask.stop
    if ask.budget is not None:
        body["thinking_budget"] = ask.budget
    if ask.tools:
        tools = [{"name": name, "description": TOOL_TEXT, "parameters": schema} for name, schema in ask.tools.items()]
        body["tools"] = [{"type": "function", "function": tool} for tool in tools]
    return body


def responses(ask: Ask) -> Body:
    body: Body = {"input": _items(ask.messages), "max_output_tokens": ask.max_tokens, **_common(ask)}
    if ask.stop:
        body["stop"] = [ask.stop]
    if ask.budget is not None:
        body["reasoning"] = {"max_tokens": ask.budget}
    if ask.tools:
        tools = [{"name": name, "description": TOOL_TEXT, "parameters": schema} for name, schema in ask.tools.items()]
        body["tools"] = [{"type": "function", **tool} for tool in tools]
    return body


def messages(ask: Ask) -> Body:
    body: Body = {"messages": [], "max_tokens": ask.max_tokens, **_common(ask)}
    results: list[Any] = []
    for message in ask.messages:
        role, content = message["role"], message["content"]
        if role == "system":
            body["system"] = content
        elif role == "tool":
            results.append({"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": content})
        elif role == "assistant":
            body["messages"].append({"role": role, "content": _blocks(message)})
        else:
            blocks = [*results, {"type": "text", "text": content}]
            body["messages"].append({"role": role, "content": blocks if results else content})
            results = []
    if ask.stop:
        body["stop_sequences"] = [ask.stop]
    if ask.budget is not None:
        body["thinking"] = {"type": "enabled", "budget_tokens": ask.budget}
    if ask.tools:
        body["tools"] = [
            {"name": name, "description": TOOL_TEXT, "input_schema": schema} for name, schema in ask.tools.items()
        ]
    return body


def ollama(ask: Ask) -> Body:
    options: Body = {"num_predict": ask.max_tokens, "temperature": 0}
    if ask.stop:
        options["stop"] = [ask.stop]
    given = []
    for message in ask.messages:
        calls = [
            {"function": {**call["function"], "arguments": jiter.from_json(arguments.encode(), partial_mode=True)}}
            for call in message.get("tool_calls", ())
            for arguments in [call["function"]["arguments"]]
        ]
        more: Body = {"tool_calls": calls} if calls else {}
        if message["role"] == "tool":
            more["tool_name"] = message["name"]
        if thinking := message.get("reasoning_content"):
            more["thinking"] = thinking
        given.append({"role": message["role"], "content": message["content"], **more})
    common = _common(ask)
    del common["temperature"]
    body: Body = {"messages": given, "options": options, **common}
    if ask.tools:
        body["tools"] = chat(ask)["tools"]
    return body


def _common(ask: Ask) -> Body:
    return {"model": "any", "temperature": 0, "stream": ask.streams, **_steering(ask)}


def _steering(ask: Ask) -> Body:
    return {} if ask.steering is None else {"steering": ask.steering}


def _items(given: Messages) -> list[Body]:
    items: list[Body] = []
    for message in given:
        if message["role"] == "tool":
            call_id = message["tool_call_id"]
            items.append({"type": "function_call_output", "call_id": call_id, "output": message["content"]})
            continue
        if thinking := message.get("reasoning_content"):
            content = [{"type": "reasoning_text", "text": thinking}]
            items.append({"type": "reasoning", "summary": [], "content": content})
        items.append({"type": "message", "role": message["role"], "content": message["content"]})
        calls = message.get("tool_calls", ())
        items += [{"type": "function_call", "call_id": call["id"], **call["function"]} for call in calls]
    return items


def _blocks(message: Mapping[str, Any]) -> str | list[Body]:
    thinking, calls = message.get("reasoning_content"), message.get("tool_calls", ())
    if not thinking and not calls:
        content: str = message["content"]
        return content
    blocks: list[Body] = [{"type": "thinking", "thinking": thinking, "signature": "parkd"}] if thinking else []
    if message["content"]:
        blocks.append({"type": "text", "text": message["content"]})
    for call in calls:
        value = _partly(call["function"]["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": value})
    return blocks


def _partly(arguments: str) -> Any:
    """What is whole of arguments that may be cut."""
    return jiter.from_json((arguments or "{}").encode(), partial_mode=True)


def _wholly(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return None


DIALECTS = {
    "chat": Dialect(
        "/v1/chat/completions",
        chat,
        said.chat_stream,
        said.chat_document,
        ("stop", "stop", "length", "tool_calls"),
        str,
        lambda told: int(told["usage"]["prompt_tokens_details"]["cached_tokens"]),
    ),
    "responses": Dialect(
        "/v1/responses",
        responses,
        said.responses_stream,
        said.responses_document,
        ("completed", "completed", "incomplete", "completed"),
        str,
        lambda told: int(told["usage"]["input_tokens_details"]["cached_tokens"]),
    ),
    "messages": Dialect(
        "/v1/messages",
        messages,
        said.messages_stream,
        said.messages_document,
        ("end_turn", "stop_sequence", "max_tokens", "tool_use"),
        _partly,
        lambda told: int(told["usage"]["cache_read_input_tokens"]),
    ),
    "ollama": Dialect(
        "/api/chat",
        ollama,
        said.ollama_stream,
        said.ollama_document,
        ("stop", "stop", "length", "stop"),
        _wholly,
        lambda _told: None,
        has_budgets=False,
    ),
}
