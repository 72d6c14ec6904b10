"""A whole answer is what a client puts together from the stream of the same answer, wherever the limit cuts it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any

import jiter
import pytest

from parkd.answers.base import OutputFormat
from parkd.answers.deepseek_calls import CALLS_BEGIN
from parkd.answers.formats import THINK
from parkd.answers.parser import make_parser
from parkd.proxy.dialects.anthropic_messages import AnthropicMessages
from parkd.proxy.dialects.base import Dialect, ResponseMeta
from parkd.proxy.dialects.openai_chat import OpenAIChat
from parkd.proxy.dialects.openai_responses import OpenAIResponses
from parkd.types import CacheOutcome, CacheReport, Finished, FinishReason, Started, Timings, TurnRequest
from tests.unit.answers.test_answer_parser import BAD, GOOD, TOOLS

REPORT = CacheReport(CacheOutcome.COLD, prompt_tokens=3, reused_tokens=0)
Said = tuple[str, str, list[tuple[str, Any]], str]
"""Thinking, text, calls (name, arguments as each dialect gives them) and how it ended."""


def told(dialect: Dialect, answer: tuple[Any, str], reason: FinishReason, *, stream: bool) -> Any:
    """The frames of an answer, or its document."""
    tools, text = answer
    request = TurnRequest(tools=TOOLS, stream=stream)
    count = itertools.count()
    parser = make_parser(OutputFormat(tools, THINK), request, "", lambda: f"id{next(count)}")
    events: list[Any] = [Started(REPORT), *(event for ch in text for event in parser.push(ch))]
    last, ended = parser.finish(reason)
    encoder = dialect.encoder(request, {}, ResponseMeta("req_a", "m", 1))
    frames = [frame for event in [*events, *last, Finished(ended, REPORT, Timings())] for frame in encoder.feed(event)]
    return b"".join(frames) if stream else encoder.document()


def datas(frames: bytes) -> list[Any]:
    lines = [line[6:] for line in frames.decode().split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def chat_stream(frames: bytes) -> Said:
    thinking, text, calls, ended = "", "", list[list[str]](), ""
    for chunk in datas(frames):
        for choice in chunk["choices"]:
            delta = choice["delta"]
            thinking += delta.get("reasoning_content", "")
            text += delta.get("content") or ""
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(calls):
                    calls.append([call["function"]["name"], ""])
                calls[call["index"]][1] += call["function"]["arguments"]
            ended = choice["finish_reason"] or ended
    return thinking, text, [(name, arguments) for name, arguments in calls], ended


def chat_document(document: Mapping[str, Any]) -> Said:
    (choice,) = document["choices"]
    message = choice["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return message.get("reasoning_content", ""), message["content"] or "", calls, choice["finish_reason"]


def responses_stream(frames: bytes) -> Said:
    thinking, text, calls, ended = "", "", list[list[str]](), ""
    for data in datas(frames):
        match data["type"]:
            case "response.reasoning_text.delta":
                thinking += data["delta"]
            case "response.output_text.delta":
                text += data["delta"]
            case "response.output_item.added" if data["item"]["type"] == "function_call":
                calls.append([data["item"]["name"], ""])
            case "response.function_call_arguments.delta":
                calls[-1][1] += data["delta"]
            case "response.completed" | "response.incomplete":
                ended = data["response"]["status"]
    return thinking, text, [(name, arguments) for name, arguments in calls], ended


def responses_document(document: Mapping[str, Any]) -> Said:
    thinking, text, calls = "", "", []
    for item in document["output"]:
        if item["type"] == "function_call":
            calls.append((item["name"], item["arguments"]))
        elif item["type"] == "reasoning":
            thinking += item["content"][0]["text"]
        else:
            text += item["content"][0]["text"]
    return thinking, text, calls, document["status"]


def messages_stream(frames: bytes) -> Said:
    """Arguments as Anthropic's SDK makes them of the pieces: what is whole of them."""
    thinking, text, calls, ended = "", "", list[list[str]](), ""
    for data in datas(frames):
        if data["type"] == "content_block_start" and data["content_block"]["type"] == "tool_use":
            calls.append([data["content_block"]["name"], ""])
        elif data["type"] == "message_delta":
            ended = data["delta"]["stop_reason"]
        elif data["type"] == "content_block_delta":
            delta = data["delta"]
            thinking += delta.get("thinking", "")
            text += delta.get("text", "")
            if "partial_json" in delta:
                calls[-1][1] += delta["partial_json"]
    values = [(name, jiter.from_json((pieces or "{}").encode(), partial_mode=True)) for name, pieces in calls]
    return thinking, text, values, ended


def messages_document(document: Mapping[str, Any]) -> Said:
    blocks = document["content"]
    thinking = "".join(block["thinking"] for block in blocks if block["type"] == "thinking")
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    calls = [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]
    return thinking, text, calls, document["stop_reason"]


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
        cut = (tools, (THOUGHT + text)[:end])
        whole = from_document(told(speaks, cut, reason, stream=False))
        assert from_stream(told(speaks, cut, reason, stream=True)) == whole
        assert name in BAD or not any(mark in whole[1] for mark in MARKUP)
