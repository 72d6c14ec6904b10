"""Stop strings: where they count, and what is sent before them."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parkd.answers.base import OutputFormat, ToolFormat
from parkd.answers.formats import THINK
from parkd.answers.parser import make_parser
from parkd.answers.stops import StopStrings
from parkd.types import FinishReason, ReasoningDelta, TextDelta, ToolCallDelta, TurnRequest

SEED = 3
CALL = ToolCallDelta(0, "id", "look", "{}")


def stopped(text: str, stop: tuple[str, ...], step: int = 1) -> tuple[str, str | None]:
    """The text that is sent, fed `step` characters at a time, and the stop string."""
    stops = StopStrings(stop)
    events = [
        event for start in range(0, len(text), step) for event in stops.over([TextDelta(text[start : start + step])])
    ]
    events += stops.flush()
    assert all(isinstance(event, TextDelta) and event.text for event in events)
    return "".join(event.text for event in events if isinstance(event, TextDelta)), stops.met


@pytest.mark.parametrize("step", [1, 2, 3, 7])
@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("abcdef", ("cd",), ("ab", "cd")),
        ("aabaabaac", ("aabaac",), ("aab", "aabaac")),
        ("abcabd", ("abd",), ("abc", "abd")),
        ("abcdef", ("bcde", "cd"), ("ab", "cd")),  # The one that ends first counts...
        ("xabc", ("abc", "bc"), ("x", "abc")),  # ...and of two that end together the longer.
        ("abcab", ("abd",), ("abcab", None)),  # A head at the very end is given out.
        ("abc", ("", "c"), ("ab", "c")),
        ("abc", ("z",), ("abc", None)),
    ],
)
def test_stop_strings_do_not_depend_on_the_cut(
    text: str, stop: tuple[str, ...], expected: tuple[str, str | None], step: int
) -> None:
    assert stopped(text, stop, step) == expected


def test_only_a_possible_head_is_withheld() -> None:
    stops = StopStrings(("abd",))
    shown = [[event.text for event in stops.over([TextDelta(letter)])] for letter in "xabcab"]  # type: ignore[union-attr]
    assert shown == [["x"], [], [], ["abc"], [], []]
    assert list(stops.flush()) == [TextDelta("ab")]


def test_nothing_comes_after_a_stop() -> None:
    stops = StopStrings(("b",))
    assert list(stops.over([TextDelta("abc"), CALL])) == [TextDelta("a")]
    assert list(stops.over([TextDelta("d")])) == []
    assert list(stops.flush()) == []


def test_random_texts_stop_where_a_plain_search_says() -> None:
    rng = random.Random(SEED)
    for _ in range(300):
        text = "".join(rng.choice("ab") for _ in range(20))
        stop = tuple("".join(rng.choice("ab") for _ in range(rng.randint(2, 5))) for _ in range(2))
        ends = [(text.find(s) + len(s), -len(s), s) for s in stop if s in text]
        expected: tuple[str, str | None] = (text, None)
        if ends:
            end, length, found = min(ends)
            expected = (text[: end + length], found)
        assert stopped(text, stop, rng.randint(1, 4)) == expected


def test_a_call_ends_a_run_of_text() -> None:
    stops = StopStrings(("ab",))
    assert list(stops.over([TextDelta("xa"), CALL, TextDelta("by")])) == [
        TextDelta("x"),
        TextDelta("a"),
        CALL,
        TextDelta("by"),
    ]
    assert stops.met is None


CALLS = {
    ToolFormat.HERMES: '<tool_call>\n{"name": "look", "arguments": {"at": "S T O P"}}\n</tool_call>',
    ToolFormat.QWEN_XML: (
        "<tool_call>\n<function=look>\n<parameter=at>\nS T O P\n</parameter>\n</function>\n</tool_call>"
    ),
    ToolFormat.MISTRAL: '[TOOL_CALLS]look[ARGS]{"at": "S T O P"}',
    ToolFormat.GEMMA: '<|tool_call>call:look{at:<|"|>S T O P<|"|>}<tool_call|>',
}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(list(CALLS)), st.sampled_from(["T O", "look", "\n", "{", "T", " "]), st.data())
def test_a_stop_string_counts_in_the_text_of_the_answer_only(tools: ToolFormat, stop: str, data: st.DataObject) -> None:
    """In thinking and in a call, whatever is written is part of them; white space before a call is the format's."""
    raw = f"<think>\nlook {{ S T O P\n</think>\n\nLook\n{CALLS[tools]}"
    places = data.draw(st.lists(st.integers(0, len(raw)), max_size=8).map(sorted))
    stops, events = StopStrings((stop,)), list[Any]()
    parser = make_parser(OutputFormat(tools, THINK), TurnRequest(tools=TOOLS, stream=True), "", lambda: "id")
    for start, end in itertools.pairwise([0, *places, len(raw)]):
        events += stops.over(parser.push(raw[start:end]))
    events += stops.over(parser.finish(FinishReason.STOP)[0])
    events += stops.flush()
    assert stops.met is None
    assert "".join(event.text for event in events if isinstance(event, ReasoningDelta)) == "look { S T O P"
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == "Look"
    assert [event.name for event in events if isinstance(event, ToolCallDelta) and event.name] == ["look"]
