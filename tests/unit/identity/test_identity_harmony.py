"""Answers in harmony come back: one answer has several openers, and a result's opener has the tool's name in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import pytest

from parkd.engine_adapter.base import Rendered
from parkd.identity.builder import IdentityBuilder
from parkd.identity.output_memory import OutputMemory, Said, json_key
from parkd.identity.profile import probe_template
from parkd.types import TurnRequest
from tests.unit.identity.identity_fakes import BLOCK, FINGERPRINT, WordTokenizer

TEMPLATE = """
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}
{%- if message.reasoning_content %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.reasoning_content + '<|end|>' }}
{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson }}{{ '<|call|>' }}
{%- elif message.role == 'assistant' %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
{%- elif message.role == 'tool' %}
{{- '<|start|>functions.' + message.name + ' to=assistant<|channel|>commentary<|message|>' + message.content }}
{{- '<|end|>' }}
{%- else %}
{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}"""
MARKS = ("<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|call|>", "<|return|>", "<|constrain|>")


class Harmony:
    def __init__(self) -> None:
        self._template = jinja2.Environment().from_string(TEMPLATE)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        kwargs: Mapping[str, Any],
        *,
        add_generation_prompt: bool = True,
    ) -> Rendered:
        return Rendered(self._template.render(messages=messages, add_generation_prompt=add_generation_prompt))


def test_openers_are_what_every_turn_of_a_role_begins_with() -> None:
    profile = probe_template(Harmony())
    assert profile.openers["assistant"] == "<|start|>assistant"
    assert profile.openers["user"] == "<|start|>user<|message|>"
    assert profile.openers["tool"] == "<|start|>functions."


@pytest.mark.parametrize("thinks", [True, False])
def test_every_call_of_a_conversation_keeps_its_tokens(thinks: bool) -> None:
    words, memory = WordTokenizer(MARKS), OutputMemory(1 << 20, ["<|return|>", "<|call|>"])
    builder = IdentityBuilder(words, Harmony(), FINGERPRINT, BLOCK, 1 << 20, answers=memory)
    talk: list[dict[str, Any]] = [{"role": "user", "content": "Look twice"}]
    known: list[int] = []
    for name, value in (("look", "one"), ("touch", "two"), ("look", "three")):
        prompt = builder.build(TurnRequest(messages=talk))
        assert prompt.token_ids[: len(known)].tolist() == known
        thought = f"For {value}."  # Not the name: the turn is found by it, behind its second opener.
        head = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant" if thinks else ""
        # The template writes another order, and one space.
        ids = words.encode(
            f'{head}<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{{"a":  "{value}"}}'
        )
        memory.remember(prompt, ids, Said((), thought if thinks else "", ((name, json_key({"a": value})),)))
        known = [*prompt.token_ids.tolist(), *ids]
        call = {"id": name, "type": "function", "function": {"name": name, "arguments": {"a": value}}}
        said = {"reasoning_content": thought} if thinks else {}
        talk += [
            {"role": "assistant", "content": "", "tool_calls": [call], **said},
            {"role": "tool", "tool_call_id": name, "name": name, "content": f"found {value}"},
        ]
    last = builder.build(TurnRequest(messages=talk))
    assert last.token_ids[: len(known)].tolist() == known
    assert memory.spliced == 1 + 2 + 3
