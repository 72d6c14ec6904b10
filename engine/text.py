"""Token ids to text, a piece at a time.

Bytes are joined, never texts: a token may hold half a character, so each token is turned into its bytes and a UTF-8
decoder keeps what is not yet a character. Every token is looked at once, so an answer costs time linear in its length.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.errors import ModelLoadError

SPACE_MARK = "\u2581"
"""Stands for a space in SentencePiece vocabularies."""
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
"""Special tokens that are part of an answer's text: they mark its thinking and its tool calls, and many vocabularies
call them special. All others say nothing."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenTable(Protocol):
    """The part of the library's fast tokenizer that is used here."""

    def id_to_token(self, token_id: int) -> str | None: ...


class BytesOfTokens(Protocol):
    """What the text of an answer is made of."""

    def __getitem__(self, token_id: int) -> bytes:
        """Empty for a token that says nothing."""


class TokenBytes:
    """The bytes of each token of a vocabulary. Thread-safe: two threads at worst look up the same token."""

    def __init__(self, table: TokenTable, decoder: dict[str, Any] | None, special_ids: Iterable[int]) -> None:
        """`decoder` is the decoder's part of `tokenizer.json`. Raises ModelLoadError if it is of an unknown kind."""
        self._table = table
        self._special = frozenset(special_ids)
        self._to_bytes = _bytes_rule(decoder)
        self._known: dict[int, bytes] = {}

    @classmethod
    def of(cls, backend: Any, shown: Container[str] = ANSWER_MARKS) -> TokenBytes:
        """From a `tokenizers.Tokenizer`. Of its special tokens only those in `shown` have bytes."""
        content = json.loads(backend.to_str())
        special = [e["id"] for e in content["added_tokens"] if e["special"] and e["content"] not in shown]
        return cls(backend, content["decoder"], special)

    def __getitem__(self, token_id: int) -> bytes:
        """Empty for a special token, and for an id that the vocabulary lacks (embeddings are often padded)."""
        known = self._known.get(token_id)
        if known is None:
            token = None if token_id in self._special else self._table.id_to_token(token_id)
            known = self._known[token_id] = b"" if token is None else self._to_bytes(token)
        return known


@dataclass(frozen=True, slots=True)
class Piece:
    """What became visible; `stop_string` is set when one was met, and then nothing comes after."""

    text: str
    stop_string: str | None = None


class TextAssembler:
    """One answer's text. What could be the head of a stop string is withheld until that is settled.

    The text continues the prompt's: a leading space of the first token stays.
    """

    def __init__(self, token_bytes: BytesOfTokens, stop: Sequence[str]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = [_StopMatcher(text) for text in stop if text]
        self._withheld = ""
        self._stopped = False

    def push(self, token_ids: Sequence[int]) -> Piece:
        data = b"".join([self._token_bytes[int(token)] for token in token_ids])
        return self._show(self._decoder.decode(data))

    def flush(self) -> Piece:
        """The rest; half a character becomes U+FFFD."""
        piece = self._show(self._decoder.decode(b"", final=True))
        if self._stopped:
            return piece
        rest, self._withheld = self._withheld, ""
        return Piece(piece.text + rest)

    def _show(self, text: str) -> Piece:
        if self._stopped:
            return Piece("")
        pending = self._withheld + text
        if not self._stops:
            return Piece(pending)
        seen = len(self._withheld)
        for place, character in enumerate(text, seen + 1):
            # The stop string that ends first counts, however the text was cut in tokens; of two, the longer.
            met = [stop.text for stop in self._stops if stop.feed(character)]
            if met:
                longest = max(met, key=len)
                self._stopped = True
                self._withheld = ""
                return Piece(pending[: place - len(longest)], longest)
        keep = max(stop.matched for stop in self._stops)
        self._withheld = pending[len(pending) - keep :]
        return Piece(pending[: len(pending) - keep])


class _StopMatcher:
    """Finds one string in a stream of characters (Knuth, Morris and Pratt 1977)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        """Characters at the end of the stream that are a head of the string."""
        self._borders = _borders(text)

    def feed(self, character: str) -> bool:
        """True when the string is complete; the matcher is spent then."""
        while self.matched and self.text[self.matched] != character:
            self.matched = self._borders[self.matched - 1]
        if self.text[self.matched] == character:
            self.matched += 1
        return self.matched == len(self.text)


def _borders(text: str) -> list[int]:
    """For each head of the text, the length of the longest shorter head that it also ends in."""
    borders = [0] * len(text)
    length = 0
    for place in range(1, len(text)):
        while length and text[place] != text[length]:
            length = borders[length - 1]
        if text[place] == text[length]:
            length += 1
        borders[place] = length
    return borders


def _bytes_rule(decoder: dict[str, Any] | None) -> Callable[[str], bytes]:
    kinds = _decoder_kinds(decoder)
    if "ByteLevel" in kinds:
        characters = _byte_level_characters()

        def byte_level(token: str) -> bytes:
            try:
                return bytes([characters[character] for character in token])
            except KeyError:
                return token.encode()  # An added token is written as it is.

        return byte_level
    if kinds & {"ByteFallback", "Metaspace"}:

        def byte_fallback(token: str) -> bytes:
            byte = _BYTE_TOKEN.fullmatch(token)
            return bytes([int(byte[1], 16)]) if byte else token.replace(SPACE_MARK, " ").encode()

        return byte_fallback
    raise ModelLoadError(f"The tokenizer's decoder ({', '.join(sorted(kinds)) or 'none'}) is of an unknown kind.")


def _decoder_kinds(decoder: dict[str, Any] | None) -> set[str]:
    if decoder is None:
        return set()
    kinds = {str(decoder["type"])}
    for inner in decoder.get("decoders", []):
        kinds |= _decoder_kinds(inner)
    return kinds


def _byte_level_characters() -> dict[str, int]:
    """The printable stand-ins of GPT-2's byte-level vocabularies: printable Latin-1 bytes stand for themselves, the
    others for code points from 256 on, in order."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(itself)]
    characters = {chr(byte): byte for byte in itself}
    characters.update({chr(256 + place): byte for place, byte in enumerate(others)})
    return characters
