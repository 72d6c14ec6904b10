"""Tokens and text of a llama-server."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

from parkd.engine_adapter.base import TextPiece
from parkd.engine_adapter.held_text import HeldText
from parkd.engine_adapter.llama_server.client import UpstreamClient

MOST_SPECIAL_TOKENS = 64
"""Tried at start, each with two requests: those that a chat template names."""
DECODED_KEPT = 256
"""Short texts of ids that are remembered: as many as requests may wait, and more."""
_QUOTED = re.compile(r"""['"]([^'"\\\n]{1,64})['"]""")
_MARK = re.compile(r"<\|?[A-Za-z0-9_\u2581\uff5c|/ -]{1,48}\|?>|\[/?[A-Z_]{2,32}\]")


class UpstreamTokenizer:
    """Thread-safe, as its client is."""

    def __init__(self, client: UpstreamClient, special_tokens: tuple[str, ...]) -> None:
        self._client = client
        self.special_tokens = special_tokens
        self._decoded: OrderedDict[tuple[int, ...], str] = OrderedDict()
        self._lock = threading.Lock()

    def encode(self, text: str) -> list[int]:
        return self._client.tokenize(text) if text else []

    def decode(self, token_ids: Sequence[int]) -> str:
        """Of a prompt's end its text is wanted twice: by a worker first, then where nobody may wait for a server."""
        key = tuple(token_ids)
        with self._lock:
            known = self._decoded.get(key)
        if known is not None or not key:
            return known or ""
        text = self._client.detokenize(key)
        with self._lock:
            self._decoded[key] = text
            if len(self._decoded) > DECODED_KEPT:
                self._decoded.popitem(last=False)
        return text


class UpstreamText:
    """One answer's text as the server makes it of the ids, held back where a stop string may begin."""

    def __init__(self, stop: Sequence[str], take: Callable[[], str]) -> None:
        """`take` gives the text that came since it was last asked."""
        self._held = HeldText(stop)
        self._take = take

    def push(self, token_ids: Sequence[int]) -> TextPiece:  # noqa: ARG002 - the Protocol's
        return self._held.release(self._take(), final=False)

    def flush(self) -> TextPiece:
        return self._held.release(self._take(), final=True)


def first_tokens(client: UpstreamClient) -> list[int]:
    """What the server puts in front of every prompt by itself."""
    plain, opened = client.tokenize("a"), client.tokenize("a", add_special=True)
    extra = len(opened) - len(plain)
    return opened[:extra] if opened[extra:] == plain else []


def special_tokens(client: UpstreamClient, named: Sequence[str], template: str) -> tuple[str, ...]:
    """Texts that the tokenizer takes for one token where special tokens are looked for, and for several where not.

    Of `named` and of what looks like one in the chat template. A token that is missed costs time, since texts are
    cut and remembered between special tokens; never a wrong id.
    """
    quoted = (text for text in _QUOTED.findall(template) if _MARK.fullmatch(text))
    likely = dict.fromkeys(text for text in (*named, *_MARK.findall(template), *quoted) if text)
    return tuple(text for text in list(likely)[:MOST_SPECIAL_TOKENS] if is_special(client, text))


def is_special(client: UpstreamClient, text: str) -> bool:
    return len(client.tokenize(text)) == 1 and len(client.tokenize(text, parse_special=False)) > 1
