"""Frames and documents that repeat what a client or a model wrote."""

from __future__ import annotations

import json
from typing import Any

import pytest

from parkd.proxy.dialects.base import ResponseMeta
from parkd.proxy.dialects.frames import encoded, json_frame
from parkd.proxy.dialects.openai_responses import OpenAIResponses
from parkd.types import CacheOutcome, CacheReport, Finished, FinishReason, Started, Timings


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (18446744073709551616, 18446744073709551616),
        (-(2**70), -(2**70)),
        ("ab\ud83d", "ab\ufffd"),
        ({"\ude00": ["\ud83d\ude00"]}, {"\ufffd": ["\U0001f600"]}),
        ([2**64, float("nan"), float("-inf")], [2**64, None, None]),
        (float("nan"), None),
        (nested(300), nested(300)),
        ("a\nb\u2028", "a\nb\u2028"),
    ],
)
def test_whatever_is_repeated_can_be_written(value: Any, read: Any) -> None:
    assert json.loads(encoded({"a": value})) == {"a": read}
    assert json.loads(json_frame({"a": value}).removeprefix(b"data: ")) == {"a": read}


def test_a_large_number_in_a_field_that_is_repeated_fails_no_response() -> None:
    """Found by hypothesis: the answer ended with 500."""
    body = {"input": "hi", "text": {"verbosity": 18446744073709551616}, "metadata": {"a": "\ud83d"}}
    dialect = OpenAIResponses()
    encoder = dialect.encoder(dialect.parse(body, {}), body, ResponseMeta("req_a", "m", 1))
    report = CacheReport(CacheOutcome.COLD, 1, 0)
    frames = [*encoder.feed(Started(report)), *encoder.feed(Finished(FinishReason.STOP, report, Timings()))]
    last = json.loads(frames[-1].split(b"data: ")[1])
    assert last["response"]["text"] == {"verbosity": 18446744073709551616}
    assert json.loads(encoded(encoder.document()))["metadata"] == {"a": "\ufffd"}
