"""Budgets of thinking, kept while an answer is generated: masks over the fake engine's vocabulary."""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np
import pytest

from parkd.answers.base import OutputEvent, OutputFormat, ReasoningMarks, ToolFormat
from parkd.answers.parser import make_parser
from parkd.answers.structured import StructuredOutput
from parkd.answers.thinking import EFFORT_BUDGETS, ThinkingLimits, budget_of
from parkd.answers.transcript import Transcript
from parkd.engine_adapter.base import Rendered
from parkd.identity.builder import IdentityBuilder
from parkd.identity.output_memory import OutputMemory
from parkd.lane.answer import AnswerLoop
from parkd.proxy.dialects.anthropic_messages import AnthropicMessages
from parkd.proxy.dialects.openai_chat import OpenAIChat
from parkd.proxy.dialects.openai_responses import OpenAIResponses
from parkd.types import (
    FinishReason,
    ReasoningDelta,
    ReasoningParams,
    TextDelta,
    ToolChoice,
    ToolChoiceMode,
    TurnRequest,
)
from tests.clients.client_kit import byte_tokenizer
from tests.fakes.engine import FakeEngine
from tests.fakes.text import END_TOKEN_ID, SPECIAL_TOKENS

THINK = ReasoningMarks("<think>", "</think>")
OUTPUT = OutputFormat(ToolFormat.HERMES, THINK)
LONG = "<think>\n" + "abcdefghij" * 5 + "\n</think>\n\nThe answer."
CLOSE = "\n</think>"
MESSAGES = [{"role": "user", "content": "hi"}]


def limits(engine: FakeEngine, template: str | None = None) -> ThinkingLimits:
    return ThinkingLimits(THINK, template, engine.info.vocab_size, engine.tokenizer.encode, engine.text_stream)


def answered(
    request: TurnRequest, script: str, *, tail: str = "assistant\n", schema: bool = False, limit: int | None = 200
) -> tuple[str, str, AnswerLoop]:
    """The thinking, the text, and the loop that made them."""
    engine, events = FakeEngine(script=lambda _prompt: script), []
    identity = IdentityBuilder(engine.tokenizer, engine.template, b"f" * 16, 256, 1 << 16).build(request)
    structured = StructuredOutput(byte_tokenizer().to_str(), engine.info.vocab_size, engine.info.end_token_ids)
    inner = structured.mask(request, OUTPUT, tail) if schema else None
    mask = limits(engine).over(request, tail, inner)
    parser = make_parser(OUTPUT, request, tail, lambda: "call")
    engine.begin(identity.token_ids, request.sampling, mask=mask)
    engine.extend(identity.token_ids[:-1], cancel=threading.Event())
    loop = AnswerLoop(engine, engine, request, limit, parser, threading.Event(), events.append, lambda: 0.0)
    loop.run()
    return said(events, ReasoningDelta), said(events, TextDelta), loop


def said(events: list[OutputEvent], kind: type[ReasoningDelta | TextDelta]) -> str:
    return "".join(event.text for event in events if isinstance(event, kind))


def asked(budget: int | None = None, **more: Any) -> TurnRequest:
    return TurnRequest(messages=MESSAGES, reasoning=ReasoningParams(budget_tokens=budget), **more)


def test_thinking_ends_when_its_budget_is_used_up_and_the_answer_goes_on() -> None:
    thought, text, loop = answered(asked(20), LONG)
    assert thought == "abcdefghijabcdefghi"  # 20 tokens, of bytes; the newline at the start is one
    assert loop.answer.reason is FinishReason.STOP
    assert text.startswith("ij")  # the script goes on behind what was forced in its place, in the answer now
    assert text.endswith("The answer.")
    assert loop.answer.reasoning_tokens <= 20 + len(CLOSE) + len("<think>")


def test_the_forced_tokens_are_part_of_the_answer() -> None:
    _, _, loop = answered(asked(20), LONG)
    assert bytes(loop.answer.token_ids[:-1]).decode().startswith("<think>\nabcdefghijabcdefghi" + CLOSE)


@pytest.mark.parametrize("budget", [None, 1000])
def test_thinking_within_its_budget_is_left_alone(budget: int | None) -> None:
    thought, text, loop = answered(asked(budget), LONG)
    assert (thought, text) == ("abcdefghij" * 5, "The answer.")
    assert bytes(loop.answer.token_ids[:-1]).decode() == LONG


