"""What the clients of a random life send: conversations that go on, fork, are edited and asked again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from parkd.state import BLOCK_TOKENS
from tests.integration.api.api_harness import Messages
from tests.integration.lives.life_dialects import DIALECTS, Expected
from tests.lives.life import Choices

LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvw   ", dtype=np.uint8)
MOST_TALKS = 5


@dataclass(frozen=True)
class Client:
    """Who asks."""

    key: str = ""
    namespace: str = ""
    """As the server calls it."""


NOBODY = Client()
"""Of a server without keys."""


@dataclass(frozen=True)
class Ask:
    """One request, without what the server may answer differently by chance."""

    messages: Messages
    max_tokens: int = 8
    stop: str | None = None
    mode: str = "use"
    steering: Mapping[str, float] | None = None
    streams: bool = False
    dialect: str = "chat"
    client: Client = NOBODY
    budget: int | None = None
    """Of thinking, in tokens."""
    tools: Mapping[str, Any] = field(default_factory=dict)
    """Schemas by name."""


@dataclass
class Talk:
    """A conversation as its client knows it."""

    messages: Messages
    """Up to the last question."""
    steering: Mapping[str, float] | None = None
    answer: Expected | None = None
    """To the last question; None: not known."""
    client: Client = NOBODY


@dataclass
class Talks(Choices):
    """Conversations over one tokenizer and template. All choices are made by `random`."""

    engine: Any
    random: np.random.Generator
    room: int
    """Tokens that a prompt may have."""
    step: int
    """Tokens between checkpoints."""
    scales: tuple[Mapping[str, float] | None, ...] = (None,)
    clients: tuple[Client, ...] = (NOBODY,)
    known: list[Talk] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.systems = [self._system(self.room // 30, 1), self._system(self.room // 8, BLOCK_TOKENS)]

    def text(self, characters: int) -> str:
        return bytes(self.random.choice(LETTERS, characters)).decode()

    # -- places --

    def tokens(self, messages: Messages, *, asks: bool = True) -> int:
        return len(self.ids(messages, asks=asks))

    def ids(self, messages: Messages, *, asks: bool = True) -> list[int]:
        if not messages:  # Templates refuse that, and there is nothing before the first message.
            return []
        text = self.engine.template.render(messages, (), {}, add_generation_prompt=asks).text
        return list(self.engine.tokenizer.encode(text))

    def aimed(self, messages: Messages) -> Messages:
        """Often lengthened, so that the prompt ends at a place of interest, or just beside it."""
        if self.chance(0.2):
            return messages
        step = self.pick([BLOCK_TOKENS, BLOCK_TOKENS, self.step])
        beside = self.pick([-1, 0, 1, 1, 1, 1, 1, 2])  # 1: all but the last token fill whole blocks
        missing = (beside - self.tokens(messages)) % step
        last = messages[-1]
        return [*messages[:-1], {**last, "content": last["content"] + self.text(missing)}]

    def start_of(self, messages: Messages, index: int) -> int:
        """The position at which the content of a message begins."""
        header = self.tokens([{**messages[index], "content": ""}], asks=False) - 2  # its end and a line break
        return self.tokens(messages[:index], asks=False) + header

    # -- what may be asked --

    def question(self) -> dict[str, str]:
        most = self.room // self.pick([8, 20, 80])
        return {"role": "user", "content": self.text(self.up_to(most))}

    def opened(self) -> Talk:
        head = [] if self.chance(0.2) else self.pick(self.systems)
        return self._keep(
            Talk(self.aimed([*head, self.question()]), self.pick(self.scales), client=self.pick(self.clients))
        )

    def continued(self, talk: Talk | None = None) -> Talk:
        """The next turn; sometimes the client sends back less than it was told, or something else."""
        talk = talk or self.again()
        said = talk.answer if talk.answer is not None else Expected("Nothing.", "stop")
        if self.chance(0.15):
            said = replace(said, text=said.text[self.up_to(len(said.text) + 1) - 1 :])
        elif self.chance(0.05):
            said = Expected(self.text(5), "stop")
        turn = [*sent_back(said, len(talk.messages)), self.question()]
        talk.messages, talk.answer = self.aimed([*talk.messages, *turn]), None
        if self.tokens(talk.messages) > self.room:
            self.known.remove(talk)
            return self.opened()
        return talk

    def again(self) -> Talk:
        """Often the last."""
        if not self.known:
            return self.opened()
        return self.known[-1] if self.chance(0.4) else self.pick(self.known)

    def earlier(self, talk: Talk | None = None) -> Talk:
        """Back to a question before."""
        talk = talk or self.again()
        asked = [index for index, message in enumerate(talk.messages) if message["role"] == "user"]
        return self._keep(Talk(talk.messages[: self.pick(asked) + 1], talk.steering, client=talk.client))

    def forked(self) -> Talk:
        """A message is another from some place on; what came after it is gone, or not."""
        talk = self.again()
        index = int(self.random.integers(len(talk.messages)))
        content, start = talk.messages[index]["content"], self.start_of(talk.messages, index)
        at = int(self.random.integers(len(content) + 1))
        if edges := [
            place - start
            for place in range(-(-start // BLOCK_TOKENS) * BLOCK_TOKENS, start + len(content) + 1, BLOCK_TOKENS)
        ]:
            at = self.pick([at, *edges])
        role = talk.messages[index]["role"]
        new = content[:at] + self.pick(["x", "y", "z"]) + self.text(self.up_to(40))
        edited = {**talk.messages[index], "content": new}
        rest = talk.messages[index + 1 :]
        if role == "user" and self.chance(0.7):
            rest = []
        messages = self.aimed([*talk.messages[:index], edited, *rest])
        if messages[-1]["role"] != "user" or self.tokens(messages) > self.room:
            return self.opened()
        return self._keep(Talk(messages, talk.steering, client=talk.client))

    def steered(self) -> Talk:
        """The same words under another setting."""
        return self._keep(replace(self.again(), steering=self.pick(self.scales), answer=None))

    def any(self) -> Talk:
        weights = {
            self.opened: 2,
            self.continued: 6,
            self.again: 2,
            self.earlier: 2,
            self.forked: 4,
            self.steered: len(self.scales) > 1,
        }
        shares = np.array([float(weight) for weight in weights.values()])
        makers = list(weights)
        return makers[int(self.random.choice(len(makers), p=shares / shares.sum()))]()

    def ask_of(self, talk: Talk) -> Ask:
        """How the talk's prompt is sent this time."""
        prompt = self.tokens(talk.messages)
        to_edge = -prompt % BLOCK_TOKENS + self.pick([0, 1])
        most = to_edge if 0 < to_edge < 48 and self.chance(0.6) else self.pick([1, 2, 8, 8, 20])
        stop = self.text(1) if self.chance(0.15) else None
        mode = self.pick(["read", "off"]) if self.chance(0.08) else "use"
        return Ask(
            talk.messages,
            most,
            stop,
            mode,
            talk.steering,
            streams=self.chance(0.3),
            dialect=self.pick(list(DIALECTS)),
            client=talk.client if self.chance(0.7) else self.pick(self.clients),
        )

    def _system(self, characters: int, multiple: int) -> Messages:
        """A system prompt whose end is at a multiple of so many tokens."""
        message = {"role": "system", "content": self.text(characters)}
        missing = -self.tokens([message], asks=False) % multiple
        return [{**message, "content": message["content"] + self.text(missing)}]

    def _keep(self, talk: Talk) -> Talk:
        self.known = [*self.known[1 - MOST_TALKS :], talk]
        return talk


def sent_back(answer: Expected, place: int) -> Messages:
    """An answer as the history has it, with results of its calls. `place`: messages before it."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text}
    if answer.thinking:
        message["reasoning_content"] = answer.thinking
    calls = [
        {"id": f"call_{place}_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate(answer.calls)
    ]
    if calls:
        message["tool_calls"] = calls
    results = [
        {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": "ok"}
        for call in calls
    ]
    return [message, *results]
