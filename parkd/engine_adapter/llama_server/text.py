"""Tokens and text of a llama-server."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from parkd.engine_adapter.llama_server.client import UpstreamClient
from parkd.engine_adapter.parts import encode_parts_with

MOST_SPECIAL_TOKENS = 64
"""Most candidates from the chat template that are tested at start, each with two requests."""
_QUOTED = re.compile(r"""['"]([^'"\\\n]{1,64})['"]""")
_MARK = re.compile(r"<\|?[A-Za-z0-9_\u2581\uff5c|/ -]{1,48}\|?>|\[/?[A-Z_]{2,32}\]")


class UpstreamTokenizer:
    """A `Tokenizer` that asks the server. Thread-safe."""

    def __init__(self, client: UpstreamClient, special_tokens: tuple[str, ...]) -> None:
        self._client = client
        self.special_tokens = special_tokens
        self.control_tokens = special_tokens

    def encode(self, text: str) -> list[int]:
        return self._client.tokenize(text) if text else []

    def encode_parts(self, parts: Sequence[str], control: frozenset[str]) -> list[int]:
        return encode_parts_with(self._client.tokenize, self.decode, parts, control)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Waits for the server, so not for the event loop."""
        return self._client.detokenize(token_ids) if token_ids else ""


class UpstreamText:
    """The text of one answer, as the server decodes it."""

    def __init__(self, take: Callable[[], str]) -> None:
        """`take` returns the text that arrived since its last call."""
        self._take = take

    @property
    def mid_character(self) -> bool:
        """Never: the server sends whole characters."""
        return False

    def push(self, token_ids: Sequence[int]) -> str:  # noqa: ARG002 - the Protocol's
        return self._take()

    def flush(self) -> str:
        return self._take()


def first_tokens(client: UpstreamClient) -> list[int]:
    """The ids that the server adds in front of a prompt (the beginning-of-sequence token, if any)."""
    plain, opened = client.tokenize("a"), client.tokenize("a", add_special=True)
    extra = len(opened) - len(plain)
    return opened[:extra] if opened[extra:] == plain else []


def special_tokens(client: UpstreamClient, named: Sequence[str], template: str) -> tuple[str, ...]:
    """The model's special tokens among `named` and the likely candidates in the chat template.

    A special token is a text that the tokenizer maps to one id with special tokens enabled, and to several without.
    Prompts are cut and cached at special tokens, so one that is missed costs time, but never gives a wrong id.
    """
    quoted = (text for text in _QUOTED.findall(template) if _MARK.fullmatch(text))
    likely = dict.fromkeys(text for text in (*named, *_MARK.findall(template), *quoted) if text)
    return tuple(text for text in list(likely)[:MOST_SPECIAL_TOKENS] if is_special(client, text))


def is_special(client: UpstreamClient, text: str) -> bool:
    return len(client.tokenize(text)) == 1 and len(client.tokenize(text, parse_special=False)) > 1
