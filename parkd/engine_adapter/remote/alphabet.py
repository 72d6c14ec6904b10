"""Prompts as characters, for servers whose tokens are not known here.

An id is the number of a character, or that of a mark, which is no character at all:

    0 ............... 0x10FFFF   characters
    0x110000 ...                 marks: where messages begin and end

In rendered text a mark is written as a private character. A client's own private characters have stand-ins there, as
control tokens have with every model, so they stay characters.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt

FIRST_MARK_ID = 0x110000
_FIRST_PRIVATE = 0x10FF00
_FIRST_SURROGATE = 0xD800
_CODEC = "utf-32-le"

Ids = npt.NDArray[np.int64]


class Mark(IntEnum):
    """Marks by their numbers. What is behind one reaches to the next."""

    SETTINGS = 0
    """What the template is told, as JSON."""
    TOOLS = 1
    """As JSON."""
    SYSTEM = 2
    USER = 3
    ASSISTANT = 4
    RESULT = 5
    """A tool's result; last, behind `CALL`, the number of its call."""
    NAME = 6
    """Of who says a message."""
    THINKING = 7
    TEXT = 8
    CALL = 9
    """A call of a tool; first the tool's name. In a result: the number of the call."""
    ARGUMENTS = 10
    END = 11
    """The end of a message, and of an answer."""

    @property
    def id(self) -> int:
        return FIRST_MARK_ID + self.value

    @property
    def text(self) -> str:
        """As rendered text has it."""
        return chr(_FIRST_PRIVATE + self.value)

    @property
    def joint(self) -> str:
        """As the text of answers has it: a surrogate, which no server's text can contain."""
        return chr(_FIRST_SURROGATE + self.value)


VOCAB_SIZE = FIRST_MARK_ID + len(Mark)


class Characters:
    """A `Tokenizer`. Stateless."""

    special_tokens: tuple[str, ...] = tuple(mark.text for mark in Mark)
    control_tokens: tuple[str, ...] = special_tokens

    def encode(self, text: str) -> list[int]:
        codes = _codes(text)
        ids: list[int] = np.where(
            (codes >= _FIRST_PRIVATE) & (codes < _FIRST_PRIVATE + len(Mark)),
            codes + (FIRST_MARK_ID - _FIRST_PRIVATE),
            codes,
        ).tolist()
        return ids

    def encode_parts(self, parts: Sequence[str], control: frozenset[str]) -> list[int]:  # noqa: ARG002 - all are
        ids: list[int] = []
        for place, part in enumerate(parts):
            ids += self.encode(part) if place % 2 else _codes(part).tolist()
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        ids = np.asarray(token_ids, dtype=np.int64)
        return text_of(np.where(ids >= FIRST_MARK_ID, ids - (FIRST_MARK_ID - _FIRST_PRIVATE), ids))


class JoinedText:
    """The text of one answer, with joints between its parts. Implements `TextStream`."""

    mid_character = False

    def push(self, token_ids: Sequence[int]) -> str:
        ids = np.asarray(token_ids, dtype=np.int64)
        return text_of(np.where(ids >= FIRST_MARK_ID, ids - (FIRST_MARK_ID - _FIRST_SURROGATE), ids))

    def flush(self) -> str:
        return ""


def _codes(text: str) -> npt.NDArray[np.int64]:
    return np.frombuffer(text.encode(_CODEC, "surrogatepass"), dtype="<u4").astype(np.int64)


def ids_of(text: str) -> list[int]:
    """The ids of characters, none of which stands for a mark."""
    ids: list[int] = _codes(text).tolist()
    return ids


def text_of(ids: npt.NDArray[np.int64]) -> str:
    """The text of ids that are characters."""
    return ids.astype("<u4").tobytes().decode(_CODEC, "surrogatepass")
