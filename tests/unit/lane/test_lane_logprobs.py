"""Logprobs stand beside the text that a client sees, and there beside the tokens that wrote it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from parkd.answers.base import OutputFormat, ToolFormat
from parkd.answers.formats import THINK
from parkd.answers.parser import make_parser
from parkd.lane.answer import AnswerLoop
from parkd.types import SamplingParams, TextDelta, TurnRequest
from tests.fakes.engine import FakeEngine, FakeScored
from tests.fakes.text import END_TOKEN_ID

TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call>'
CALLING = OutputFormat(ToolFormat.HERMES, THINK)


class Scored(FakeEngine):
    """Writes a text a byte a token, in steps of `step`; the logprob of a token is its number, negated."""

    def __init__(self, text: str, step: int) -> None:
        super().__init__(stages=1)
        self.ids = [*text.encode(), END_TOKEN_ID]
        self.step = step

    def generate(self) -> Iterator[Sequence[int]]:
        for start in range(0, len(self.ids), self.step):
            yield self.ids[start : start + self.step]

    @property
    def logprobs(self) -> Sequence[FakeScored]:
        return [FakeScored(token_id, -float(number), ((65, -0.5),)) for number, token_id in enumerate(self.ids)]


def told(text: str, output: OutputFormat, step: int, *, tail: str = "", **changes: Any) -> list[TextDelta]:
    request = TurnRequest(sampling=SamplingParams(top_logprobs=1), **changes)
    engine, events = Scored(text, step), []
    parser = make_parser(output, request, tail, lambda: "call")
    AnswerLoop(engine, engine, request, None, parser, threading.Event(), events.append, lambda: 0.0).run()
    return [event for event in events if isinstance(event, TextDelta)]


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize(
    ("raw", "shown", "output", "changes"),
    [
        ("plain", [(0, "plain")], OutputFormat(), {}),
        ("媽 🤗é", [(0, "媽 🤗é")], OutputFormat(), {}),
        ("<think>\nab</think>\n\nab a", [(20, "ab a")], CALLING, {}),
        ("ab</think>< a", [(10, "< a")], CALLING, {"tail": "<think>\n"}),
        (f"I look.{CALL}", [(0, "I look.")], CALLING, {"tools": [TOOL]}),
        ("a <tool_ box", [(0, "a <tool_ box")], CALLING, {"tools": [TOOL]}),
        ("<<b", [(0, "<<b")], CALLING, {"tools": [TOOL]}),
        ("ab END c", [(0, "ab ")], OutputFormat(), {"stop": ("END",)}),
        ("E EN", [(0, "E EN")], OutputFormat(), {"stop": ("END",)}),
        ("<think>b END</think>b END", [(20, "b ")], CALLING, {"stop": ("END",)}),
    ],
)
def test_the_tokens_of_what_is_seen_are_told_and_no_others(
    raw: str, shown: list[tuple[int, str]], output: OutputFormat, changes: Any, step: int
) -> None:
    """Found by use 25: `logprobs` was answered with null."""
    expected = [-float(start + byte) for start, text in shown for byte in range(len(text.encode()))]
    deltas = told(raw, output, step, **changes)
    assert "".join(delta.text for delta in deltas) == "".join(text for _, text in shown)
    scores = [score for delta in deltas for score in delta.logprobs]
    assert [score.logprob for score in scores] == expected
    assert b"".join(score.piece for score in scores).decode() == "".join(text for _, text in shown)
    assert all(score.top == ((b"A", -0.5),) for score in scores)


def test_the_tokens_of_a_cut_character_at_the_end_are_told() -> None:
    engine = Scored("", 1)
    engine.ids = [*b"a", *"媽".encode()[:2], END_TOKEN_ID]
    request, events = TurnRequest(sampling=SamplingParams(top_logprobs=0)), []
    parser = make_parser(OutputFormat(), request, "", lambda: "call")
    AnswerLoop(engine, engine, request, None, parser, threading.Event(), events.append, lambda: 0.0).run()
    assert "".join(event.text for event in events) == "a\ufffd"
    assert [score.piece for event in events for score in event.logprobs] == [b"a", b"\xe5", b"\xaa"]
