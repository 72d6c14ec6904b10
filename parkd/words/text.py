"""Incremental detokenization: token ids to text, a piece at a time.

A token may contain part of a UTF-8 character, so tokens are converted to bytes, and an incremental decoder holds back
incomplete characters. Each token is processed once, so the total time is linear in the answer's length.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, Protocol

from parkd.errors import ModelError

SPACE_MARK = "\u2581"
"""Represents a space in SentencePiece vocabularies."""
ANSWER_MARKS = frozenset(
    {
        "<think>",
        "</think>",
        "[THINK]",
        "[/THINK]",
        "<seed:think>",
        "</seed:think>",
        "<|channel>",
        "<channel|>",
        "<tool_call>",
        "</tool_call>",
        "<|tool_call>",
        "<tool_call|>",
        '<|"|>',
        "<start_function_call>",
        "<end_function_call>",
        "<escape>",
        "<|python_tag|>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
    }
)
"""Special tokens that are kept in an answer's text, because they delimit thinking and tool calls. All other special
tokens produce no text."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenTable(Protocol):
    """The part of `tokenizers.Tokenizer` that is used here."""

    def id_to_token(self, token_id: int) -> str | None: ...


class BytesOfTokens(Protocol):
    """The bytes that each token adds to an answer's text."""

    def __getitem__(self, token_id: int) -> bytes:
        """The token's bytes; empty for a token that adds no text."""


class TokenBytes:
    """The bytes of each token of a vocabulary, cached. Thread-safe: at worst, two threads look up the same token."""

    def __init__(self, table: TokenTable, decoder: dict[str, Any] | None, special_ids: Iterable[int]) -> None:
        """`decoder` is the `decoder` entry of `tokenizer.json`. Raises ModelError if its type is not supported."""
        self._table = table
        self._special = frozenset(special_ids)
        self._to_bytes = _bytes_rule(decoder)
        self._known: dict[int, bytes] = {}

    @classmethod
    def of(cls, backend: Any, shown: Container[str] = ANSWER_MARKS) -> TokenBytes:
        """Built from a `tokenizers.Tokenizer`. Special tokens produce no bytes, except those in `shown`."""
        content = json.loads(backend.to_str())
        special = [e["id"] for e in content["added_tokens"] if e["special"] and e["content"] not in shown]
        return cls(backend, content["decoder"], special)

    def __getitem__(self, token_id: int) -> bytes:
        """The token's bytes. Empty for a hidden special token, and for an id outside the vocabulary (embeddings are
        often padded)."""
        known = self._known.get(token_id)
        if known is None:
            token = None if token_id in self._special else self._table.id_to_token(token_id)
            known = self._known[token_id] = b"" if token is None else self._to_bytes(token)
        return known


class TextAssembler:
    """Assembles the text of one answer. The text continues the prompt, so a leading space of the first token is
    kept."""

    def __init__(self, token_bytes: BytesOfTokens) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    @property
    def mid_character(self) -> bool:
        """Whether the tokens so far end inside a character, whose first bytes are held back."""
        return bool(self._decoder.getstate()[0])

    def push(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(b"".join([self._token_bytes[int(token)] for token in token_ids]))

    def flush(self) -> str:
        """The remaining text, after the last token. An incomplete character becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)


def _bytes_rule(decoder: dict[str, Any] | None) -> Callable[[str], bytes]:
    """The function from a token's text in the vocabulary to its bytes. Raises ModelError."""
    kinds = _decoder_kinds(decoder)
    if "ByteLevel" in kinds:
        characters = _byte_level_characters()

        def byte_level(token: str) -> bytes:
            try:
                return bytes([characters[character] for character in token])
            except KeyError:
                return token.encode()  # Added tokens are stored as plain text.

        return byte_level
    if kinds & {"ByteFallback", "Metaspace"}:

        def byte_fallback(token: str) -> bytes:
            byte = _BYTE_TOKEN.fullmatch(token)
            return bytes([int(byte[1], 16)]) if byte else token.replace(SPACE_MARK, " ").encode()

        return byte_fallback
    raise ModelError(f"The tokenizer's decoder ({', '.join(sorted(kinds)) or 'none'})is not supported.")


def _decoder_kinds(decoder: dict[str, Any] | None) -> set[str]:
    if decoder is None:
        return set()
    kinds = {str(decoder["type"])}
    for inner in decoder.get("decoders", []):
        kinds |= _decoder_kinds(inner)
    return kinds


def _byte_level_characters() -> dict[str, int]:
    """GPT-2's byte-level alphabet, character -> byte: a printable Latin-1 byte is represented by its own character, the
    others by the code points from 256 on, in order."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(itself)]
    characters = {chr(byte): byte for byte in itself}
    characters.update({chr(256 + place): byte for place, byte in enumerate(others)})
    return characters