def test_no_budget_ends_thinking_that_the_prompt_has_opened_at_once() -> None:
    thought, text, loop = answered(asked(0), "x" * len(CLOSE) + "abc", tail="assistant\n<think>\n")
    assert (thought, text) == ("", "abc")
    assert bytes(loop.answer.token_ids[:-1]).decode() == CLOSE + "abc"


def test_marks_behind_the_thinking_are_text_and_force_nothing() -> None:
    thought, text, _ = answered(asked(20), "<think>a</think>\nHere: <think> " + "b" * 50)
    assert thought == "a"
    assert text == "Here: <think> " + "b" * 50


def test_an_answer_without_thinking_is_left_alone() -> None:
    assert answered(asked(0), "Just text. <think>" + "b" * 30)[:2] == ("", "Just text. <think>" + "b" * 30)


def test_a_budget_and_a_schema_hold_together() -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"], "additionalProperties": False}
    thought, text, _ = answered(asked(12, response_schema=schema), "<think>\n" + "abcdefghij" * 9, schema=True)
    assert thought == "abcdefghija"
    assert json.loads(text) == {"a": "x"}


def test_a_stop_string_in_the_thinking_ends_nothing() -> None:
    thought, text, loop = answered(asked(stop=(" it",)), "<think>\nis it so\n</think>\nYes, so it is.")
    assert (thought, text) == ("is it so", "Yes, so")
    assert (loop.answer.reason, loop.answer.stop_string) == (FinishReason.STOP, " it")


WIDE = "媽🤗é" * 6
"""Characters of three, four and two bytes; each byte is a token of the fake engine."""
CALL_TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
DUE: dict[str, dict[str, Any]] = {
    "text": {},
    "schema": {"response_schema": {"const": "x"}},
    "call": {"tools": [CALL_TOOL], "tool_choice": ToolChoice(ToolChoiceMode.REQUIRED)},
}


@pytest.mark.parametrize("budget", range(1, 26))
@pytest.mark.parametrize("due", DUE)
def test_a_budget_that_ends_inside_a_character_waits_until_it_is_whole(budget: int, due: str) -> None:
    thought, text, loop = answered(asked(budget, **DUE[due]), "<think>" + WIDE, schema=due != "text", limit=None)
    whole = next(count for count in range(len(WIDE)) if len(WIDE[:count].encode()) >= budget)
    assert thought == WIDE[:whole]
    behind = bytes(loop.answer.token_ids[:-1]).decode().partition("</think>")[2]
    if due == "schema":
        assert json.loads(text) == "x"
    if due == "call":
        assert behind.startswith('<tool_call>\n{"name": "look", "arguments": {')
    assert loop.answer.reason is (FinishReason.TOOL_CALLS if due == "call" else FinishReason.STOP)


def test_a_character_that_never_ends_is_not_waited_for() -> None:
    engine = FakeEngine()
    mask = limits(engine).over(asked(3), "<think>\n", None)
    assert mask is not None
    longest = "🤗".encode()
    for _ in range(3 + len(longest)):  # its first byte, again and again
        assert mask.allowed().all()
        mask.accept(longest[0])
    assert mask.allowed().nonzero()[0].tolist() == [ord("\n")]


@pytest.mark.parametrize("effort", [*EFFORT_BUDGETS, "high", "xhigh", "max", None])
def test_an_effort_is_a_budget_where_the_template_has_no_word_for_it(effort: str | None) -> None:
    params = ReasoningParams(effort=effort)
    assert budget_of(params, template_knows_effort=False) == EFFORT_BUDGETS.get(effort or "")
    assert budget_of(params, template_knows_effort=True) is None


def test_a_budget_goes_before_an_effort_and_no_thinking_before_both() -> None:
    assert budget_of(ReasoningParams(None, "low", 7), template_knows_effort=False) == 7
    assert budget_of(ReasoningParams(None, "low", 7), template_knows_effort=True) == 7
    assert budget_of(ReasoningParams(False, "low", 7), template_knows_effort=True) == 0


def test_a_raw_prompt_has_no_thinking_to_limit() -> None:
    engine = FakeEngine()
    request = TurnRequest(prompt="hi", reasoning=ReasoningParams(budget_tokens=3))
    assert limits(engine).over(request, "<think>\n", None) is None


CHAT = {"messages": MESSAGES}
ANTHROPIC = {"messages": MESSAGES, "max_tokens": 9}


