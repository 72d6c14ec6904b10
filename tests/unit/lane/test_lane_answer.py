"""The generation loop: how an answer ends, and what is known of the rows when it does."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from parkd.answers.base import OutputFormat, ReasoningMarks
from parkd.answers.parser import make_parser
from parkd.errors import EngineFailure
from parkd.lane.answer import Answer, AnswerLoop, visible_ids
from parkd.types import FinishReason, TextDelta, TurnRequest
from tests.fakes.engine import FakeEngine
from tests.fakes.text import END_TOKEN_ID


class Scripted(FakeEngine):
    """Yields given steps, as an engine with drafts does: several ids at once."""

    def __init__(self, steps: Sequence[str | list[int] | Exception]) -> None:
        super().__init__(stages=1)
        self.steps = steps
        self.closed = False

    def generate(self) -> Iterator[Sequence[int]]:
        try:
            for step in self.steps:
                if isinstance(step, Exception):
                    raise step
                yield list(step.encode()) if isinstance(step, str) else step
        finally:
            self.closed = True


def run(
    steps: Sequence[str | list[int] | Exception], *, limit: int | None = None, stop: tuple[str, ...] = (), cut: int = 0
) -> tuple[Answer, str, Scripted]:
    """`cut`: cancelled once so many events came."""
    engine, cancel, texts = Scripted(steps), threading.Event(), []
    request = TurnRequest(stop=stop)

    def emit(event: Any) -> None:
        assert isinstance(event, TextDelta)
        texts.append(event.text)
        if len(texts) == cut:
            cancel.set()

    parser = make_parser(OutputFormat(), request, "", lambda: "call")
    loop = AnswerLoop(engine, engine, request, limit, parser, cancel, emit, lambda: 0.0)
    try:
        loop.run()
    finally:
        assert engine.closed
        run.last = loop.answer  # type: ignore[attr-defined]
    return loop.answer, "".join(texts), engine


def test_an_end_token_is_counted_and_not_shown() -> None:
    answer, text, _ = run(["ab", [ord("c"), END_TOKEN_ID, ord("x")]])
    assert (text, answer.reason, answer.output_tokens) == ("abc", FinishReason.STOP, 4)
    assert answer.token_ids[-1] == ord("x")  # behind the end, but perhaps in the state


def test_of_a_step_in_which_thinking_ends_only_what_was_thought_counts_as_that() -> None:
    """Servers send several tokens at once, and draft heads guess several."""
    engine = Scripted(["ab", "c</think>def", [END_TOKEN_ID]])
    output = OutputFormat(reasoning=ReasoningMarks("<think>", "</think>"))
    parser = make_parser(output, TurnRequest(), "<think>", lambda: "call")
    assert parser.in_reasoning
    loop = AnswerLoop(engine, engine, TurnRequest(), None, parser, threading.Event(), lambda _event: None, lambda: 0.0)
    loop.run()
    assert loop.answer.reasoning_tokens == len("abc</think>")
    assert loop.answer.output_tokens == len("abc</think>def") + 1


def test_the_limit_cuts_inside_a_step_and_what_was_held_back_comes_out() -> None:
    answer, text, _ = run(["ab", "cde"], limit=4, stop=("d!",))
    assert (text, answer.reason, answer.output_tokens) == ("abcd", FinishReason.LENGTH, 4)
    assert len(answer.token_ids) == 5


def test_a_stop_string_over_several_steps_is_never_shown() -> None:
    answer, text, _ = run(["ab", "c", "de", "f"], stop=("cd",))
    assert (text, answer.reason, answer.stop_string) == ("ab", FinishReason.STOP, "cd")
    assert bytes(answer.token_ids) == b"abcde"


def test_an_engine_that_ends_by_itself_ran_out_of_context() -> None:
    answer, text, _ = run(["ab", "c"])
    assert (text, answer.reason) == ("abc", FinishReason.LENGTH)


def test_a_cancel_ends_after_the_step() -> None:
    answer, text, _ = run(["a", "b", "c", "d"], cut=2)
    assert (text, answer.reason, bytes(answer.token_ids)) == ("ab", FinishReason.CANCELLED, b"ab")


def test_a_failure_leaves_what_was_generated() -> None:
    with pytest.raises(EngineFailure):
        run(["ab", EngineFailure("broken")])
    assert bytes(run.last.token_ids) == b"ab"  # type: ignore[attr-defined]


def test_half_a_character_waits_for_its_other_half() -> None:
    first, second = "é".encode()
    answer, text, _ = run([[first], [second], "x"])
    assert text == "éx"
    assert answer.output_tokens == 3


@pytest.mark.parametrize(("left", "shown"), [(1, 1), (2, 2), (3, 3), (None, 3)])
def test_visible_ids_are_bounded_by_what_is_left(left: int | None, shown: int) -> None:
    visible, ended = visible_ids([1, 2, 3], frozenset(), left)
    assert len(visible) == shown
    assert (ended is FinishReason.LENGTH) == (left is not None)
