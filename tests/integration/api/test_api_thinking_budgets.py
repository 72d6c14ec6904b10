"""Budgets of thinking that end anywhere, also inside a character, with a schema or a forced call due behind them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from parkd.answers.base import OutputFormat, ToolFormat
from parkd.answers.formats import THINK
from parkd.answers.parser import make_parser
from parkd.answers.structured import StructuredOutput
from parkd.answers.thinking import ThinkingLimits
from parkd.config import ModelConfig
from parkd.engine_adapter.torch_engine.engine import TorchEngine
from parkd.identity.builder import IdentityBuilder
from parkd.lane.answer import AnswerLoop
from parkd.state import EngineConfig
from parkd.types import (
    FinishReason,
    ReasoningParams,
    SamplingParams,
    TextDelta,
    ToolCallDelta,
    ToolChoice,
    ToolChoiceMode,
    TurnRequest,
)
from tests.clients.client_kit import Served, serving

BUDGETS = range(1, 26)
ANSWER = {"type": "object", "properties": {"a": {"const": "媽"}}, "required": ["a"], "additionalProperties": False}
CHAT_TOOL = {"type": "function", "function": {"name": "look", "parameters": ANSWER}}
MESSAGES = [{"role": "user", "content": "hi"}]

Body = dict[str, Any]


def chat(budget: int, due: str) -> tuple[str, Body]:
    body: Body = {"messages": MESSAGES, "max_tokens": 400, "thinking_budget": budget}
    if due == "call":
        return "/v1/chat/completions", {**body, "tools": [CHAT_TOOL], "tool_choice": "required"}
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": ANSWER}}
    return "/v1/chat/completions", {**body, "response_format": wanted}


def responses(budget: int, due: str) -> tuple[str, Body]:
    body: Body = {"input": "hi", "max_output_tokens": 400, "reasoning": {"max_tokens": budget}}
    if due == "call":
        tool = {"type": "function", "name": "look", "parameters": ANSWER}
        return "/v1/responses", {**body, "tools": [tool], "tool_choice": "required"}
    wanted = {"type": "json_schema", "name": "a", "schema": ANSWER}
    return "/v1/responses", {**body, "text": {"format": wanted}}


def messages(budget: int, due: str) -> tuple[str, Body]:
    thinking = {"type": "enabled", "budget_tokens": budget}
    body: Body = {"messages": MESSAGES, "max_tokens": 400, "thinking": thinking}
    if due == "call":
        tool = {"name": "look", "input_schema": ANSWER}
        return "/v1/messages", {**body, "tools": [tool], "tool_choice": {"type": "any"}}
    return "/v1/messages", {**body, "output_config": {"format": {"type": "json_schema", "schema": ANSWER}}}


def said(path: str, document: dict[str, Any]) -> Any:
    """The value of the answer, or the arguments of its call."""
    if path == "/v1/messages":
        last = document["content"][-1]
        return last["input"] if last["type"] == "tool_use" else json.loads(last["text"])
    if path == "/v1/responses":
        last = document["output"][-1]
        return json.loads(last["arguments"] if last["type"] == "function_call" else last["content"][0]["text"])
    message = document["choices"][0]["message"]
    calls = message.get("tool_calls")
    return json.loads(calls[0]["function"]["arguments"] if calls else message["content"])


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving("<think>" + "媽🤗é" * 6) as served:
        yield served


@pytest.mark.parametrize("due", ["schema", "call"])
@pytest.mark.parametrize("dialect", [chat, responses, messages])
def test_every_budget_ends_thinking_in_every_dialect(server: Served, dialect: Any, due: str) -> None:
    with httpx.Client(base_url=server.url, trust_env=False, timeout=30) as client:
        for budget in BUDGETS:
            path, body = dialect(budget, due)
            response = client.post(path, json=body)
            assert response.status_code == 200, (budget, response.text)
            assert said(path, response.json()) == {"a": "媽"}, budget


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchEngine]:
    layout = EngineConfig(devices=("cpu",), context_tokens=512, batch_tokens=256, draft_tokens=2)
    config = ModelConfig("random:tiny-qwen3.5-mtp-echo", tmp_path_factory.mktemp("cache"), layout=layout)
    engine = TorchEngine.load(config, fresh_seed=lambda: 4)
    yield engine
    engine.close()


@pytest.mark.parametrize("due", ["schema", "call"])
def test_every_budget_ends_the_thinking_of_random_weights(random_model: TorchEngine, due: str) -> None:
    """With drafts. Such a model writes any bytes that its grammar allows. The prompt is taken to have opened
    thinking."""
    engine, output, tail = random_model, OutputFormat(ToolFormat.HERMES, THINK), "<think>\n"
    info = engine.info
    structured = StructuredOutput(engine.tokenizer_json(), info.vocab_size, info.end_token_ids)
    limits = ThinkingLimits(THINK, None, info.vocab_size, engine.tokenizer.encode, engine.text_stream)
    identity = IdentityBuilder(engine.tokenizer, engine.template, info.fingerprint, 256, 1 << 16)
    for budget in BUDGETS[::3]:
        request = TurnRequest(
            messages=MESSAGES,
            sampling=SamplingParams(seed=budget, temperature=2.0),
            reasoning=ReasoningParams(budget_tokens=budget),
            response_schema=ANSWER if due == "schema" else None,
            tools=[CHAT_TOOL] if due == "call" else [],
            tool_choice=ToolChoice(ToolChoiceMode.REQUIRED if due == "call" else ToolChoiceMode.AUTO),
            parallel_tool_calls=False,
        )
        prompt = identity.build(request)
        mask = limits.over(request, tail, structured.mask(request, output, tail))
        engine.reset()
        engine.begin(prompt.token_ids, request.sampling, mask=mask)
        engine.extend(prompt.token_ids[:-1], cancel=threading.Event())
        events: list[Any] = []
        parser = make_parser(output, request, tail, lambda: "call")
        loop = AnswerLoop(engine, engine, request, 300, parser, threading.Event(), events.append, lambda: 0.0)
        loop.run()
        assert loop.answer.reason is not FinishReason.LENGTH, budget
        texts = [event.text for event in events if isinstance(event, TextDelta)]
        arguments = [event.arguments for event in events if isinstance(event, ToolCallDelta)]
        assert json.loads("".join(texts if due == "schema" else arguments)) == {"a": "媽"}, budget
