"""Answers of servers in parts: read from their events, joined, and parsed again."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import count
from typing import Any

import pytest

from parkd.engine_adapter.remote.alphabet import JoinedText, Mark
from parkd.engine_adapter.remote.events import CallPiece, Piece, Usage, parse_line, usage_of
from parkd.engine_adapter.remote.length import AnswerLength
from parkd.engine_adapter.remote.parts import PartsParser
from parkd.engine_adapter.remote.words import JoinedParts
from parkd.errors import UpstreamFailed
from parkd.types import FinishReason, ReasoningDelta, TextDelta, ToolCallDelta, TurnRequest
from tests.fakes.openai_server import called, ended, said, thought

TOOLS = ({"type": "function", "function": {"name": "f", "parameters": {}}},)


def parsed(document: Any, name: bytes = b"data") -> Piece | None:
    return parse_line(name + b": " + json.dumps(document).encode(), "server")


def joined(pieces: Iterable[Piece]) -> list[int]:
    answer = JoinedParts(offers_tools=True)
    return [each for piece in pieces for each in answer.ids(piece)]


def told(ids: list[int], *, reason: FinishReason = FinishReason.STOP, cuts: int = 1, **fields: Any) -> Any:
    """Thinking, text, calls and the reason, by a parser that is given the text in pieces of `cuts` ids."""
    numbers = count()
    parser = PartsParser(TurnRequest(tools=TOOLS, **fields), lambda: f"id{next(numbers)}")
    events: list[Any] = []
    for start in range(0, len(ids), cuts):
        events += parser.push(JoinedText().push(ids[start : start + cuts]))
    more, end = parser.finish(reason)
    thinking, text, calls = "", "", {}
    for event in [*events, *more]:
        match event:
            case ReasoningDelta(part):
                thinking += part
            case TextDelta(part):
                text += part
            case ToolCallDelta():
                name, arguments = calls.get(event.index, ("", ""))
                assert (event.name is None) == (event.index in calls)
                calls[event.index] = (name or event.name, arguments + event.arguments)
    return thinking, text, list(calls.values()), end


@pytest.mark.parametrize(
    ("said_text", "read_text"),
    [(r"ab\ud83d", "ab\ufffd"), (r"\uDE00c", "\ufffdc"), (r"\ud800\\ud83d \uD83D\uDE00", "\ufffd\\ud83d \U0001f600")],
)
def test_half_a_character_is_a_replacement_mark(said_text: str, read_text: str) -> None:
    line = f'data: {{"choices": [{{"index": 0, "delta": {{"content": "{said_text}"}}}}]}}'
    assert parse_line(line.encode(), "server") == Piece(text=read_text)


@pytest.mark.parametrize("value", ["[" * 100_000, r'{"choices": NaN, "a": "\ud83d"}', "9" * 5000, r'{"\ud83d'])
def test_what_is_no_event_is_an_error_of_the_server_beside_half_a_character(value: str) -> None:
    for line in (value, rf'["\ud83d", {value}'):
        with pytest.raises(UpstreamFailed, match="cannot be read"):
            parse_line(b"data: " + line.encode(), "server")


def test_each_kind_of_event_is_read() -> None:
    assert parsed(said("Hi")) == Piece(text="Hi")
    assert parsed(thought("Hm")) == parsed(thought("Hm", "reasoning")) == Piece(thinking="Hm")
    assert parsed(called(1, "f", "{}")) == Piece(calls=(CallPiece(1, "f", "{}"),))
    assert parsed(ended("length")) == Piece(finish="length")
    completion = {"choices": [{"index": 0, "text": "Hi", "token_ids": [5], "prompt_token_ids": [1, 2]}]}
    assert parsed(completion) == Piece(text="Hi", token_ids=(5,), prompt_ids=(1, 2))
    parts = [{"type": "thinking", "thinking": [{"type": "text", "text": "Hm"}]}, {"type": "text", "text": "Hi"}]
    assert parsed(said(parts)) == Piece(thinking="Hm", text="Hi")  # type: ignore[arg-type]
    assert parse_line(b"data: [DONE]", "server") == Piece(is_last=True)
    assert parsed({"choices": [{"index": 1, "delta": {"content": "another answer"}}]}) == Piece()
    assert [parse_line(line, "server") for line in (b"", b": ping", b"event: x", b"data:")] == [None] * 4


@pytest.mark.parametrize(
    "document",
    [
        {"error": {"message": "boom"}},
        {"error": "boom"},
        {"choices": [{"delta": {"content": 5}}]},
        {"choices": [{"delta": {"tool_calls": [{"function": {"name": 5}}]}}]},
        {"choices": "many"},
        {"choices": [{"text": "x", "token_ids": ["five"]}]},
        [1],
    ],
)
def test_an_event_that_cannot_be_read_is_an_error(document: Any) -> None:
    with pytest.raises(UpstreamFailed):
        parsed(document)


def test_an_error_of_another_field_is_one() -> None:
    with pytest.raises(UpstreamFailed, match="boom"):
        parsed({"message": "boom"}, b"error")


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (None, None),
        ({}, Usage()),
        ({"prompt_tokens": 9, "completion_tokens": 2}, Usage(9, 2)),
        ({"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 9}}, Usage(9, None, 9)),
        ({"prompt_tokens": 9, "prompt_cache_hit_tokens": 4}, Usage(9, None, 4)),
        ({"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 10}}, Usage(9)),
        ({"prompt_tokens_details": {"cached_tokens": 1}}, Usage()),
        ({"prompt_tokens": -9, "completion_tokens": 2.5}, Usage()),
        ({"completion_tokens": 3, "completion_tokens_details": {"reasoning_tokens": 4}}, Usage(None, 3)),
        ({"completion_tokens": 3, "completion_tokens_details": {"reasoning_tokens": 2}}, Usage(None, 3, None, 2)),
    ],
)
def test_of_a_usage_only_what_can_be_true_counts(usage: Any, expected: Usage | None) -> None:
    assert usage_of(usage) == expected


def test_what_is_said_later_replaces_what_was_said_and_keeps_the_rest() -> None:
    assert Usage(9, 1, 8).then(Usage(9, 5)) == Usage(9, 5, 8)


@pytest.mark.parametrize("cuts", [1, 2, 3, 1000])
def test_parts_come_apart_again_wherever_they_are_cut(cuts: int) -> None:
    pieces = [
        Piece(thinking="Hm. "),
        Piece(thinking="Well"),
        Piece(text="\n I "),
        Piece(text="look."),
        Piece(calls=(CallPiece(0, "f"),)),
        Piece(calls=(CallPiece(0, "", '{"a":'), CallPiece(0, "", " 1}"), CallPiece(1, "g"))),
        Piece(calls=(CallPiece(2, "h", "not json"),), finish="tool_calls"),
    ]
    ids = joined(pieces)
    assert told(ids, cuts=cuts) == (
        "Hm. Well",
        "\n I look.",
        [("f", '{"a": 1}'), ("g", "{}"), ("h", "not json")],
        FinishReason.TOOL_CALLS,
    )


def test_text_at_the_beginning_has_no_mark_as_the_template_has_none() -> None:
    assert joined([Piece(text="Hi"), Piece(text="!")]) == [ord(char) for char in "Hi!"]
    assert joined([Piece(thinking="a"), Piece(text="b")]) == [Mark.THINKING.id, 97, Mark.TEXT.id, 98]


def test_only_one_call_is_told_to_who_wants_only_one() -> None:
    ids = joined([Piece(calls=(CallPiece(0, "f", "{}"), CallPiece(1, "g", "{}")), finish="tool_calls")])
    assert told(ids, parallel_tool_calls=False)[2] == [("f", "{}")]


def test_a_call_whose_name_the_limit_cut_is_none() -> None:
    ids = [Mark.CALL.id, ord("f")]
    assert told(ids, reason=FinishReason.LENGTH)[2:] == ([], FinishReason.LENGTH)
    assert told(ids)[2:] == ([("f", "")], FinishReason.TOOL_CALLS)


def test_calls_that_nobody_offered_or_that_have_no_name_are_errors() -> None:
    with pytest.raises(UpstreamFailed, match="none was offered"):
        JoinedParts(offers_tools=False).ids(Piece(calls=(CallPiece(0, "f"),)))
    with pytest.raises(UpstreamFailed, match="without a name"):
        joined([Piece(calls=(CallPiece(0, "", "{}"),))])


def word(text: str = "word ", **more: Any) -> Piece:
    return Piece(text=text, **more)


@pytest.mark.parametrize(
    ("pieces", "token_events", "taken", "tokens"),
    [
        ([word()] * 9, True, 5, 5),
        ([word(usage=Usage(9, n)) for n in (2, 4, 6)], True, 2, 4),
        ([word(token_ids=(1, 2))] * 4, True, 2, 4),
        ([word("ab")] * 40, False, 11, 5),
        ([word("x" * 5 * 128), word("x")], False, 1, 160),
        ([word("x" * (5 * 128 + 1))], True, 0, 0),
        ([word("x" * 5 * 128, finish="stop"), word()], False, 1, 160),
        ([word(usage=Usage(9, 0))] * 6, True, 5, 5),
        ([Piece(thinking="a"), Piece(calls=(CallPiece(0, "f", "{}"),)), word(), word(), word(), word()], True, 5, 5),
        ([Piece(finish=None, usage=Usage(9, 3)), word("")] * 5 + [word()] * 2, True, 12, 2),
    ],
    ids=["events", "counts", "ids", "smoothed", "dense", "one piece", "its own end", "no counts", "all parts", "empty"],
)
def test_an_answer_is_as_long_as_was_asked_for(
    pieces: list[Piece], token_events: bool, taken: int, tokens: int
) -> None:
    """Five tokens are asked for; the estimate is four characters a token."""
    length = AnswerLength(5, lambda characters: characters // 4, token_events=token_events)
    beyond = next((n for n, piece in enumerate(pieces) if length.passes_limit(piece)), len(pieces))
    assert (beyond, length.tokens) == (taken, tokens)
    unlimited = AnswerLength(None, lambda characters: characters // 4, token_events=token_events)
    assert not any(unlimited.passes_limit(piece) for piece in pieces * 100)


def test_a_llama_servers_timings_are_counts() -> None:
    timings = {"cache_n": 40, "prompt_n": 2, "predicted_n": 3, "prompt_ms": 1.5}
    assert parsed({**said("Hi"), "timings": timings}) == Piece(text="Hi", usage=Usage(42, 3, 40))
    assert parsed({**said("Hi"), "timings": {"predicted_n": 3}}) == Piece(text="Hi", usage=Usage(None, 3))
    assert parsed({**said("Hi"), "timings": 5}) == Piece(text="Hi")


def test_a_refusal_is_text() -> None:
    assert parsed({"choices": [{"index": 0, "delta": {"content": None, "refusal": "No."}}]}) == Piece(text="No.")


def test_a_call_that_a_filter_cut_is_none() -> None:
    ids = [Mark.CALL.id, ord("f")]
    assert told(ids, reason=FinishReason.CONTENT_FILTER)[2:] == ([], FinishReason.CONTENT_FILTER)
