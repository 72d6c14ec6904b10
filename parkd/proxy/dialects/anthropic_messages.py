"""Anthropic's messages API: request bodies to turns. `anthropic_stream` encodes the answers.

Unknown fields, and blocks and tools of unknown types, are ignored: agents send new ones before servers support them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from parkd.errors import InvalidRequest, ParkdError, QueueFull, ThreadUnsupported
from parkd.proxy.dialects import fields
from parkd.proxy.dialects.anthropic_errors import error_document, error_status
from parkd.proxy.dialects.anthropic_stream import MessagesEncoder
from parkd.proxy.dialects.base import Encoder, ErrorAnswer, ResponseMeta, TurnDialect
from parkd.proxy.dialects.nested import (
    Form,
    asked_form,
    cache_hints,
    check_named,
    continues,
    function_tool,
    image_part,
    name_at,
    object_at,
    objects,
    strict_names,
    text_at,
    wrong,
)
from parkd.proxy.dialects.thinking import reasoning_of, template_words
from parkd.types import ToolChoice, ToolChoiceMode, TurnRequest

CACHE_TTL_S = {"5m": 300.0, "1h": 3600.0}

CHOICES = {
    "auto": ToolChoiceMode.AUTO,
    "any": ToolChoiceMode.REQUIRED,
    "none": ToolChoiceMode.NONE,
    "tool": ToolChoiceMode.NAMED,
}


class AnthropicMessages(TurnDialect):
    """`POST /v1/messages`; `parse_count` is for `/v1/messages/count_tokens`."""

    def parse(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> TurnRequest:
        max_tokens = fields.whole(body, "max_tokens", 0, fields.MAX_TOKENS)
        if max_tokens is None:
            raise InvalidRequest("`max_tokens` is missing. Say how many tokens may be generated.", param="max_tokens")
        if body.get("compaction"):
            advice = "Ask for a summary in a message, and send it in place of what it sums up."
            raise InvalidRequest(f"`compaction` is not supported. {advice}", param="compaction")
        return dataclasses.replace(self.parse_count(body, headers), max_output_tokens=max_tokens)

    def parse_count(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> TurnRequest:
        """The same turn without an output limit: only the prompt is counted."""
        if body.get("thread"):
            raise ThreadUnsupported(
                "`thread` cannot be used: this server keeps no messages. Send the whole history in `messages`.",
                param="thread",
            )
        messages = [*_system(body), *_messages(body)]
        if not body.get("messages"):
            raise InvalidRequest("`messages` is missing or empty. Send at least one message.", param="messages")
        config = fields.obj(body, "output_config")
        fields.obj(body, "thinking")
        reasoning = reasoning_of(body, text_at(config, "effort", "output_config") or None)
        tools = _tools(body)
        choice, parallel = _tool_choice(body, tools)
        form = _form(body, config)
        return TurnRequest(
            messages=messages,
            tools=tools,
            template_kwargs=template_words(body, reasoning),
            sampling=fields.sampling(body),
            stop=fields.stop_strings(body, "stop_sequences"),
            stream=fields.flag(body, "stream", default=False),
            model=fields.text(body, "model"),
            tool_choice=choice,
            strict_tools=strict_names((tool.get("name", ""), tool) for tool in fields.items(body, "tools")),
            parallel_tool_calls=parallel,
            response_schema=form[0],
            response_form=form[1],
            reasoning=reasoning,
            cache=cache_hints(body, headers, min_retention_s=_longest_ttl_s(body)),
            continues=continues(messages, choice, form),
            steering=fields.steering(body),
            adapters=fields.adapters(body),
        )

    def encoder(self, request: TurnRequest, body: Mapping[str, Any], meta: ResponseMeta) -> Encoder:  # noqa: ARG002
        return MessagesEncoder(meta, writes_for_s=request.cache.min_retention_s)

    def error(self, error: ParkdError, request_id: str) -> ErrorAnswer:
        headers = {"retry-after": str(error.retry_after_s)} if isinstance(error, QueueFull) else {}
        return ErrorAnswer(error_status(error), error_document(error, request_id), headers)


def _system(body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    system = body.get("system")
    if isinstance(system, str):
        if system:
            yield {"role": "system", "content": system}
    elif system is not None:
        parts = _shown(objects(system, "system"), "system")
        if parts:
            yield {"role": "system", "content": parts}


def _messages(body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for index, message in enumerate(objects(body.get("messages"), "messages")):
        path = f"messages[{index}]"
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise wrong(f"{path}.role", "`user`, `assistant` or `system`")
        if isinstance(content, str):
            yield {"role": role, "content": content}
            continue
        if not isinstance(content, list):
            raise wrong(f"{path}.content", "a string or an array of blocks")
        blocks = objects(content, f"{path}.content")
        if role == "assistant":
            yield _assistant(blocks, path)
        else:
            yield from _said(role, blocks, path)


def _assistant(blocks: Sequence[Mapping[str, Any]], path: str) -> Mapping[str, Any]:
    """One assistant message in the form that chat templates expect: its text, thinking and tool calls."""
    thinking: list[str] = []
    calls: list[Mapping[str, Any]] = []
    for index, block in enumerate(blocks):
        place = f"{path}.content[{index}]"
        if block.get("type") == "thinking":
            thinking.append(text_at(block, "thinking", place))
        elif block.get("type") == "tool_use":
            function = {"name": name_at(block, "name", place), "arguments": object_at(block, "input", place)}
            calls.append({"id": text_at(block, "id", place), "type": "function", "function": function})
    message: dict[str, Any] = {"role": "assistant", "content": _shown(blocks, f"{path}.content")}
    if any(thinking):
        message["reasoning_content"] = "\n".join(thinking)
    if calls:
        message["tool_calls"] = calls
    return message


def _said(role: str, blocks: Sequence[Mapping[str, Any]], path: str) -> Iterator[Mapping[str, Any]]:
    """The messages for a user message's blocks, in order. Each tool result is a message of its own."""
    shown: list[Mapping[str, Any]] = []
    for index, block in enumerate(blocks):
        place = f"{path}.content[{index}]"
        if block.get("type") != "tool_result":
            shown.append(block)
            continue
        if parts := _shown(shown, f"{path}.content"):
            yield {"role": role, "content": parts}
        shown = []
        content = block.get("content")
        if not isinstance(content, str):
            content = _inner(block, place)
        yield {"role": "tool", "tool_call_id": text_at(block, "tool_use_id", place), "content": content}
    parts = _shown(shown, f"{path}.content")
    if parts or not any(block.get("type") == "tool_result" for block in blocks):
        yield {"role": role, "content": parts}


