"""What is gone on from, of earlier prompts, is what a fresh start would find: ids, segments and boundaries."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from parkd.engine_adapter.base import Rendered
from parkd.identity import splice as splicing
from parkd.identity.builder import IdentityBuilder
from parkd.identity.output_memory import OutputMemory, Said
from parkd.types import PromptIdentity
from tests.fakes.text import FakeTemplate, FakeTokenizer
from tests.unit.identity.identity_fakes import ChatMl, WordTokenizer, make_builder, say, talk

WORDS = ("one", "two", "three", "<|start|>", "<|end|>", "user", "assistant", " ", "\n", "</think>")


def heard(text: str) -> Said:
    return Said((text,))


def odd_ids(tokenizer: WordTokenizer, text: str) -> list[int]:
    """The same text in other tokens than the tokenizer's: letter by letter."""
    return [token_id for letter in text for token_id in tokenizer.encode(letter)]


def as_told(identity: PromptIdentity) -> tuple[Any, ...]:
    return identity.token_ids.tolist(), identity.segments, identity.boundaries, identity.prefix_hashes


@pytest.mark.parametrize("seed", range(12))
def test_a_builder_that_remembers_builds_what_a_new_one_does(seed: int) -> None:
    dice = random.Random(seed)
    tokenizer = WordTokenizer()
    memory = OutputMemory(1 << 20, ["<|end|>"])
    builder = make_builder(tokenizer, answers=memory)
    talks: list[list[dict[str, Any]]] = [[say("user", "start")]]
    spliced = 0
    for _ in range(40):
        messages = [*dice.choice(talks)]
        change = dice.random()
        if change < 0.15 and len(messages) > 2:  # a branch
            messages = messages[: dice.randrange(1, len(messages)) | 1]
        elif change < 0.3 and len(messages) > 2:  # an answer that somebody edited, or whose thinking came along
            place = dice.randrange(1, len(messages), 2)
            messages[place] = (
                {**messages[place], "reasoning_content": "hm"} if change < 0.22 else say("assistant", "no")
            )
        identity = builder.build(talk(*messages))
        before = memory.spliced
        again = make_builder(tokenizer, answers=memory).build(talk(*messages))
        spliced += memory.spliced - before
        assert as_told(identity) == as_told(again)
        answer = "".join(dice.choices(WORDS[:3], k=3))
        if dice.random() < 0.7:
            memory.remember(identity, odd_ids(tokenizer, answer), heard(answer))
        talks.append([*messages, say("assistant", answer), say("user", "".join(dice.choices(WORDS, k=4)))])
    assert spliced > 10


