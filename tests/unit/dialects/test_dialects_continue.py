"""Which requests end with a message that the answer continues."""

from __future__ import annotations

from typing import Any

import pytest

from parkd.errors import InvalidRequest
from parkd.proxy.dialects.anthropic_messages import AnthropicMessages
from parkd.proxy.dialects.openai_chat import OpenAIChat
from parkd.types import TurnRequest

ASK = {"role": "user", "content": "q"}
BEGUN = {"role": "assistant", "content": "It is"}
SCHEMA = {"type": "object"}


def chat(messages: list[dict[str, Any]], **more: Any) -> TurnRequest:
    return OpenAIChat().parse({"messages": messages, **more}, {})


def anthropic(messages: list[dict[str, Any]], **more: Any) -> TurnRequest:
    return AnthropicMessages().parse({"messages": messages, "max_tokens": 8, **more}, {})


@pytest.mark.parametrize("parse", [chat, anthropic])
def test_only_a_last_message_of_the_assistant_is_continued(parse: Any) -> None:
    assert parse([ASK, BEGUN]).continues
    assert parse([ASK, {"role": "assistant", "content": [{"type": "text", "text": "It is"}]}]).continues
    assert not parse([ASK]).continues
    assert not parse([ASK, BEGUN, ASK]).continues


def test_calls_and_thinking_are_not_continued() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert not chat([ASK, {**BEGUN, "tool_calls": [call]}]).continues
    assert not chat([ASK, {**BEGUN, "reasoning_content": "Hm."}]).continues
    for block in ({"type": "tool_use", "id": "c", "name": "f", "input": {}}, {"type": "thinking", "thinking": "Hm."}):
        assert not anthropic([ASK, {"role": "assistant", "content": [block]}]).continues


def test_an_answer_that_must_have_a_form_is_a_whole_one() -> None:
    function = {"name": "f", "parameters": SCHEMA}
    json_schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    assert not chat([ASK, BEGUN], response_format=json_schema).continues
    assert not anthropic([ASK, BEGUN], output_config={"format": {"type": "json_schema", "schema": SCHEMA}}).continues
    tools = [{"type": "function", "function": function}]
    assert chat([ASK, BEGUN], tools=tools).continues
    assert not chat([ASK, BEGUN], tools=tools, tool_choice="required").continues
    tools = [{"name": "f", "input_schema": SCHEMA}]
    assert not anthropic([ASK, BEGUN], tools=tools, tool_choice={"type": "any"}).continues


def test_a_client_of_chat_may_ask_for_a_new_message() -> None:
    assert chat([ASK, BEGUN], continue_final_message=True).continues
    assert not chat([ASK, BEGUN], continue_final_message=False).continues
    with pytest.raises(InvalidRequest, match="continue_final_message"):
        chat([ASK, BEGUN], continue_final_message="no")


def test_a_new_message_and_the_last_one_continued_is_a_contradiction() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Yes"}]}
    with pytest.raises(InvalidRequest, match="contradict"):
        OpenAIChat().parse({**body, "continue_final_message": True, "add_generation_prompt": True}, {})
    for several in ({"add_generation_prompt": True}, {"continue_final_message": False, "add_generation_prompt": True}):
        OpenAIChat().parse({**body, **several}, {})


def test_n_predict_is_a_limit() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    assert OpenAIChat().parse({**body, "n_predict": 7}, {}).max_output_tokens == 7
    assert OpenAIChat().parse({**body, "n_predict": -1}, {}).max_output_tokens is None
    assert OpenAIChat().parse({**body, "n_predict": 7, "max_tokens": 3}, {}).max_output_tokens == 3