@pytest.mark.parametrize(
    ("dialect", "body", "expected"),
    [
        (OpenAIChat(), CHAT | {"reasoning_effort": "low"}, (None, "low", None)),
        (OpenAIChat(), CHAT | {"reasoning_effort": "none"}, (False, "none", None)),
        (OpenAIChat(), CHAT | {"reasoning": {"max_tokens": 50}}, (None, None, 50)),
        (OpenAIChat(), CHAT | {"reasoning": {"enabled": False, "effort": "high"}}, (False, "high", None)),
        (OpenAIChat(), CHAT | {"thinking_budget": 60}, (None, None, 60)),
        (OpenAIChat(), CHAT | {"thinking_token_budget": 61}, (None, None, 61)),
        (OpenAIChat(), CHAT | {"thinking_budget_tokens": 62}, (None, None, 62)),
        (OpenAIChat(), CHAT | {"reasoning_budget": -1}, (None, None, None)),
        (OpenAIChat(), CHAT | {"reasoning_budget": 0}, (False, None, 0)),
        (OpenAIChat(), CHAT | {"enable_thinking": False}, (False, None, None)),
        (OpenAIChat(), CHAT | {"thinking": {"type": "disabled"}}, (False, None, None)),
        (OpenAIChat(), CHAT | {"thinking": True}, (True, None, None)),
        (
            OpenAIChat(),
            CHAT | {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            (True, "none", None),
        ),
        (OpenAIResponses(), {"input": "hi", "reasoning": {"effort": "high"}}, (None, "high", None)),
        (OpenAIResponses(), {"input": "hi", "reasoning": {"max_tokens": 70}}, (None, None, 70)),
        (AnthropicMessages(), ANTHROPIC | {"thinking": {"type": "enabled", "budget_tokens": 80}}, (True, None, 80)),
        (AnthropicMessages(), ANTHROPIC | {"thinking": {"type": "disabled"}}, (False, None, None)),
        (AnthropicMessages(), ANTHROPIC | {"output_config": {"effort": "low"}}, (None, "low", None)),
    ],
)
def test_every_dialects_words_for_it(dialect: Any, body: dict[str, Any], expected: tuple[Any, ...]) -> None:
    request = dialect.parse(body, {})
    assert (request.reasoning.enabled, request.reasoning.effort, request.reasoning.budget_tokens) == expected
    kwargs = request.template_kwargs
    assert (kwargs.get("enable_thinking"), kwargs.get("reasoning_effort"), kwargs.get("thinking_budget")) == expected


class ThinkingTemplate:
    """Shows all thinking, as templates of models do that keep it."""

    def render(self, messages: Any, tools: Any, kwargs: Any, *, add_generation_prompt: bool = True) -> Rendered:
        start, end = SPECIAL_TOKENS
        turns = []
        for message in messages:
            thought = message.get("reasoning_content")
            head = f"<think>\n{thought}\n</think>\n\n" if thought else ""
            turns.append(f"{start}{message['role']}\n{head}{message['content']}{end}\n")
        return Rendered("".join(turns) + (f"{start}assistant\n" if add_generation_prompt else ""))


def test_a_cut_thought_that_comes_back_is_the_very_tokens_it_was() -> None:
    """The blanks around the forced mark are not the template's: only the remembered ids can tell."""
    engine = FakeEngine()
    answers = OutputMemory(1 << 16, [SPECIAL_TOKENS[1]])
    builder = IdentityBuilder(engine.tokenizer, ThinkingTemplate(), b"f" * 16, 256, 1 << 16, answers=answers)
    first = builder.build(TurnRequest(messages=MESSAGES))
    thought, text, loop = answered(asked(20), LONG)
    transcript = Transcript()
    for event in (ReasoningDelta(thought), TextDelta(text)):
        transcript.feed(event)
    ids = [token_id for token_id in loop.answer.token_ids if token_id != END_TOKEN_ID]
    heard = transcript.said()
    assert heard is not None
    answers.remember(first, ids, heard)
    back = {"role": "assistant", "content": text, "reasoning_content": thought}
    second = builder.build(TurnRequest(messages=[*MESSAGES, back, {"role": "user", "content": "more"}]))
    assert answers.spliced == 1
    expected = np.concatenate([first.token_ids, ids])
    assert second.token_ids[: len(expected)].tolist() == expected.tolist()
