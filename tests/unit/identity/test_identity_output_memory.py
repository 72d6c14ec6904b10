"""Answers that come back are the tokens they were, or are rendered."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from parkd.identity.builder import IdentityBuilder
from parkd.identity.output_memory import OutputMemory, RememberedAnswer, Said, json_key
from parkd.types import PromptIdentity, TurnRequest
from tests.fakes.text import FakeTemplate, FakeTokenizer

ASK = {"role": "user", "content": "Look there."}
GENERATED = 'Sure.\n<tool_call>{"name": "look", "arguments": {"b": 1.0, "a": "é"}}</tool_call>'
SAID = Said(("Sure.",), "", (("look", json_key({"a": "é", "b": 1})),))


def call(arguments: Any, name: str = "look") -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}


def answer(content: str = "Sure.", **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": [call('{"a":"é","b":1}')], **fields}


class Kit:
    def __init__(self, limit_bytes: int = 1 << 20) -> None:
        self.tokenizer = FakeTokenizer()
        self.memory = OutputMemory(limit_bytes, ["<|im_end|>"])
        self.builder = IdentityBuilder(self.tokenizer, FakeTemplate(), b"f" * 16, 256, 1 << 20, answers=self.memory)
        self.plain = IdentityBuilder(self.tokenizer, FakeTemplate(), b"f" * 16, 256, 1 << 20)

    def build(self, *messages: dict[str, Any], namespace: str = "") -> PromptIdentity:
        return self.builder.build(TurnRequest(messages=messages, namespace=namespace))

    def rendered(self, *messages: dict[str, Any], namespace: str = "") -> PromptIdentity:
        return self.plain.build(TurnRequest(messages=messages, namespace=namespace))

    def answered(self, prompt: PromptIdentity, text: str = GENERATED, said: Said = SAID) -> None:
        self.memory.remember(prompt, self.tokenizer.encode(text), said)


def test_the_generated_ids_stand_where_the_answer_was_rendered() -> None:
    """Report 24: arguments come back re-sorted."""
    kit = Kit()
    first = kit.build(ASK)
    kit.answered(first)
    second = kit.build(ASK, answer(), {"role": "user", "content": "And?"})
    text = kit.tokenizer.decode(second.token_ids.tolist())
    head = kit.tokenizer.decode(first.token_ids.tolist()) + GENERATED
    assert text.startswith(head + "<|im_end|>\n<|im_start|>user\nAnd?")
    assert np.array_equal(second.units, second.token_ids.view(np.uint64))
    assert second.segments[-1].stop == len(second)
    assert [span.label for span in second.segments][-2:] == ["message 3 (user)", "generation prompt"]
    places = {span.label: span.start for span in second.segments}
    assert kit.tokenizer.decode(second.token_ids[places["message 3 (user)"] :].tolist()).startswith("<|im_start|>user")


def test_answers_behind_a_spliced_one_are_found_too() -> None:
    kit = Kit()
    talk = [ASK]
    for number in range(3):
        kit.answered(kit.build(*talk), f"No {number}\u00a0.", Said((f"No {number}.",)))
        talk += [{"role": "assistant", "content": f"No {number}."}, {"role": "user", "content": f"Why {number}?"}]
    text = kit.tokenizer.decode(kit.build(*talk).token_ids.tolist())
    assert [text.count(f"No {number}\u00a0.") for number in range(3)] == [1, 1, 1]


@pytest.mark.parametrize(
    "changed",
    [
        answer("Sure. "),
        answer("sure."),
        answer(tool_calls=[call('{"a":"é","b":2}')]),
        answer(tool_calls=[call('{"a":"é","b":true}')]),
        answer(tool_calls=[call('{"a":"é"')]),
        answer(tool_calls=[call('{"a":"é","b":1}', "book")]),
        answer(tool_calls=[call('{"a":"é","b":1}'), call("{}")]),
        answer(tool_calls=[]),
        answer(reasoning_content="I thought"),
    ],
)
def test_whatever_differs_is_rendered(changed: dict[str, Any]) -> None:
    kit = Kit()
    kit.answered(kit.build(ASK))
    assert np.array_equal(kit.build(ASK, changed).units, kit.rendered(ASK, changed).units)


def test_another_prefix_or_namespace_is_another_answer() -> None:
    kit = Kit()
    kit.answered(kit.build(ASK))
    other = {"role": "user", "content": "Look here."}
    assert np.array_equal(kit.build(other, answer()).units, kit.rendered(other, answer()).units)
    theirs = kit.build(ASK, answer(), namespace="b")
    assert np.array_equal(theirs.units, kit.rendered(ASK, answer(), namespace="b").units)


def test_thinking_that_the_template_drops_does_not_come_back() -> None:
    """Report 22: what is left is found up to the boundary before the answer."""
    kit = Kit()
    kit.answered(kit.build(ASK), "<think>Hm.</think>Yes.", Said(("Yes.",), "Hm."))
    back = {"role": "assistant", "content": "Yes."}
    prompt = kit.build(ASK, back)
    assert np.array_equal(prompt.units, kit.rendered(ASK, back).units)
    first = kit.build(ASK)
    assert first.segments[-1].start in prompt.boundaries


def test_of_several_answers_to_one_prompt_the_one_sent_back_is_taken() -> None:
    kit = Kit()
    prompt = kit.build(ASK)
    for word in ("one", "two", "three"):
        kit.answered(prompt, f"{word}\u00a0", Said((word,)))
    text = kit.tokenizer.decode(kit.build(ASK, {"role": "assistant", "content": "two"}).token_ids.tolist())
    assert "two\u00a0" in text
    assert "three" not in text


def test_forgotten_answers_are_rendered_again_and_the_others_stay() -> None:
    forgotten: list[int] = []
    kit = Kit()
    kit.memory._on_forgotten = lambda: forgotten.append(1)
    prompts = [kit.build({"role": "user", "content": f"Question {number}"}) for number in range(3)]
    for prompt in prompts:
        kit.answered(prompt)
    of_first = kit.memory.all()[0]
    assert kit.memory.forget(lambda each: each is of_first) == 1
    assert kit.memory.forget(lambda _each: False) == 0
    assert forgotten == [1]
    assert kit.memory.memory_bytes == sum(one.bytes for one in kit.memory.all())
    texts = [
        kit.tokenizer.decode(kit.build({"role": "user", "content": f"Question {n}"}, answer()).token_ids.tolist())
        for n in range(3)
    ]
    assert ["1.0" in text for text in texts] == [False, True, True]


def test_the_bound_holds_and_the_oldest_go() -> None:
    kit = Kit(limit_bytes=8000)
    prompts = [kit.build({"role": "user", "content": f"Question {number}"}) for number in range(20)]
    for prompt in prompts:
        kit.answered(prompt)
        assert kit.memory.memory_bytes <= 8000
    assert kit.memory.memory_bytes == sum(one.bytes for one in kit.memory.all())
    newest = kit.build({"role": "user", "content": "Question 19"}, answer())
    oldest = kit.build({"role": "user", "content": "Question 0"}, answer())
    assert "1.0" in kit.tokenizer.decode(newest.token_ids.tolist())
    assert "1.0" not in kit.tokenizer.decode(oldest.token_ids.tolist())
    huge = RememberedAnswer(b"p" * 16, np.zeros(10_000, np.int32), SAID)
    assert not kit.memory.keep(huge)


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ('{"a": 1, "b": [2]}', '{"b":[2.0],"a":1}', True),
        ('{"a": 1}', '{"a": true}', False),
        ('{"a": "1"}', '{"a": 1}', False),
        ('{"a": "\\u00e9"}', '{"a": "é"}', True),
        ('{"a": null}', "{}", False),
    ],
)
def test_json_values_are_compared_and_not_their_spelling(a: str, b: str, same: bool) -> None:
    assert (json_key(json.loads(a)) == json_key(json.loads(b))) is same
