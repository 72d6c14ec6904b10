"""Legacy completions: what a body becomes, and what the official SDK makes of the frames."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import openai
import pytest

from parkd.errors import EngineFailure, InvalidRequest
from parkd.proxy.dialects.base import ResponseMeta
from parkd.proxy.dialects.openai_completions import OpenAICompletions
from parkd.types import (
    CacheOutcome,
    CacheReport,
    Finished,
    FinishReason,
    Started,
    TextDelta,
    Timings,
    TokenLogprob,
    TurnRequest,
)

META = ResponseMeta("req_abc", "some-model", 1700000000)
REPORT = CacheReport(CacheOutcome.LIVE, prompt_tokens=100, reused_tokens=90)
ANSWER = (
    Started(REPORT),
    TextDelta("on "),
    TextDelta("a time"),
    Finished(FinishReason.LENGTH, REPORT, Timings(output_tokens=7)),
)


def parse(**changes: Any) -> TurnRequest:
    return OpenAICompletions().parse({"prompt": "Once up"} | changes, {})


def answered(body: bytes) -> list[openai.types.Completion]:
    def answer(_request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, content=body, headers={"content-type": "text/event-stream"})

    http = httpx2.Client(transport=httpx2.MockTransport(answer))
    client = openai.OpenAI(api_key="k", base_url="http://parkd/v1", http_client=http, max_retries=0)
    return list(client.completions.create(model="m", prompt="x", stream=True))


def test_the_sdk_reads_a_stream() -> None:
    body = {"prompt": "x", "stream": True, "stream_options": {"include_usage": True}}
    encoder = OpenAICompletions().encoder(parse(**body), body, META)
    chunks = answered(b"".join(encoder.keep_alive() + b"".join(encoder.feed(event)) for event in ANSWER))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == "on a time"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens == 100
    document = encoder.document()
    assert document["choices"][0]["text"] == "on a time"
    assert document["usage"]["prompt_tokens_details"]["cached_tokens"] == 90


def test_an_error_inside_a_stream_reaches_the_sdk() -> None:
    encoder = OpenAICompletions().encoder(parse(), {}, META)
    with pytest.raises(openai.APIError, match="engine broke"):
        answered(b"".join(encoder.failure(EngineFailure("engine broke"))))


def test_the_prompt_is_raw_text() -> None:
    assert (parse().prompt, parse().messages) == ("Once up", ())
    assert parse(prompt=["one"]).prompt == "one"
    assert parse().max_output_tokens == 16
    assert parse(max_tokens=0).max_output_tokens == 0


def test_logprobs_are_in_the_legacy_form_streamed_and_whole() -> None:
    """Found by use 25: they were answered with null."""
    deltas = [
        TextDelta("a\u5abd", (TokenLogprob(b"a", -0.5, ((b"b", -0.25),)), TokenLogprob(b"\xe5\xaa", -1.0))),
        TextDelta("x", (TokenLogprob(b"\xbdx", float("-inf"), ((b"\xbdx", float("-inf")),)),)),
    ]
    encoder = OpenAICompletions().encoder(parse(logprobs=1), {}, META)
    frames = [json.loads(frame[6:]) for delta in deltas for frame in encoder.feed(delta)]
    for event in ANSWER:
        if not isinstance(event, TextDelta):
            encoder.feed(event)
    whole = encoder.document()["choices"][0]["logprobs"]
    assert whole == {
        "tokens": ["a", "bytes:\\xe5\\xaa", "bytes:\\xbd\\x78"],
        "token_logprobs": [-0.5, -1.0, -9999.0],
        "top_logprobs": [{"b": -0.25, "a": -0.5}, {"bytes:\\xe5\\xaa": -1.0}, {"bytes:\\xbd\\x78": -9999.0}],
        "text_offset": [0, 1, 1],
    }
    parts = [frame["choices"][0]["logprobs"] for frame in frames]
    assert {name: parts[0][name] + parts[1][name] for name in parts[0]} == whole
    silent = OpenAICompletions().encoder(parse(), {}, META)
    for event in ANSWER:
        silent.feed(event)
    assert silent.document()["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": [1, 2, 3]}, "prompt"),
        ({"prompt": [[1]]}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"echo": True}, "echo"),
        ({"n": 9}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": 1}, "suffix"),
        ({"stream_options": {"include_usage": 1}}, "include_usage"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(**changes)
    assert caught.value.param == param
