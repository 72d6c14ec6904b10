"""The Responses dialect: what a body becomes, and what the official SDK makes of the frames."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import httpx2
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parkd.errors import ContextOverflow, InvalidRequest, ParkdError
from parkd.proxy.dialects.base import ResponseMeta
from parkd.proxy.dialects.openai_responses import OpenAIResponses
from parkd.proxy.dialects.progress_summaries import MOST
from parkd.proxy.dialects.responses_stream import opened_reasoning, sealed_reasoning
from parkd.types import (
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
REPORT = CacheReport(CacheOutcome.LIVE, prompt_tokens=100, reused_tokens=90)
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}
SPACE = {"type": "namespace", "name": "mcp__files", "tools": [{"type": "function", "name": "read"}]}
BODY = {"input": "hi", "stream": True, "tools": [LOOK, SPACE, {"type": "web_search"}]}


def parse(**changes: Any) -> TurnRequest:
    return OpenAIResponses().parse(BODY | changes, {})


def finished(reason: FinishReason = FinishReason.STOP) -> Finished:
    return Finished(reason, REPORT, Timings(output_tokens=7), reasoning_tokens=2)


ANSWER = (
    Progress(10, 100),
    Started(REPORT),
    ReasoningDelta("Let me"),
    ReasoningDelta(" see."),
    TextDelta("I lo"),
    TextDelta("ok é."),
    ToolCallDelta(0, "call_1", "look", '{"a'),
    ToolCallDelta(0, arguments='": [1]}'),
    ToolCallDelta(1, "call_2", "mcp__files__read", "{}"),
    finished(FinishReason.TOOL_CALLS),
)


def encoded(events: Iterable[Event | ParkdError], *, keep_alives: bool = True, **changes: Any) -> bytes:
    encoder = OpenAIResponses().encoder(parse(**changes), BODY | changes, META)
    body = b""
    for event in events:
        body += encoder.keep_alive() if keep_alives else b""
        body += b"".join(encoder.failure(event) if isinstance(event, ParkdError) else encoder.feed(event))
    return body


def frames(body: bytes) -> list[dict[str, Any]]:
    found = []
    for block in body.decode().removesuffix("\n\n").split("\n\n"):
        event, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert event == f"event: {found[-1]['type']}"
    return found


def accumulated(body: bytes) -> Any:
    def answer(_request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, content=body, headers={"content-type": "text/event-stream"})

    http = httpx2.Client(transport=httpx2.MockTransport(answer))
    client = openai.OpenAI(api_key="k", base_url="http://parkd/v1", http_client=http, max_retries=0)
    with client.responses.stream(model="m", input="hi") as events:
        for _ in events:
            pass
        return events.get_final_response()


def test_the_sdk_reads_an_answer_with_every_kind_of_item() -> None:
    response = accumulated(encoded(ANSWER))
    reasoning, message, first, second = response.output
    assert reasoning.content[0].text == "Let me see."
    assert response.output_text == message.content[0].text == "I look é."
    assert (first.call_id, first.name, first.arguments) == ("call_1", "look", '{"a": [1]}')
    assert (second.call_id, second.namespace, second.name) == ("call_2", "mcp__files", "read")
    assert (response.status, response.id) == ("completed", "resp_abc")
    assert response.usage.input_tokens == 100
    assert response.usage.input_tokens_details.cached_tokens == 90
    assert response.usage.output_tokens_details.reasoning_tokens == 2


def test_the_document_is_what_the_stream_ends_with() -> None:
    encoder = OpenAIResponses().encoder(parse(), BODY, META)
    last = [frame for event in ANSWER for frame in encoder.feed(event)][-1]
    assert frames(last)[0]["response"] == encoder.document()
    assert encoder.document()["tools"] == BODY["tools"]


def test_frames_come_in_the_order_clients_check() -> None:
    shown = frames(encoded(ANSWER, keep_alives=False))
    assert [frame["sequence_number"] for frame in shown] == list(range(len(shown)))
    kinds = [(frame["type"].removeprefix("response."), frame.get("output_index")) for frame in shown]
    assert kinds == [
        ("created", None),
        ("in_progress", None),
        ("output_item.added", 0),
        ("content_part.added", 0),
        ("reasoning_text.delta", 0),
        ("reasoning_text.delta", 0),
        ("reasoning_text.done", 0),
        ("content_part.done", 0),
        ("output_item.done", 0),
        ("output_item.added", 1),
        ("content_part.added", 1),
        ("output_text.delta", 1),
        ("output_text.delta", 1),
        ("output_text.done", 1),
        ("content_part.done", 1),
        ("output_item.done", 1),
        ("output_item.added", 2),
        ("function_call_arguments.delta", 2),
        ("function_call_arguments.delta", 2),
        ("function_call_arguments.done", 2),
        ("output_item.done", 2),
        ("output_item.added", 3),
        ("function_call_arguments.delta", 3),
        ("function_call_arguments.done", 3),
        ("output_item.done", 3),
        ("completed", None),
    ]
    added = [frame["item"] for frame in shown if frame["type"] == "response.output_item.added"]
    assert all(item["status"] == "in_progress" for item in added)


def test_a_keep_alive_is_data_and_never_comes_before_created() -> None:
    encoder = OpenAIResponses().encoder(parse(), BODY, META)
    kinds = [frame["type"] for frame in frames(encoder.keep_alive() + encoder.keep_alive())]
    assert kinds == ["response.created", "response.in_progress", "response.in_progress"]
    assert not list(encoder.feed(Started(REPORT)))


def test_an_answer_cut_by_the_limit_is_incomplete() -> None:
    last = frames(encoded([Started(REPORT), TextDelta("x"), finished(FinishReason.LENGTH)]))[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize("before", [[], [Started(REPORT), TextDelta("x")]])
def test_a_failure_is_the_last_frame_with_its_code(before: list[Event]) -> None:
    shown = frames(encoded([*before, ContextOverflow(90, 20, 100)], keep_alives=False))
    assert shown[0]["type"] == "response.created"
    assert shown[-1]["type"] == "response.failed"
    assert shown[-1]["response"]["status"] == "failed"
    assert shown[-1]["response"]["error"]["code"] == "context_length_exceeded"


def test_a_body_as_an_agent_sends_it() -> None:
    request = parse(
        instructions="Be brief.",
        input=[
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Rules."}]},
            {"role": "user", "content": "hi"},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"a":1}'},
            {"type": "function_call", "call_id": "c2", "name": "read", "namespace": "mcp__files", "arguments": "{}"},
            {"type": "web_search_call", "id": "w"},
            {"type": "function_call_output", "call_id": "c1", "output": "one"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
            {"type": "reasoning", "summary": [], "encrypted_content": sealed_reasoning("Again é.")},
            {"type": "function_call", "call_id": "c3", "name": "look", "arguments": "{}"},
            {"type": "reasoning", "summary": [], "encrypted_content": "of another server"},
            {"type": "message", "role": "assistant", "content": "Done."},
            {"type": "message", "role": "assistant", "content": "Really."},
        ],
        store=False,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="k",
        reasoning={"effort": "low", "summary": "auto"},
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
        parallel_tool_calls=False,
        max_output_tokens=9,
    )

    def call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}

    assert request.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": [{"type": "text", "text": "Rules."}]},
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "I look."}],
            "reasoning_content": "Hm.",
            "tool_calls": [call("c1", "look", '{"a":1}'), call("c2", "mcp__files__read", "{}")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "two"}]},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Again é.",
            "tool_calls": [call("c3", "look", "{}")],
        },
        {"role": "assistant", "content": "Done."},
        {"role": "assistant", "content": "Really."},
    ]
    assert [tool["function"]["name"] for tool in request.tools] == ["look", "mcp__files__read"]
    assert request.response_schema == {"type": "object"}
    assert request.template_kwargs == {"reasoning_effort": "low"}
    assert (request.cache.group, request.max_output_tokens, request.parallel_tool_calls) == ("k", 9, False)


def test_tools_that_an_item_adds_are_tools() -> None:
    added = {"type": "additional_tools", "role": "developer", "tools": [{"type": "function", "name": "late"}]}
    request = parse(input=[{"role": "user", "content": "hi"}, added], tool_choice={"type": "function", "name": "late"})
    assert [tool["function"]["name"] for tool in request.tools][-1] == "late"
    assert len(request.messages) == 1


def test_prewarming_generates_nothing() -> None:
    assert parse(prompt_cache_options={"prewarm": True}, max_output_tokens=50).max_output_tokens == 0
    assert parse(prompt_cache_options={"prewarm": False}, max_output_tokens=50).max_output_tokens == 50


def test_reasoning_survives_a_client_that_keeps_it_sealed() -> None:
    changes = {"include": ["reasoning.encrypted_content"]}
    items = frames(encoded([Started(REPORT), ReasoningDelta("Hm é."), finished()], **changes))[-1]["response"]["output"]
    assert opened_reasoning(items[0]["encrypted_content"]) == "Hm é."
    again = parse(input=[{"type": "reasoning", "summary": [], "encrypted_content": items[0]["encrypted_content"]}])
    assert again.messages[0]["reasoning_content"] == "Hm é."
    plain = frames(encoded([Started(REPORT), ReasoningDelta("Hm é."), finished()]))[-1]["response"]["output"]
    assert "encrypted_content" not in plain[0]


@pytest.mark.parametrize(
    ("choice", "mode", "name"),
    [
        (None, ToolChoiceMode.AUTO, None),
        ("required", ToolChoiceMode.REQUIRED, None),
        ({"type": "function", "name": "look"}, ToolChoiceMode.NAMED, "look"),
        ({"type": "function", "namespace": "mcp__files", "name": "read"}, ToolChoiceMode.NAMED, "mcp__files__read"),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "look"}]},
            ToolChoiceMode.REQUIRED,
            None,
        ),
        ({"type": "web_search"}, ToolChoiceMode.AUTO, None),
    ],
)
def test_tool_choice(choice: Any, mode: ToolChoiceMode, name: str | None) -> None:
    request = parse(tool_choice=choice)
    assert (request.tool_choice.mode, request.tool_choice.name) == (mode, name)


def test_a_client_is_told_to_send_the_history() -> None:
    with pytest.raises(InvalidRequest, match="whole history") as caught:
        parse(previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [3]}, "input[0]"),
        ({"input": [{"role": "robot", "content": ""}]}, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].image_url"),
        ({"input": [{"type": "function_call", "arguments": "{}"}]}, "input[0].name"),
        ({"tool_choice": {"type": "function", "name": "gone"}}, "tool_choice.name"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.grammar"),
        ({"text": {"format": {"type": "python"}}}, "text.format.type"),
        ({"background": True}, "background"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(**changes)
    assert caught.value.param == param


NAMES = (
    "type", "text", "role", "content", "name", "arguments", "call_id", "output", "summary", "encrypted_content",
    "namespace", "tools", "parameters", "format", "schema", "mode", "effort", "input",
)  # fmt: skip
WORDS = st.sampled_from(
    ["message", "function_call", "function_call_output", "reasoning", "input_text", "output_text", "refusal", "user",
     "assistant", "developer", "function", "namespace", "json_schema", "custom_tool_call", "parkd1:é", ""]
)  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**70) | st.floats() | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=5),
    max_leaves=15,
)
FIELDS = (
    "input", "instructions", "tools", "tool_choice", "text", "reasoning", "include", "metadata", "max_output_tokens",
    "parallel_tool_calls", "previous_response_id", "prompt_cache_key", "stream", "store", "model", "stop", "top_p",
)  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(
    st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=6),
    st.lists(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=5), min_size=1, max_size=4),
)
def test_only_invalid_request_is_raised(fields: dict[str, Any], items: list[Any]) -> None:
    for body in (fields, BODY | fields, BODY | fields | {"input": items}):
        try:
            request = OpenAIResponses().parse(body, {})
            encoder = OpenAIResponses().encoder(request, body, META)
        except InvalidRequest:
            continue
        assert encoder.keep_alive()


READING = (
    Started(REPORT),
    Progress(0, 35_000, 771, 0.0),
    Progress(512, 35_000, 771, 1.0),
    Progress(2_048, 35_000, 771, 4.0),
    Progress(2_560, 35_000, 771, 5.0),
    Progress(4_096, 35_000, 771, 8.0),
    Progress(35_000, 35_000, 771, 70.0),
    TextDelta("Read."),
    finished(),
)
"""Told are those at 4 and 8 s: two seconds lie between any two, and the last says nothing that the answer does not."""
TOLD = [
    "**Reading the prompt: 2,819 of 35,771 tokens, 64 s left**",
    "**Reading the prompt: 4,867 of 35,771 tokens, 60 s left**",
]


def test_how_far_a_prompt_is_read_is_a_reasoning_summary_if_it_is_asked_for() -> None:
    told = frames(encoded(READING, keep_alives=False, return_progress=True))
    last = told[-1]["response"]["output"]
    assert [item["type"] for item in last] == ["reasoning", "message"]
    assert [part["text"] for part in last[0]["summary"]] == TOLD
    kinds = [each["type"] for each in told if "reasoning" in each["type"]]
    assert kinds == [
        f"response.reasoning_summary_{kind}" for kind in ("part.added", "text.delta", "text.done", "part.done")
    ] * len(TOLD)
    assert [each["summary_index"] for each in told if each["type"].endswith("summary_part.added")] == [0, 1]
    done = [each["item"] for each in told if each["type"] == "response.output_item.done"]
    assert done == last
    assert [each["sequence_number"] for each in told] == list(range(len(told)))


def test_it_is_told_by_default_only_if_the_server_says_so() -> None:
    def tells(dialect: OpenAIResponses, **changes: Any) -> bool:
        encoder = dialect.encoder(parse(**changes), BODY | changes, META)
        return b"reasoning_summary" in b"".join(frame for event in READING for frame in encoder.feed(event))

    quiet, telling = OpenAIResponses(), OpenAIResponses(tells_progress=True)
    assert [tells(quiet), tells(telling)] == [False, True]
    assert not tells(telling, return_progress=False)
    assert not tells(telling, stream=False), "a document comes when all is read"


def test_thinking_after_it_is_an_item_of_its_own() -> None:
    events = (*READING[:4], ReasoningDelta("Hm."), *READING[-2:])
    last = frames(encoded(events, keep_alives=False, return_progress=True))[-1]["response"]["output"]
    assert [item["type"] for item in last] == ["reasoning", "reasoning", "message"]
    assert ["content" in item for item in last[:2]] == [False, True]
    assert last[1]["content"][0]["text"] == "Hm."


def test_it_leaves_the_prompt_alone_when_it_is_sent_back() -> None:
    items = frames(encoded(READING, keep_alives=False, return_progress=True))[-1]["response"]["output"]
    asked = {"role": "user", "content": "hi"}
    without = [item for item in items if item["type"] != "reasoning"]
    assert parse(input=[asked, *items]).messages == parse(input=[asked, *without]).messages
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": f"{TOLD[0]} and more"}]}
    [_, answer] = parse(input=[asked, thought, *without]).messages
    assert answer["reasoning_content"] == f"{TOLD[0]} and more", "what only resembles it is the model's"


def test_so_many_are_told_and_no_more() -> None:
    long = [Progress(number, 10**6, 0, 3.0 * number) for number in range(1, 3 * MOST)]
    told = frames(encoded([Started(REPORT), *long, finished()], keep_alives=False, return_progress=True))
    assert len(told[-1]["response"]["output"][0]["summary"]) == MOST


def test_the_sdk_reads_it() -> None:
    assert accumulated(encoded(READING, return_progress=True)).output[0].summary[1].text == TOLD[1]
