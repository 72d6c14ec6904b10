"""Logprobs in the forms of OpenAI's APIs."""

from __future__ import annotations

import codecs
import math
from collections.abc import Mapping, Sequence
from typing import Any

from parkd.types import TokenLogprob

EXCLUDED = -9999.0
"""OpenAI's number for a token that is not possible at all, since JSON has no infinity."""


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> Mapping[str, Any]:
    """`logprobs` of a choice in chat completions."""
    return {"content": scored(tokens), "refusal": None}


def scored(tokens: Sequence[TokenLogprob]) -> list[Mapping[str, Any]]:
    """The tokens in the form of chat completions and responses."""
    return [
        {**_entry(token.piece, token.logprob), "top_logprobs": [_entry(piece, logprob) for piece, logprob in token.top]}
        for token in tokens
    ]


class LegacyLogprobs:
    """`logprobs` of a choice in legacy completions, piece by piece."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def of(self, tokens: Sequence[TokenLogprob]) -> Mapping[str, Any]:
        """The tokens that come next. Those that were most probable include the token itself, as in OpenAI's API."""
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(token.piece))
        return {
            "tokens": [_name(token.piece) for token in tokens],
            "token_logprobs": [_number(token.logprob) for token in tokens],
            "top_logprobs": [
                {_name(piece): _number(logprob) for piece, logprob in (*token.top, (token.piece, token.logprob))}
                for token in tokens
            ],
            "text_offset": offsets,
        }


def _entry(piece: bytes, logprob: float) -> Mapping[str, Any]:
    return {"token": piece.decode(errors="replace"), "logprob": _number(logprob), "bytes": list(piece)}


def _name(piece: bytes) -> str:
    """The token as a string that no other token has; OpenAI writes parts of characters so."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _number(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else EXCLUDED
