"""Where answers begin under templates that open them with nothing, with marks that vanish, or drop what was said. The
templates here are ours, with the habits of published ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import pytest

from parkd.engine_adapter.base import Rendered
from parkd.errors import InvalidRequest
from parkd.identity.builder import IdentityBuilder
from parkd.identity.output_memory import OutputMemory, Said, json_key
from parkd.identity.profile import as_shown, probe_template
from parkd.types import TurnRequest
from tests.unit.identity.identity_fakes import BLOCK, FINGERPRINT, WordTokenizer

BRACKETS = """
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '[INST]' + message.content + '[/INST]' }}
{%- elif message.role == 'tool' %}{{- '[RESULT]' + message.content + '[/RESULT]' }}
{%- elif message.role == 'system' %}{{- '[SYSTEM]' + message.content + '[/SYSTEM]' }}
{%- elif message.tool_calls %}
{%- for call in message.tool_calls %}
{{- '[CALL]' + call.function.name + (call.function.arguments | tojson) }}{% endfor %}
{{- '</s>' }}
{%- elif message.content is string %}{{- message.content + '</s>' }}
{%- else %}
{%- for block in message.content %}
{{- '[THINK]' + block.thinking + '[/THINK]' if block.type == 'thinking' else block.text }}{% endfor %}
{{- '</s>' }}
{%- endif %}
{%- endfor %}"""
"""Opens answers with nothing, drops text beside calls, and knows thinking as blocks of content."""
THINKS = """
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|assistant|>' }}
{{- '<think>' + message.reasoning_content + '</think>' if message.reasoning_content else '</think>' }}
{%- for call in message.tool_calls %}
{{- '[CALL]' + call.function.name + (call.function.arguments | tojson) }}{% endfor %}
{{- message.content + '</s>' }}
{%- else %}{{- '<|' + message.role + '|>' + message.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|><think>' }}{% endif %}"""
"""Writes another mark for an answer without thinking than a prompt ends with."""
ONE_PLACE = """
{%- for message in messages %}
{%- if message.tool_calls and message.content and message.reasoning_content %}{{- raise('one of both') }}{% endif %}
{{- '<|' + message.role + '|>' + (message.reasoning_content or '') + '|' + message.content }}
{%- for call in message.tool_calls %}
{{- '[CALL]' + call.function.name + (call.function.arguments | tojson) }}{% endfor %}
{{- '</s>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}"""
MARKS = (
    *("[INST]", "[/INST]", "[RESULT]", "[/RESULT]", "[SYSTEM]", "[/SYSTEM]", "[CALL]", "[THINK]", "[/THINK]", "</s>"),
    *("<|assistant|>", "<|user|>", "<|tool|>", "<|system|>", "<think>", "</think>"),
)


class Template:
    def __init__(self, source: str) -> None:
        def refuse(reason: str) -> str:
            raise InvalidRequest(reason)

        self._template = jinja2.Environment().from_string(source)
        self._template.globals["raise"] = refuse

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        kwargs: Mapping[str, Any],
        *,
        add_generation_prompt: bool = True,
    ) -> Rendered:
        return Rendered(self._template.render(messages=messages, add_generation_prompt=add_generation_prompt))


def called(name: str, value: str, *, text: str = "", thought: str = "") -> dict[str, Any]:
    call = {"id": name, "type": "function", "function": {"name": name, "arguments": {"a": value}}}
    message = {"role": "assistant", "content": text, "tool_calls": [call]}
    return {**message, "reasoning_content": thought} if thought else message


def result(name: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": name, "name": name, "content": content}


def kit(source: str) -> tuple[WordTokenizer, IdentityBuilder, OutputMemory]:
    words, memory = WordTokenizer(MARKS), OutputMemory(1 << 20, ["</s>"])
    return words, IdentityBuilder(words, Template(source), FINGERPRINT, BLOCK, 1 << 20, answers=memory), memory


def test_an_answer_that_is_opened_with_nothing_begins_behind_the_turn_before_it() -> None:
    profile = probe_template(Template(BRACKETS))
    assert profile.answer_openers == ("[/INST]", "[/RESULT]")
    assert probe_template(Template(THINKS)).answer_openers == ()
    words, builder, memory = kit(BRACKETS)
    talk: list[dict[str, Any]] = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Look twice"}]
    known: list[int] = []
    for name, results in (("look", 1), ("touch", 2), ("smell", 1)):
        prompt = builder.build(TurnRequest(messages=talk))
        assert prompt.token_ids[: len(known)].tolist() == known
        assert prompt.segments[-1].label == "generation prompt"
        assert prompt.generation_stays
        ids = words.encode(f'[CALL]{name}{{"a":   "{name}"}}')  # The template writes one space.
        memory.remember(prompt, ids, Said((), "", ((name, json_key({"a": name})),)))
        known = [*prompt.token_ids.tolist(), *ids]
        talk += [called(name, name), *(result(name, f"found {number}") for number in range(results))]
    last = builder.build(TurnRequest(messages=talk))
    assert last.token_ids[: len(known)].tolist() == known
    assert memory.spliced == 1 + 2 + 3
    labels = [segment.label for segment in last.segments if "(tool)" in segment.label]
    assert labels == [f"message {number} (tool)" for number in (4, 6, 7, 9)], "between two results no answer begins"


def test_text_that_a_template_drops_hides_no_turn_behind_it() -> None:
    """Also where results have no mark of their own by which they would be told from answers."""
    words, builder, memory = kit(BRACKETS.replace("'[RESULT]' + ", ""))
    talk = [{"role": "user", "content": "Look"}, called("look", "one", text="I look."), result("look", "found")]
    prompt = builder.build(TurnRequest(messages=talk))
    ids = words.encode('[CALL]touch{"a":   "two"}')
    memory.remember(prompt, ids, Said((), "", (("touch", json_key({"a": "two"})),)))
    again = builder.build(TurnRequest(messages=[*talk, called("touch", "two"), result("touch", "cold")]))
    known = [*prompt.token_ids.tolist(), *ids]
    assert again.token_ids[: len(known)].tolist() == known


@pytest.mark.parametrize("thought", ["Hm.", ""])
def test_an_answer_with_other_marks_than_a_prompt_ends_with_is_found(thought: str) -> None:
    assert probe_template(Template(THINKS)).openers["assistant"] == "<|assistant|>"
    words, builder, memory = kit(THINKS)
    talk = [{"role": "user", "content": "Look"}]
    prompt = builder.build(TurnRequest(messages=talk))
    assert not prompt.generation_stays
    ids = words.encode(f'{thought}</think>[CALL]look{{"a":   "one"}}')
    memory.remember(prompt, ids, Said((), thought, (("look", json_key({"a": "one"})),)))
    talk += [called("look", "one", thought=thought), result("look", "found")]
    again = builder.build(TurnRequest(messages=talk))
    known = [*prompt.token_ids.tolist(), *ids]
    assert again.token_ids[: len(known)].tolist() == known


def test_thinking_goes_where_the_template_looks_for_it() -> None:
    profile = probe_template(Template(BRACKETS))
    assert profile.thought_in_blocks
    message = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    blocks = [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "Yes."}]
    assert as_shown(message, profile) == {"role": "assistant", "content": blocks}
    assert as_shown({**message, "content": ""}, profile)["content"] == blocks[:1]
    _, builder, _ = kit(BRACKETS)
    talk = [{"role": "user", "content": "Is it?"}, message, {"role": "user", "content": "Sure?"}]
    assert "[/INST][THINK]Hm.[/THINK]Yes.</s>" in builder.render(TurnRequest(messages=talk))
    other = probe_template(Template(THINKS))
    assert not other.thought_in_blocks
    assert as_shown(message, other) is message


def test_text_that_may_not_stand_beside_thinking_becomes_its_end() -> None:
    """A client that sends both back is not refused, and loses neither."""
    profile = probe_template(Template(ONE_PLACE))
    assert profile.thought_excludes_text
    assert not probe_template(Template(THINKS)).thought_excludes_text
    words, builder, memory = kit(ONE_PLACE)
    talk = [{"role": "user", "content": "Look"}]
    prompt = builder.build(TurnRequest(messages=talk))
    ids = words.encode('Hm. | I look. [CALL]look{"a":   "one"}')
    memory.remember(prompt, ids, Said(("I look.",), "Hm.", (("look", json_key({"a": "one"})),)))
    talk += [called("look", "one", text="I look.", thought="Hm."), result("look", "found")]
    assert "<|assistant|>Hm.\n\nI look.|[CALL]look" in builder.render(TurnRequest(messages=talk))
    again = builder.build(TurnRequest(messages=talk))
    known = [*prompt.token_ids.tolist(), *ids]
    assert again.token_ids[: len(known)].tolist() == known
    plain = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    assert as_shown(plain, profile) is plain, "without calls there is room for both"
