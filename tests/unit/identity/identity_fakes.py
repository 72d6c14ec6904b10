"""A word tokenizer with special tokens and a ChatML template: small, exact and without a model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hypothesis import settings

from parkd.engine_adapter.base import ChatTemplate, Rendered, Tokenizer
from parkd.errors import InvalidRequest
from parkd.identity.builder import IdentityBuilder
from parkd.identity.output_memory import OutputMemory
from parkd.types import TurnRequest

BLOCK = 8
SEEDED = settings(deadline=None, derandomize=True, max_examples=100)
"""For every property test: the same examples each run, and a busy machine is no failure."""
FINGERPRINT = b"f" * 16


class WordTokenizer:
    """Special tokens first, then words with the space before them; ids are handed out in order of appearance."""

    def __init__(self, special_tokens: Sequence[str] = ("<|start|>", "<|end|>", "<tool>")) -> None:
        self.special_tokens = tuple(special_tokens)
        self.control_tokens = self.special_tokens
        self.texts_encoded: list[str] = []
        self._special = re.compile("|".join(map(re.escape, self.special_tokens)) or r"(?!)")
        self._ids: dict[str, int] = {}
        self._words: list[str] = []

    def encode(self, text: str) -> list[int]:
        self.texts_encoded.append(text)
        words: list[str] = []
        start = 0
        for match in self._special.finditer(text):
            words += [*self.split(text[start : match.start()]), match[0]]
            start = match.end()
        return [self._id(word) for word in words + self.split(text[start:])]

    def encode_parts(self, parts: Sequence[str], control: frozenset[str]) -> list[int]:
        assert all(part in control for part in parts[1::2])
        return [
            self._id(word) for place, part in enumerate(parts) for word in ([part] if place % 2 else self.split(part))
        ]

    def split(self, text: str) -> list[str]:
        return re.findall(r" ?\w+|\s|[^\w\s]+", text)

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(self._words[token_id] for token_id in token_ids)

    def _id(self, word: str) -> int:
        if word not in self._ids:
            self._ids[word] = len(self._words)
            self._words.append(word)
        return self._ids[word]


class ChatMl:
    """ChatML with tools in the system turn. `refuse` may raise for messages this template does not take."""

    def __init__(self, refuse: Callable[[Sequence[Mapping[str, Any]]], str | None] = lambda messages: None) -> None:
        self._refuse = refuse
        self.seen: list[Sequence[Mapping[str, Any]]] = []

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        kwargs: Mapping[str, Any],
        *,
        add_generation_prompt: bool = True,
    ) -> Rendered:
        self.seen.append(messages)
        refusal = self._refuse(messages)
        if refusal is not None:
            raise InvalidRequest(refusal)
        text = ""
        rest = list(messages)
        if tools:
            text = "<|start|>system\n"
            if rest[0]["role"] == "system":
                text += f"{rest.pop(0)['content']}\n"
            text += "".join(f"{json.dumps(tool)}\n" for tool in tools) + "<|end|>\n"
        for message in rest:
            text += f"<|start|>{message['role']}\n{message['content']}"
            for call in message.get("tool_calls", ()):
                text += f"<tool>{call['function']['name']} {json.dumps(call['function']['arguments'])}"
            text += "<|end|>\n"
        if add_generation_prompt:
            text += "<|start|>assistant\n" + ("<|start|>think\n" if kwargs.get("think") else "")
        return Rendered(text)


def say(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def talk(*messages: dict[str, Any], **more: Any) -> TurnRequest:
    return TurnRequest(messages=messages, **more)


def make_builder(
    tokenizer: Tokenizer | None = None,
    template: ChatTemplate | None = None,
    memo_bytes: int = 1 << 20,
    answers: OutputMemory | None = None,
    context_tokens: int | None = None,
) -> IdentityBuilder:
    words, chat = tokenizer or WordTokenizer(), template or ChatMl()
    return IdentityBuilder(words, chat, FINGERPRINT, BLOCK, memo_bytes, answers=answers, context_tokens=context_tokens)
