"""Random lives of a server whose model thinks, calls a tool and is cut at any token of it.

    <think>thought</think>text<tool_call>{...}</tool_call> END    what the model would write, a byte a token
    <think>thou\\n</think>t</think>text<tool_call> ...             with a budget: its end takes the place of bytes
    |------ limit -----|                                          where the answer is cut

What a question is answered follows from the number at its head, so the answer is known before it is asked.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import Any

from parkd.answers.thinking import ThinkingLimits
from tests.clients.client_kit import FORMAT, SCHEMA
from tests.integration.api.api_harness import MIB, Messages
from tests.integration.lives.api_lives import Life
from tests.integration.lives.life_dialects import DIALECTS, Expected
from tests.integration.lives.life_server import Reply
from tests.integration.lives.life_talks import NOBODY, Ask, Talk, Talks

OPEN, CLOSE, CALL, CALL_END = "<think>", "</think>", "<tool_call>", "</tool_call>"
FORCED = f"\n{CLOSE}".encode()
"""What ends thinking when its budget is used up."""
LOOK = '{"name": "look", "arguments": {"path": "a/é", "deep": [1, {"b": null}]}}'
AGAIN = '{"name": "look", "arguments": {"path": "c \\" it"}}'
SCRIPTS = (
    f"{OPEN}\nIs it a/é? I look 媽🤗.\n{CLOSE}\n\nI look at it.\n{CALL}\n{LOOK}\n{CALL_END}",
    f"{OPEN}媽🤗é it is{CLOSE}It is 🤗 there, as it was.",
    f"{OPEN}\nTwo.\n{CLOSE}\n\n{CALL}\n{LOOK}\n{CALL_END}\n{CALL}\n{AGAIN}\n{CALL_END}",
    f"No look: it is 媽. {CALL}{AGAIN}{CALL_END}",
)
STOPS = (" it", "look", "é", "s")
QUESTION = re.compile(r"user\n#(\d)")
OPENED = re.compile(r'\s*\{"name": "look", "arguments": (\{.*)', re.DOTALL)


def script_of(prompt: str) -> str:
    """What is answered to the last question that has a number."""
    numbers = QUESTION.findall(prompt)
    return SCRIPTS[int(numbers[-1]) if numbers else 0]


def script_for(messages: Messages) -> str:
    """What is answered to these messages: an edit may have taken the number of the last question."""
    return script_of("".join(f"user\n{each['content']}\n" for each in messages if each["role"] == "user"))


def written(script: str, budget: int | None, limit: int) -> tuple[str, bool]:
    """The text of the first tokens, thinking no longer than its budget allows, and whether the limit cut it."""
    data = script.encode()
    if budget is not None and script.startswith(OPEN):
        place = len(OPEN) + budget
        while data[place : place + 1] and data[place] & 0xC0 == 0x80:
            place += 1  # inside a character
        if CLOSE.encode() not in data[:place]:
            data = data[:place] + FORCED + data[place + len(FORCED) :]
    return data[:limit].decode(errors="replace"), limit <= len(data)


def read(text: str, stop: str | None, *, cut: bool) -> Expected:
    """What a client is told of an answer's text."""
    thinking, body = "", text
    if text.startswith(OPEN):
        thought, _, body = text.removeprefix(OPEN).partition(CLOSE)
        thinking, body = thought.strip(), body.lstrip()
    said, *sections = body.split(CALL)
    if sections:
        said = said.rstrip()
    if stop is not None and stop in said:
        return Expected(said[: said.index(stop)], "stop string", thinking)
    calls = []
    for section in sections:
        if (opened := OPENED.match(section)) is not None:
            calls.append(("look", "".join(_object(opened[1]))))
        _, closed, after = section.partition(CALL_END)
        if closed and after.strip():  # the beginning of a mark, as which it is not known yet
            said += after
    ended = "length" if cut else "calls" if calls else "stop"
    return Expected(said, ended, thinking, tuple(calls))


def _object(text: str) -> list[str]:
    """The characters of the object at the start of a text, as far as it goes."""
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except ValueError:
        return list(text)
    return list(text[:end])


@dataclass
class ScriptedTalks(Talks):
    """Questions have numbers, and answers are cut everywhere."""

    def question(self) -> dict[str, str]:
        asked = super().question()
        return {**asked, "content": f"#{self.random.integers(len(SCRIPTS))} {asked['content']}"}

    def ask_of(self, talk: Talk) -> Ask:
        ask = super().ask_of(talk)
        script = script_for(talk.messages)
        budget = self.up_to(script.find(CLOSE) + 2) if self.chance(0.4) else None
        most = self.up_to(len(script.encode()) + 12)
        stop = self.pick(STOPS) if self.chance(0.2) else None
        dialects = [name for name, dialect in DIALECTS.items() if budget is None or dialect.has_budgets]
        return replace(
            ask, max_tokens=most, stop=stop, budget=budget, tools={"look": SCHEMA}, dialect=self.pick(dialects)
        )


class ScriptedLife(Life):
    """Answers are remembered, so that a cut one that comes back is read as it was written."""

    def __init__(self, kind: str, seed: int) -> None:
        super().__init__(kind, seed)
        self.clients = (NOBODY,)
        make = self._make

        def scripted() -> Any:
            engine = make()
            engine.script = script_of
            return engine

        self._make = scripted
        plain = self.talks
        self.talks = ScriptedTalks(plain.engine, self.random, plain.room, plain.step, plain.scales)
        self._steerings = {self._key_digest(NOBODY, scale): scale for scale in plain.scales}

    @property
    def answers(self) -> dict[str, Any]:
        engine = self.reference.engine
        vocab_size, encode, stream = engine.info.vocab_size, engine.tokenizer.encode, engine.text_stream
        limits = ThinkingLimits(FORMAT.reasoning, None, vocab_size, encode, stream)
        return {
            "answer_bytes": MIB,
            "output": FORMAT,
            "build_mask": lambda request, tail, _: limits.over(request, tail, None),
        }

    def expected(self, ask: Ask) -> Expected:
        text, cut = written(script_for(ask.messages), ask.budget, ask.max_tokens)
        return read(text, ask.stop, cut=cut)

    def check_told(self, ask: Ask, reply: Reply, *_: Any) -> None:
        """Prompts hold what was remembered, which is not what a template makes of them."""
        assert reply.said is not None
        thinking, _, calls, ended = reply.said
        self.counts["cut"] += ended in ("length", "max_tokens", "incomplete")
        self.counts["budget"] += ask.budget is not None
        self.counts["thought"] += bool(thinking)
        self.counts["calls"] += bool(calls)

    async def check_slots(self, _server: Any) -> None:
        """There is one client."""

    def dialects_of(self, ask: Ask) -> list[str]:
        """Calls of the history have other ids and other words in each, and not all have a field for budgets."""
        if any(message.get("tool_calls") for message in ask.messages):
            return [ask.dialect]
        return [name for name in super().dialects_of(ask) if ask.budget is None or DIALECTS[name].has_budgets]
