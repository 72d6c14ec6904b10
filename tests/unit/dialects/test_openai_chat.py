"""The chat dialect alone: what a body becomes, and the frames of events that the fake engine never makes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from parkd.errors import ContextOverflow, EngineFailure, InvalidRequest, QueueFull
from parkd.proxy.dialects.base import ResponseMeta
from parkd.proxy.dialects.openai_chat import OpenAIChat
from parkd.proxy.dialects.openai_completions import OpenAICompletions
from parkd.types import (
    CacheMode,
    CacheOutcome,
    CacheReport,
    Event,
    Finished,
    FinishReason,
    ReasoningDelta,
    Started,
    TextDelta,
    Timings,
    ToolCallDelta,
    ToolChoice,
    ToolChoiceMode,
)

META = ResponseMeta("req", "model", 1)
USER = [{"role": "user", "content": "x"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}
REPORT = CacheReport(CacheOutcome.RESTORED_RAM, 100, 90, "because")
TIMINGS = Timings(
    wait_s=1.0, restore_s=0.5, prefill_s=0.25, first_token_s=2.0, decode_s=3.0, prefill_tokens=10, output_tokens=7
)


def parse(**fields: Any) -> Any:
    return OpenAIChat().parse({"messages": USER, **fields}, {})


def feed(*events: Event, **body: Any) -> tuple[list[Any], Any]:
    request = parse(stream=True, **body)
    encoder = OpenAIChat("print").encoder(request, {"stream": True, **body}, META)
    frames = b"".join(frame for event in events for frame in encoder.feed(event)).decode().strip().split("\n\n")
    assert all(frame.startswith("data: ") for frame in frames)
    return [json.loads(frame[6:]) for frame in frames if frame != "data: [DONE]"], encoder


def test_a_body_becomes_a_turn() -> None:
    request = parse(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        seed=7,
        stop="END",
        max_tokens=5,
        max_completion_tokens=9,
        tools=[TOOL, {"type": "web_search"}],
        tool_choice={"type": "function", "function": {"name": "look"}},
        chat_template_kwargs={"enable_thinking": True},
        reasoning_effort="none",
        logit_bias={"5": -100},
        cache_prompt=False,
    )
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (0.5, 0.9, 40)
    assert (request.sampling.seed, request.sampling.logit_bias) == (7, {5: -100.0})
    assert (request.stop, request.max_output_tokens) == (("END",), 9)
    assert request.tools == (TOOL,)
    assert request.tool_choice == ToolChoice(ToolChoiceMode.NAMED, "look")
    assert request.template_kwargs == {"enable_thinking": True, "reasoning_effort": "none"}
    assert request.reasoning.enabled is True  # what the client tells the template wins
    assert request.cache.mode is CacheMode.OFF


def test_what_local_servers_clients_say_for_no_bound_and_any_seed() -> None:
    request = parse(max_tokens=-1, seed=-1, top_p=0, top_k=-1)
    assert (request.max_output_tokens, request.sampling.seed, request.sampling.top_k) == (None, None, 0)
    assert 0 < request.sampling.top_p < 1e-3
    assert OpenAICompletions().parse({"prompt": "x", "max_tokens": -1}, {}).max_output_tokens is None
    assert OpenAICompletions().parse({"prompt": "x"}, {}).max_output_tokens == 16
    for value in (-2, -1.5, True, 2**31):
        with pytest.raises(InvalidRequest, match=r"max_tokens.* from 0 to 2147483647"):
            parse(max_tokens=value)


def test_a_lifetime_is_a_wish_for_retention() -> None:
    assert parse(prompt_cache_options={"ttl": "12h"}).cache.min_retention_s == 12 * 3600
    assert parse(prompt_cache_options={"ttl": "30m"}).cache.min_retention_s == 1800
    assert parse(prompt_cache_options={"ttl": "long"}).cache.min_retention_s is None


def test_null_means_absent() -> None:
    names = ("temperature", "stop", "max_tokens", "tools", "tool_choice", "stream", "stream_options", "n", "seed")
    assert parse(**dict.fromkeys(names)) == parse()


def test_a_schema_is_kept_and_a_broken_one_refused() -> None:
    schema = {"type": "object", "properties": {}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert parse(response_format=wanted).response_schema == schema
    assert parse(response_format={"type": "json_object"}).response_schema == {"type": "object"}
    assert parse(response_format={"type": "text"}).response_schema is None
    with pytest.raises(InvalidRequest):
        parse(response_format={"type": "json_schema", "json_schema": {"schema": 5}})


def test_a_forced_tool_must_be_there() -> None:
    with pytest.raises(InvalidRequest, match="other"):
        parse(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "other"}})


def test_tool_calls_have_an_index_in_every_piece_and_come_together_in_the_document() -> None:
    end = Finished(FinishReason.TOOL_CALLS, REPORT, TIMINGS)
    events = (
        Started(REPORT),
        ToolCallDelta(0, "call_1", "look", ""),
        ToolCallDelta(0, arguments='{"a"'),
        ToolCallDelta(0, arguments=": 1}"),
        ToolCallDelta(1, "call_2", "find", "{}"),
        end,
    )
    chunks, encoder = feed(*events)
    pieces = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert [piece["index"] for piece in pieces] == [0, 0, 0, 1]
    assert [piece.get("id") for piece in pieces] == ["call_1", None, None, "call_2"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    message = encoder.document()["choices"][0]["message"]
    assert message["content"] is None
    assert [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in message["tool_calls"]] == [
        ("call_1", "look", '{"a": 1}'),
        ("call_2", "find", "{}"),
    ]


def test_thinking_is_apart_from_the_answer() -> None:
    end = Finished(FinishReason.STOP, REPORT, TIMINGS, reasoning_tokens=4)
    chunks, encoder = feed(Started(REPORT), ReasoningDelta("hm"), TextDelta("yes"), end)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[1:3] == [{"reasoning_content": "hm"}, {"content": "yes"}]
    document = encoder.document()
    message = document["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("yes", "hm")
    assert document["usage"]["completion_tokens_details"]["reasoning_tokens"] == 4


def test_usage_and_timings_say_what_was_measured() -> None:
    _, encoder = feed(Started(REPORT), Finished(FinishReason.STOP, REPORT, TIMINGS))
    document = encoder.document()
    assert document["usage"]["prompt_tokens_details"] == {"cached_tokens": 90}
    assert document["usage"]["total_tokens"] == 107
    assert document["timings"] == {
        "cache_n": 90,
        "prompt_n": 10,
        "prompt_ms": 250.0,
        "prompt_per_token_ms": 25.0,
        "prompt_per_second": 40.0,
        "predicted_n": 7,
        "predicted_ms": 3000.0,
        "predicted_per_token_ms": 500.0,
        "predicted_per_second": 2.0,
        "cache": "restored-ram",
        "why": "because",
        "wait_ms": 1000.0,
        "restore_ms": 500.0,
        "ttft_ms": 2000.0,
    }
    assert document["system_fingerprint"] == "print"


def test_nothing_measured_has_no_pace() -> None:
    _, encoder = feed(Started(REPORT), Finished(FinishReason.STOP, REPORT, Timings()))
    timings = encoder.document()["timings"]
    assert {timings[f"{what}_per_{unit}"] for what in ("prompt", "predicted") for unit in ("token_ms", "second")} == {
        0.0
    }


def test_too_long_a_prompt_has_the_numbers_that_llama_servers_clients_read() -> None:
    answer = OpenAIChat().error(ContextOverflow(900, 100, 512), "req")
    error = answer.body["error"]
    assert (answer.status, error["code"], error["type"]) == (
        400,
        "context_length_exceeded",
        "exceed_context_size_error",
    )
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (900, 512)


def test_errors_have_openais_shape() -> None:
    full = OpenAIChat().error(QueueFull("Full.", retry_after_s=7), "req")
    assert (full.status, full.headers["retry-after"]) == (503, "7")
    _, encoder = feed(Started(REPORT))
    last, done = list(encoder.failure(EngineFailure("Broken.")))
    assert json.loads(last[6:])["error"] == {
        "message": "Broken.",
        "type": "server_error",
        "param": None,
        "code": "engine_failure",
    }
    assert done == b"data: [DONE]\n\n"
