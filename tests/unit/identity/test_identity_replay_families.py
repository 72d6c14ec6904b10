"""Answers that come back are spliced under real tokenizers and templates (fetched as in test_identity_families)."""

from __future__ import annotations

import pytest
from test_identity_families import RealTemplate, RealTokenizer, _load

from parkd.identity.builder import IdentityBuilder
from parkd.identity.output_memory import OutputMemory, Said, json_key
from parkd.types import TurnRequest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ENDS = {
    "qwen3": "<|im_end|>",
    "llama3_1": "<|eot_id|>",
    "gemma3": "<end_of_turn>",
    "deepseek_v3": "<｜end▁of▁sentence｜>",  # noqa: RUF001 - the token's own characters
}
ASK = {"role": "user", "content": "Hi there"}
TOOL = {"type": "function", "function": {"name": "look", "description": "d", "parameters": {"type": "object"}}}


def kit(family: str) -> tuple[RealTokenizer, IdentityBuilder, OutputMemory]:
    loaded = _load(family)
    words, memory = RealTokenizer(loaded), OutputMemory(1 << 20, [ENDS[family]])
    return words, IdentityBuilder(words, RealTemplate(loaded), bytes(16), 256, 1 << 20, answers=memory), memory


@pytest.mark.parametrize("family", ENDS)
def test_odd_tokens_of_an_answer_stay(family: str) -> None:
    """Report 44 too: a prompt that ended in an empty think block is continued behind it."""
    words, builder, memory = kit(family)
    ids = [number for letter in "Hello you" for number in words.encode(letter)]
    assert ids != words.encode("Hello you")
    for kwargs in ({}, {"enable_thinking": False}):
        first = builder.build(TurnRequest(messages=[ASK], template_kwargs=kwargs))
        memory.remember(first, ids, Said(("Hello you",)))
        talk = [ASK, {"role": "assistant", "content": "Hello you"}, {"role": "user", "content": "And?"}]
        second = builder.build(TurnRequest(messages=talk, template_kwargs=kwargs))
        known = [*first.token_ids.tolist(), *ids]
        assert second.token_ids[: len(known)].tolist() == known
        assert second.segments[-1].stop == len(second)


def test_resorted_arguments_are_spliced_into_qwens_calls() -> None:
    words, builder, memory = kit("qwen3")
    first = builder.build(TurnRequest(messages=[ASK], tools=[TOOL]))
    ids = words.encode('<tool_call>\n{"name": "look",  "arguments": {"b": 1.0, "a": "x"}}\n</tool_call>')
    memory.remember(first, ids, Said((), "", (("look", json_key({"a": "x", "b": 1})),)))
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"a":"x","b":1}'}}
    talk = [ASK, {"role": "assistant", "content": None, "tool_calls": [call]}]
    talk.append({"role": "tool", "tool_call_id": "c", "content": "found"})
    second = builder.build(TurnRequest(messages=talk, tools=[TOOL]))
    known = [*first.token_ids.tolist(), *ids]
    assert second.token_ids[: len(known)].tolist() == known
