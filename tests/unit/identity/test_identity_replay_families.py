"""Answers that come back are spliced under real tokenizers and templates (fetched as in test_identity_families)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from parkd.answers.formats import output_format
from parkd.answers.parser import make_parser
from parkd.answers.readers.deepseek_calls import CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END, SEPARATOR
from parkd.answers.transcript import Transcript
from parkd.identity.builder import IdentityBuilder
from parkd.identity.output_memory import OutputMemory, Said, json_key
from parkd.types import FinishReason, TurnRequest
from tests.unit.identity.test_identity_families import RealTemplate, RealTokenizer, _load

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ENDS = {
    "qwen3": "<|im_end|>",
    "llama3_1": "<|eot_id|>",
    "gemma3": "<end_of_turn>",
    "deepseek_v3": "<｜end▁of▁sentence｜>",  # noqa: RUF001 - the token's own characters
}
ASK = {"role": "user", "content": "Hi there"}
TOOL = {"type": "function", "function": {"name": "look", "description": "d", "parameters": {"type": "object"}}}


def kit(family: str, template: str | None = None) -> tuple[RealTokenizer, IdentityBuilder, OutputMemory]:
    loaded = _load(family)
    loaded.chat_template = template or loaded.chat_template
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


def deepseek(arguments: str) -> str:
    call = f"{CALL_BEGIN}function{SEPARATOR}look\n```json\n{arguments}\n```{CALL_END}"
    return f"{CALLS_BEGIN}{call}\n{call}{CALLS_END}"  # behind a single call this template forgets the end


LLAMA = """{{- bos_token }}{%- for message in messages %}
{{- '<|start_header_id|>' + ('ipython' if message.role == 'tool' else message.role) + '<|end_header_id|>\\n\\n' }}
{%- if message.tool_calls %}{%- set call = message.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' }}
{%- else %}{%- if tools and loop.first %}{{- tools | tojson + '\\n\\n' }}{%- endif %}{{- message.content }}{%- endif %}
{{- '<|eot_id|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
"""Of Llama's form; the tokenizer's package has one without tools."""
CALLS: dict[str, Callable[[str], str]] = {
    "qwen3": lambda arguments: f'<tool_call>\n{{"name": "look",  "arguments": {arguments}}}\n</tool_call>',
    "llama3_1": lambda arguments: f'{{"name": "look",  "parameters": {arguments}}}',
    "deepseek_v3": deepseek,
}


@pytest.mark.parametrize("family", CALLS)
def test_generated_calls_are_parsed_and_spliced_when_they_come_back_resorted(family: str) -> None:
    template = LLAMA if family == "llama3_1" else str(_load(family).chat_template)
    words, builder, memory = kit(family, template)
    output = output_format(template)
    request = TurnRequest(messages=[ASK], tools=[TOOL])
    first = builder.build(request)
    written = CALLS[family]('{"b": 1.0, "a": "x"}')
    ids = words.encode(written)
    parser, transcript = make_parser(output, request, words.decode(first.token_ids[-64:].tolist()), str), Transcript()
    for event in [*parser.push(words.decode(ids)), *parser.finish(FinishReason.STOP)[0]]:
        transcript.feed(event)
    said = transcript.said()
    calls = written.count('"b": 1.0')
    assert said == Said((), "", (("look", json_key({"a": "x", "b": 1})),) * calls)
    memory.remember(first, ids, said)
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"a":"x","b":1}'}}
    talk = [ASK, {"role": "assistant", "content": None, "tool_calls": [call] * calls}]
    talk.append({"role": "tool", "tool_call_id": "c", "content": "found"})
    second = builder.build(TurnRequest(messages=talk, tools=[TOOL]))
    known = [*first.token_ids.tolist(), *ids]
    assert second.token_ids[: len(known)].tolist() == known
