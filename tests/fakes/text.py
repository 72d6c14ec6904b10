"""Tokens and text of the deterministic engine.

Ids 0..255 are the bytes of UTF-8 text, the ids above are special tokens, so text made from ids is tokenised to the
same ids again.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from parkd.engine_adapter.base import Rendered
from parkd.errors import InvalidRequest
from tests.fakes.images import shown

SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>")
FIRST_SPECIAL_ID = 256
END_TOKEN_ID = FIRST_SPECIAL_ID + SPECIAL_TOKENS.index("<|im_end|>")
ROLES = frozenset({"system", "user", "assistant", "tool"})


class FakeTokenizer:
    """UTF-8 bytes and a few special tokens."""

    def __init__(self, special_tokens: tuple[str, ...] = SPECIAL_TOKENS) -> None:
        self.special_tokens = special_tokens
        self.control_tokens = special_tokens
        self._pattern = re.compile("(" + "|".join(re.escape(token) for token in special_tokens) + ")")

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in self._pattern.split(text):
            if piece in self.special_tokens:
                ids.append(FIRST_SPECIAL_ID + self.special_tokens.index(piece))
            else:
                ids.extend(piece.encode())
        return ids

    def encode_parts(self, parts: Sequence[str], control: frozenset[str]) -> list[int]:
        ids: list[int] = []
        for place, part in enumerate(parts):
            assert place % 2 == 0 or part in control
            ids += self.encode(part) if place % 2 else part.encode()
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        parts = (
            bytes([i]) if i < FIRST_SPECIAL_ID else self.special_tokens[i - FIRST_SPECIAL_ID].encode()
            for i in token_ids
        )
        return b"".join(parts).decode(errors="replace")


class FakeTemplate:
    """A plain chat template: `<|im_start|>role\\ncontent<|im_end|>\\n`, tools as JSON in front."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        kwargs: Mapping[str, Any],
        *,
        add_generation_prompt: bool = True,
    ) -> Rendered:
        start, end = SPECIAL_TOKENS
        parts = [f"{start}tools\n{json.dumps(list(tools), sort_keys=True, ensure_ascii=False)}{end}\n"] if tools else []
        for message in messages:
            role = message["role"]
            if role not in ROLES:
                raise InvalidRequest(f"The chat template knows no role {role!r}.", param="messages")
            calls = message.get("tool_calls")
            called = json.dumps(calls, sort_keys=True, ensure_ascii=False) if calls else ""
            text = f"{shown(message.get('content') or '')}{called}"
            parts.append(f"{start}{role}\n{text}{end}\n")
        return Rendered("".join(parts) + (f"{start}assistant\n" if add_generation_prompt else ""))


class FakeTextStream:
    """Holds back half characters."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    @property
    def mid_character(self) -> bool:
        return bool(self._decoder.getstate()[0])

    def push(self, token_ids: Sequence[int]) -> str:
        data = b"".join(
            bytes([i]) if i < FIRST_SPECIAL_ID else SPECIAL_TOKENS[i - FIRST_SPECIAL_ID].encode() for i in token_ids
        )
        return self._decoder.decode(data)

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)
