"""Anthropic's dialect: what a body becomes, and what the official SDK makes of the frames."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

import anthropic
import httpx2
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parkd.errors import (
    ContextOverflow,
    EngineFailure,
    InvalidRequest,
    ParkdError,
    QueueFull,
    ThreadUnsupported,
    Unauthorized,
)
from parkd.proxy.dialects.anthropic_messages import AnthropicMessages
from parkd.proxy.dialects.base import ResponseMeta
from parkd.types import (
    CacheMode,
    CacheOutcome,
    CacheReport,
    Event,
    Finished,
    FinishReason,
    Progress,
    ReasoningDelta,
    Started,
    TextDelta,
    Timings,
    ToolCallDelta,
    ToolChoiceMode,
    TurnRequest,
)

META = ResponseMeta("req_abc", "some-model", 1700000000)
REPORT = CacheReport(CacheOutcome.RESTORED_RAM, prompt_tokens=100, reused_tokens=90)
HELLO = {"max_tokens": 10, "messages": [{"role": "user", "content": "hi"}]}
LOOK = {"name": "look", "description": "Looks.", "input_schema": {"type": "object", "properties": {}}, "strict": True}


def parse(headers: Mapping[str, str] | None = None, **changes: Any) -> TurnRequest:
    return AnthropicMessages().parse(HELLO | changes, headers or {})


def finished(reason: FinishReason = FinishReason.STOP, stop_string: str | None = None) -> Finished:
    return Finished(reason, REPORT, Timings(output_tokens=7), reasoning_tokens=2, stop_string=stop_string)


ANSWER = (
    Progress(10, 100),
    Started(REPORT),
    ReasoningDelta("Let me"),
    ReasoningDelta(" see."),
    TextDelta("I lo"),
    TextDelta("ok é."),
    ToolCallDelta(0, "call_1", "look", '{"a'),
    ToolCallDelta(0, arguments='": [1]}'),
    ToolCallDelta(1, "call_2", "look", "{}"),
    finished(FinishReason.TOOL_CALLS),
)


def stream(events: Iterable[Event | ParkdError]) -> bytes:
    """The frames, a keep-alive before each event."""
    encoder = AnthropicMessages().encoder(parse(), HELLO, META)
    body = b""
    for event in events:
        body += encoder.keep_alive()
        body += b"".join(encoder.failure(event) if isinstance(event, ParkdError) else encoder.feed(event))
    return body


def sdk(body: bytes, status: int = 200, kind: str = "text/event-stream") -> anthropic.Anthropic:
    def answer(_request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(status, content=body, headers={"content-type": kind})

    client = httpx2.Client(transport=httpx2.MockTransport(answer))
    return anthropic.Anthropic(api_key="k", base_url="http://parkd", http_client=client, max_retries=0)


def accumulated(body: bytes) -> anthropic.types.Message:
    client = sdk(body)
    with client.messages.stream(max_tokens=10, model="m", messages=[{"role": "user", "content": "hi"}]) as events:
        return events.get_final_message()


def test_the_sdk_reads_an_answer_with_every_kind_of_block() -> None:
    message = accumulated(stream(ANSWER))
    thinking, text, first, second = message.content
    assert (thinking.type, thinking.thinking) == ("thinking", "Let me see.")
    assert thinking.signature
    assert (text.type, text.text) == ("text", "I look é.")
    assert (first.type, first.id, first.name, first.input) == ("tool_use", "call_1", "look", {"a": [1]})
    assert (second.type, second.id, second.input) == ("tool_use", "call_2", {})
    assert message.stop_reason == "tool_use"
    assert message.usage.input_tokens == 10
    assert message.usage.cache_read_input_tokens == 90
    assert message.usage.cache_creation_input_tokens == 0
    assert message.usage.output_tokens == 7


def test_the_document_is_what_the_stream_adds_up_to() -> None:
    encoder = AnthropicMessages().encoder(parse(), HELLO, META)
    for event in ANSWER:
        list(encoder.feed(event))
    document = encoder.document()
    whole, streamed = anthropic.types.Message.model_validate(document), accumulated(stream(ANSWER))
    assert whole.to_dict(exclude_none=True) == streamed.to_dict(exclude_none=True)
    assert document["id"] == "msg_abc"


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ('{"a": "\\ud800x"}', {"a": "\ufffdx"}),
        ('{"a": 123456789012345678901234567890}', {"a": 123456789012345678901234567890.0}),
        ('{"a": 1e999}', {}),
        ('{"a": ', {}),
        ("", {}),
    ],
)
def test_any_arguments_can_be_written_as_a_document(written: str, value: Any) -> None:
    encoder = AnthropicMessages().encoder(parse(), HELLO, META)
    for event in (Started(REPORT), ToolCallDelta(0, "call_1", "look", written), finished(FinishReason.TOOL_CALLS)):
        list(encoder.feed(event))
    assert json.loads(orjson.dumps(encoder.document()))["content"][0]["input"] == value


def frames(body: bytes) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for block in body.decode().removesuffix("\n\n").split("\n\n"):
        event, data = block.split("\n")
        assert event.startswith("event: ")
        assert data.startswith("data: ")
        found.append((event[7:], json.loads(data[6:])))
    return found


def test_frames_come_in_the_order_clients_check() -> None:
    shown = [(name, data.get("index")) for name, data in frames(stream(ANSWER)) if name != "ping"]
    assert shown == [
        ("message_start", None),
        ("content_block_start", 0),
        ("content_block_delta", 0),
        ("content_block_delta", 0),
        ("content_block_delta", 0),
        ("content_block_stop", 0),
        ("content_block_start", 1),
        ("content_block_delta", 1),
        ("content_block_delta", 1),
        ("content_block_stop", 1),
        ("content_block_start", 2),
        ("content_block_delta", 2),
        ("content_block_delta", 2),
        ("content_block_stop", 2),
        ("content_block_start", 3),
        ("content_block_delta", 3),
        ("content_block_stop", 3),
        ("message_delta", None),
        ("message_stop", None),
    ]


def test_usage_is_complete_from_the_first_frame() -> None:
    by_name = dict(frames(stream(ANSWER)))
    start, end = by_name["message_start"]["message"]["usage"], by_name["message_delta"]["usage"]
    assert start == {
        "input_tokens": 10,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 90,
        "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
        "output_tokens": 0,
    }
    assert end == start | {"output_tokens": 7, "output_tokens_details": {"thinking_tokens": 2}}


@pytest.mark.parametrize(("ttl", "five_minutes", "hour"), [({}, 7, 0), ({"ttl": "5m"}, 7, 0), ({"ttl": "1h"}, 0, 7)])
def test_tokens_read_count_as_written_where_the_request_asks_for_a_cache(
    ttl: dict[str, str], five_minutes: int, hour: int
) -> None:
    hint = {"type": "ephemeral", **ttl}
    body = {**HELLO, "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": hint}]}]}
    dialect = AnthropicMessages()
    encoder = dialect.encoder(dialect.parse(body, {}), body, META)
    report = dataclasses.replace(REPORT, written_tokens=7)
    data = b"".join(encoder.feed(Started(report)))
    usage = dict(frames(data))["message_start"]["message"]["usage"]
    assert (usage["input_tokens"], usage["cache_creation_input_tokens"], usage["cache_read_input_tokens"]) == (3, 7, 90)
    assert usage["cache_creation"] == {"ephemeral_5m_input_tokens": five_minutes, "ephemeral_1h_input_tokens": hour}


@pytest.mark.parametrize(
    ("last", "reason", "sequence"),
    [
        (finished(), "end_turn", None),
        (finished(FinishReason.LENGTH), "max_tokens", None),
        (finished(stop_string="END"), "stop_sequence", "END"),
        (finished(FinishReason.TOOL_CALLS), "tool_use", None),
    ],
)
def test_stop_reasons(last: Finished, reason: str, sequence: str | None) -> None:
    message = accumulated(stream([Started(REPORT), TextDelta("x"), last]))
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)


def test_an_error_inside_a_stream_reaches_the_sdk() -> None:
    with pytest.raises(anthropic.APIStatusError, match="engine broke"):
        accumulated(stream([Started(REPORT), TextDelta("x"), EngineFailure("engine broke")]))


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (InvalidRequest("no"), 400, "invalid_request_error"),
        (Unauthorized("no"), 401, "authentication_error"),
        (QueueFull("no", retry_after_s=3), 529, "overloaded_error"),
        (EngineFailure("no"), 500, "api_error"),
    ],
)
def test_errors_before_an_answer(error: ParkdError, status: int, kind: str) -> None:
    answer = AnthropicMessages().error(error, "req_abc")
    assert answer.status == status
    assert answer.body == {"type": "error", "error": {"type": kind, "message": "no"}, "request_id": "req_abc"}
    assert answer.headers.get("retry-after") == ("3" if status == 529 else None)


def test_overflow_is_worded_as_agents_parse_it() -> None:
    def worded(error: ContextOverflow) -> str:
        return str(AnthropicMessages().error(error, "r").body["error"]["message"])

    limit = worded(ContextOverflow(900, 200, 1000))
    assert limit == "input length and `max_tokens` exceed context limit: 900 + 200 > 1000"
    assert worded(ContextOverflow(1000, 1, 1000)) == "prompt is too long: 1000 tokens > 999 maximum"
    assert worded(ContextOverflow(1200, 200, 1000)) == "prompt is too long: 1200 tokens > 999 maximum"


def test_a_body_as_an_agent_sends_it() -> None:
    request = parse(
        model="some-model",
        stream=True,
        system=[
            {"type": "text", "text": "Be brief."},
            {"type": "text", "text": "Rules.", "cache_control": {"type": "ephemeral"}},
        ],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "system", "content": "Now in plan mode."},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "t1", "name": "look", "input": {"a": 1}},
                    {"type": "tool_use", "id": "t2", "name": "look", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": "one"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "t2",
                        "content": [{"type": "text", "text": "two"}],
                        "is_error": True,
                    },
                    {"type": "text", "text": "go on", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
                ],
            },
        ],
        tools=[LOOK, {"type": "web_search_20250305", "name": "web_search"}],
        thinking={"type": "enabled", "budget_tokens": 2048},
        output_config={"effort": "high"},
        context_management={"edits": []},
        metadata={"user_id": "u"},
        some_future_field=[1],
        stop_sequences=["END", ""],
        top_k=5,
    )

    def text(words: str) -> list[dict[str, str]]:
        return [{"type": "text", "text": words}]

    def call(call_id: str, arguments: dict[str, Any]) -> dict[str, Any]:
        return {"id": call_id, "type": "function", "function": {"name": "look", "arguments": arguments}}

    assert request.messages == [
        {"role": "system", "content": text("Be brief.") + text("Rules.")},
        {"role": "user", "content": text("hi")},
        {"role": "system", "content": "Now in plan mode."},
        {
            "role": "assistant",
            "content": text("I look."),
            "reasoning_content": "Hm.",
            "tool_calls": [call("t1", {"a": 1}), call("t2", {})],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "one"},
        {"role": "tool", "tool_call_id": "t2", "content": text("two")},
        {"role": "user", "content": text("go on")},
    ]
    function = {"name": "look", "description": "Looks.", "parameters": LOOK["input_schema"]}
    assert request.tools == [{"type": "function", "function": function}]
    assert request.template_kwargs == {"enable_thinking": True, "reasoning_effort": "high", "thinking_budget": 2048}
    assert (request.reasoning.effort, request.reasoning.budget_tokens) == ("high", 2048)
    assert (request.stop, request.sampling.top_k, request.max_output_tokens) == (("END",), 5, 10)
    assert request.cache.min_retention_s == 3600
    assert request.stream


def test_text_is_read_wherever_a_block_holds_it() -> None:
    held = [{"type": "text", "text": "held"}]
    blocks = [
        {"type": "compaction", "content": "What was."},
        {"type": "search_result", "title": "T", "source": "s", "content": held},
        {"type": "document", "source": {"type": "content", "content": held}},
        {"type": "document", "source": {"type": "content", "content": "whole"}},
        {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "search_result", "content": held}]},
    ]
    said, result = parse(messages=[{"role": "user", "content": blocks}]).messages
    assert [part["text"] for part in said["content"]] == ["What was.", "T\ns", "held", "held", "whole"]
    assert [part["text"] for part in result["content"]] == ["\n", "held"]


def test_a_client_that_sends_new_messages_only_is_told_so_that_its_sdk_sends_all() -> None:
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
        with pytest.raises(ThreadUnsupported, match="history") as caught:
            parse(thread=thread)
        document = AnthropicMessages().error(caught.value, "req_1")
        assert document.status == 400
        assert document.body["error"]["details"] == {"error_code": "thread_unsupported_request"}


def test_counting_takes_the_same_prompt_without_a_limit() -> None:
    body = {name: value for name, value in HELLO.items() if name != "max_tokens"}
    count = AnthropicMessages().parse_count(body, {})
    assert count.max_output_tokens is None
    assert count.messages == parse().messages


def test_no_output_means_prewarming() -> None:
    assert parse(max_tokens=0).max_output_tokens == 0


@pytest.mark.parametrize(
    ("choice", "mode", "name", "parallel"),
    [
        (None, ToolChoiceMode.AUTO, None, True),
        ({"type": "any", "disable_parallel_tool_use": True}, ToolChoiceMode.REQUIRED, None, False),
        ({"type": "none"}, ToolChoiceMode.NONE, None, True),
        ({"type": "tool", "name": "look"}, ToolChoiceMode.NAMED, "look", True),
    ],
)
def test_tool_choice(choice: Any, mode: ToolChoiceMode, name: str | None, parallel: bool) -> None:
    request = parse(tools=[LOOK], tool_choice=choice)
    assert (request.tool_choice.mode, request.tool_choice.name) == (mode, name)
    assert request.parallel_tool_calls is parallel


def test_structured_output_and_its_older_name() -> None:
    schema = {"type": "object"}
    wanted = {"type": "json_schema", "schema": schema}
    assert parse(output_config={"format": wanted}).response_schema == schema
    assert parse(output_format=wanted).response_schema == schema
    assert parse().response_schema is None


def test_the_cache_mode_comes_from_the_header_or_the_body() -> None:
    assert parse({"x-parkd-cache-mode": "read"}, cache_prompt=False).cache.mode is CacheMode.READ
    assert parse(cache_prompt=False).cache.mode is CacheMode.OFF
    assert parse().cache.mode is CacheMode.USE


EMPTY = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [EMPTY]}]}, "messages[0].content[0].source.data"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [EMPTY]}]}]},
            "messages[0].content[0].content[0].source.data",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages[0].content[0].text"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": {}}]}]},
            "messages[0].content[0].name",
        ),
        ({"tool_choice": {"type": "tool", "name": "gone"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "maybe"}}, "tool_choice.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"stream": "yes"}, "stream"),
        ({"compaction": {"type": "summarize"}}, "compaction"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(**changes)
    assert caught.value.param == param


NAMES = (
    "type", "text", "role", "content", "name", "input", "id", "tool_use_id", "source", "data", "thinking", "ttl",
    "cache_control", "input_schema", "budget_tokens", "format", "schema", "effort", "tool_name",
)  # fmt: skip
WORDS = st.sampled_from(
    ["text", "tool_use", "tool_result", "thinking", "image", "document", "user", "assistant", "system", "json_schema",
     "tool", "any", "ephemeral", "1h", "look", "", "tool_reference"]
)  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**70) | st.floats() | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=5),
    max_leaves=15,
)
FIELDS = (
    "messages", "system", "tools", "tool_choice", "thinking", "output_config", "output_format", "max_tokens", "model",
    "stream", "stop_sequences", "temperature", "top_p", "top_k", "cache_control", "metadata", "cache_prompt",
    "prompt_cache_key", "chat_template_kwargs", "logit_bias", "seed",
)  # fmt: skip
BLOCKS = st.lists(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=5), max_size=3)


@settings(max_examples=80, deadline=None)
@given(
    st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=6),
    st.lists(st.fixed_dictionaries({"role": WORDS, "content": BLOCKS | WORDS}), min_size=1, max_size=3),
)
def test_only_invalid_request_is_raised(fields: dict[str, Any], messages: list[Any]) -> None:
    for body in (fields, HELLO | fields, HELLO | fields | {"messages": messages}):
        try:
            request = AnthropicMessages().parse(body, {})
        except InvalidRequest:
            continue
        assert request.messages
        AnthropicMessages().encoder(request, body, META)
