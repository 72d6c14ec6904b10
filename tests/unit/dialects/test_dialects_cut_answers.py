"""A whole answer is what a client puts together from the stream of the same answer, wherever the limit cuts it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from parkd.answers.base import OutputFormat
from parkd.answers.formats import THINK
from parkd.answers.parser import make_parser
from parkd.answers.readers.deepseek_calls import CALLS_BEGIN
from parkd.proxy.dialects.anthropic_messages import AnthropicMessages
from parkd.proxy.dialects.base import Dialect, ResponseMeta
from parkd.proxy.dialects.openai_chat import OpenAIChat
from parkd.proxy.dialects.openai_responses import OpenAIResponses
from parkd.types import CacheOutcome, CacheReport, Event, Finished, FinishReason, Started, Timings, TurnRequest
from tests.clients.said import (
    chat_document,
    chat_stream,
    messages_document,
    messages_stream,
    responses_document,
    responses_stream,
)
from tests.unit.answers.test_answer_parser import BAD, GOOD, TOOLS

REPORT = CacheReport(CacheOutcome.COLD, prompt_tokens=3, reused_tokens=0)


def events_of(answer: tuple[Any, str], reason: FinishReason) -> list[Event]:
    tools, text = answer
    count = itertools.count()
    parser = make_parser(OutputFormat(tools, THINK), TurnRequest(tools=TOOLS), "", lambda: f"id{next(count)}")
    events: list[Event] = [Started(REPORT), *(event for ch in text for event in parser.push(ch))]
    last, ended = parser.finish(reason)
    return [*events, *last, Finished(ended, REPORT, Timings())]


def told(dialect: Dialect, events: Sequence[Event], *, stream: bool) -> Any:
    """The frames of an answer, or its document."""
    encoder = dialect.encoder(TurnRequest(tools=TOOLS, stream=stream), {}, ResponseMeta("req_a", "m", 1))
    frames = [frame for event in events for frame in encoder.feed(event)]
    return b"".join(frames) if stream else encoder.document()


DIALECTS = {
    "chat": (OpenAIChat(), chat_stream, chat_document),
    "responses": (OpenAIResponses(), responses_stream, responses_document),
    "anthropic": (AnthropicMessages(), messages_stream, messages_document),
}
THOUGHT = "<think>\nhm\n</think>\n\n"
ANSWERS = {name: sample[:2] for name, sample in {**GOOD, **BAD}.items()}
MARKUP = (
    "<tool_call>",
    "<function=",
    "[TOOL_CALLS]",
    "<|python_tag|>",
    "<|tool_call>",
    "<start_function_call>",
    CALLS_BEGIN,
)


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_whole_answer_is_its_stream_put_together_at_every_cut(dialect: str, name: str) -> None:
    speaks, from_stream, from_document = DIALECTS[dialect]
    tools, text = ANSWERS[name]
    for end in range(len(THOUGHT + text) + 1):
        reason = FinishReason.LENGTH if end < len(THOUGHT + text) else FinishReason.STOP
        events = events_of((tools, (THOUGHT + text)[:end]), reason)
        whole = from_document(told(speaks, events, stream=False))
        assert from_stream(told(speaks, events, stream=True)) == whole
        assert name in BAD or not any(mark in whole[1] for mark in MARKUP)