def _shown(blocks: Sequence[Mapping[str, Any]], path: str) -> list[Mapping[str, Any]]:
    """The text and images of the blocks. Raises InvalidRequest for files, since ignoring them would change the
    question."""
    parts: list[Mapping[str, Any]] = []
    for index, block in enumerate(blocks):
        kind, place = block.get("type"), f"{path}[{index}]"
        source = block.get("source")
        if kind == "text":
            text = text_at(block, "text", place)
        elif kind == "document" and isinstance(source, Mapping) and source.get("type") == "text":
            text = text_at(source, "data", f"{place}.source")
        elif kind == "document" and isinstance(source, Mapping) and source.get("type") == "content":
            parts += _inner(source, f"{place}.source")
            continue
        elif kind == "search_result":
            text = f"{text_at(block, 'title', place)}\n{text_at(block, 'source', place)}"
            parts += ({"type": "text", "text": text}, *_inner(block, place))
            continue
        elif kind == "compaction":
            text = text_at(block, "content", place)
        elif kind == "tool_reference":
            text = text_at(block, "tool_name", place)
        elif kind == "image":
            parts.append(image_part(block, place))
            continue
        elif kind == "document":
            raise InvalidRequest(f"`{place}`: this server takes text and images. Leave the {kind} out.", param=place)
        else:
            continue
        parts.append({"type": "text", "text": text})
    return parts


def _inner(holder: Mapping[str, Any], path: str) -> list[Mapping[str, Any]]:
    """The text and images of `content`, which is a string or blocks."""
    content, place = holder.get("content"), f"{path}.content"
    return [{"type": "text", "text": content}] if isinstance(content, str) else _shown(objects(content, place), place)


def _tools(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Tools that the client runs, in the form that templates expect. Those of Anthropic's servers have no schema."""
    tools: list[Mapping[str, Any]] = []
    for index, tool in enumerate(objects(body.get("tools"), "tools")):
        if "input_schema" in tool:
            path = f"tools[{index}]"
            tools.append(function_tool(name_at(tool, "name", path), tool, "input_schema", path))
    return tools


def _tool_choice(body: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> tuple[ToolChoice, bool]:
    """The choice, and whether parallel calls are allowed."""
    choice = fields.obj(body, "tool_choice")
    kind = text_at(choice, "type", "tool_choice") or "auto"
    if kind not in CHOICES:
        raise wrong("tool_choice.type", "`auto`, `any`, `tool` or `none`")
    name = name_at(choice, "name", "tool_choice") if kind == "tool" else None
    if name is not None:
        check_named(name, tools, "tool_choice.name")
    return ToolChoice(CHOICES[kind], name), not choice.get("disable_parallel_tool_use")


def _form(body: Mapping[str, Any], config: Mapping[str, Any]) -> Form:
    """The form in `output_config.format`, or in its older name `output_format`."""
    wanted = object_at(config, "format", "output_config")
    if wanted:
        return asked_form(body, wanted, "output_config.format")
    return asked_form(body, fields.obj(body, "output_format"), "output_format")


def _longest_ttl_s(body: Mapping[str, Any]) -> float | None:
    """The longest ttl, in seconds, of all `cache_control` fields in the prompt; None without one."""
    holders: list[Any] = [body, *fields.items(body, "tools")]
    if isinstance(body.get("system"), list):
        holders += body["system"]
    for message in objects(body.get("messages"), "messages"):
        if isinstance(message.get("content"), list):
            holders += message["content"]
    hints = [holder.get("cache_control") for holder in holders if isinstance(holder, Mapping)]
    ttls = [CACHE_TTL_S.get(str(hint.get("ttl", "5m"))) for hint in hints if isinstance(hint, Mapping)]
    return max((ttl for ttl in ttls if ttl is not None), default=None)