def counted(builder: IdentityBuilder, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    turns: list[int] = []
    plain = splicing.Splicer._step

    def step(self: splicing.Splicer, turn: Any, index: int, *rest: Any) -> splicing.Step:
        turns.append(index)
        return plain(self, turn, index, *rest)

    monkeypatch.setattr(splicing.Splicer, "_step", step)
    return turns


def test_only_what_is_new_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = OutputMemory(1 << 20, ["<|end|>"])
    tokenizer = WordTokenizer()
    builder = make_builder(tokenizer, answers=memory)
    messages = [say("user", "start")]
    looked_up = counted(builder, monkeypatch)
    for number in range(8):
        identity = builder.build(talk(*messages))
        memory.remember(identity, odd_ids(tokenizer, f"answer {number}"), heard(f"answer {number}"))
        messages += [say("assistant", f"answer {number}"), say("user", "more " * 30)]
    builder.build(talk(*messages))
    assert looked_up == [1, 3, 5, 7, 9, 11, 13, 15]


def test_a_long_history_is_gone_through_with_its_first_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with the next turn, though nothing was remembered before."""
    memory = OutputMemory(1 << 20, ["<|end|>"])
    tokenizer = WordTokenizer()
    builder = make_builder(tokenizer, answers=memory)
    messages = [say(role, f"{role} {number} " * 9) for number in range(4) for role in ("user", "assistant")]
    messages.append(say("user", "and?"))
    first = builder.build(talk(*messages))
    memory.remember(first, odd_ids(tokenizer, "answer"), heard("answer"))
    looked_up = counted(builder, monkeypatch)
    builder.build(talk(*messages, say("assistant", "answer"), say("user", "more")))
    assert looked_up == [9]
    assert memory.spliced == 1


def test_an_answer_learnt_since_is_found() -> None:
    memory = OutputMemory(1 << 20, ["<|end|>"])
    tokenizer = WordTokenizer()
    builder = make_builder(tokenizer, answers=memory)
    first = builder.build(talk(say("user", "start")))
    memory.remember(first, odd_ids(tokenizer, "other"), heard("other"))
    messages = [say("user", "start"), say("assistant", "answer"), say("user", "more")]
    builder.build(talk(*messages))
    assert memory.spliced == 0
    memory.remember(first, odd_ids(tokenizer, "answer"), heard("answer"))
    builder.build(talk(*messages))
    assert memory.spliced == 1


class CallsEndOtherwise(FakeTemplate):
    """Only turns that call end in the model's end token, as in templates with several marks for the end of a turn."""

    def render(self, messages: Any, tools: Any, kwargs: Any, *, add_generation_prompt: bool = True) -> Rendered:
        ends = ["<|im_end|>" if message.get("tool_calls") else "." for message in messages]
        turns = [
            f"<|im_start|>{message['role']}\n{message['content']}{end}\n"
            for message, end in zip(messages, ends, strict=True)
        ]
        return Rendered("".join(turns) + ("<|im_start|>assistant\n" if add_generation_prompt else ""))


@pytest.mark.parametrize("question", ["And why?", "<|im_start|>"])
def test_an_answer_ends_before_the_next_turn(question: str) -> None:
    """What lies between it and the end token of a later turn stays in the prompt."""
    tokenizer, memory = FakeTokenizer(), OutputMemory(1 << 20, ["<|im_end|>"])
    builder = IdentityBuilder(tokenizer, CallsEndOtherwise(), b"f" * 16, 256, 1 << 20, answers=memory)
    memory.remember(builder.build(talk(say("user", "start"))), tokenizer.encode("Yes"), heard("Yes"))
    calls = [{"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}]
    messages = [say("user", "start"), say("assistant", "Yes"), say("user", question)]
    messages.append({"role": "assistant", "content": "", "tool_calls": calls})
    identity = builder.build(talk(*messages, {"role": "tool", "content": "seen", "tool_call_id": "c"}))
    assert f"<|im_start|>user\n{question}." in tokenizer.decode(identity.token_ids.tolist())
    assert memory.spliced == 0


class OneOpenerForResults(ChatMl):
    """Puts consecutive tool results under one opener, that of a user, as Qwen's template does."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        kwargs: Mapping[str, Any],
        *,
        add_generation_prompt: bool = True,
    ) -> Rendered:
        joined: list[dict[str, Any]] = []
        for message in messages:
            if message["role"] != "tool":
                joined.append(dict(message))
                continue
            result = f"<tool>{message['content']}"
            if joined and joined[-1].get("results"):
                joined[-1]["content"] += result
            else:
                joined.append({"role": "user", "content": result, "results": True})
        return super().render(joined, tools, kwargs, add_generation_prompt=add_generation_prompt)


def contains(ids: list[int], part: list[int]) -> bool:
    return any(ids[start : start + len(part)] == part for start in range(len(ids)))


def call(place: int) -> dict[str, Any]:
    return {"id": f"call_{place}", "type": "function", "function": {"name": "write", "arguments": {"n": place}}}


@pytest.mark.parametrize("calls", range(1, 6))
def test_answers_behind_parallel_results_of_equal_text_are_found(calls: int) -> None:
    """Found by use 30: the second result `ok` was looked for in a later turn, and the answers up to there were lost."""
    tokenizer, memory = WordTokenizer(), OutputMemory(1 << 20, ["<|end|>"])
    builder = make_builder(tokenizer, OneOpenerForResults(), answers=memory)
    messages, answers = [say("user", "go")], []
    for turn in range(6):
        prompt = builder.build(talk(*messages))
        name = f"answer {turn}"
        answers.append(odd_ids(tokenizer, name))
        memory.remember(prompt, answers[-1], heard(name))
        messages.append(say("assistant", name))
        for one in (builder, make_builder(tokenizer, OneOpenerForResults(), answers=memory)):
            told = one.build(talk(*messages, say("user", "and"))).token_ids.tolist()
            lost = [answer for answer in answers if not contains(told, answer)]
            assert not lost, turn
        made = [call(place) for place in range(calls if turn == 0 else 1)]
        messages.append(say("assistant", f"call {turn}", tool_calls=made))
        texts = ["wrote a.txt", *["ok"] * (len(made) - 1)] if turn == 0 else ["ok"]
        messages += [say("tool", text, tool_call_id=one["id"]) for text, one in zip(texts, made, strict=True)]
