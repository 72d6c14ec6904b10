"""Protocols for a model's input and output: tokenizers, chat templates, images, the text of answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from parkd.state import ImageFacts, ImageSize, ImageTokens
from parkd.types import Proof


class Tokenizer(Protocol):
    """Text to ids and back. Thread-safe."""

    special_tokens: tuple[str, ...]
    """Texts that the tokenizer splits at before anything else, so that the text between two of them is tokenised
    alone."""
    control_tokens: tuple[str, ...]
    """Texts of the tokens that are no text by the model's own files, such as those between turns."""

    def encode(self, text: str) -> list[int]:
        """Ids of a rendered prompt. Special tokens in the text are recognised; none is added."""

    def encode_parts(self, parts: Sequence[str], control: frozenset[str]) -> list[int]:
        """Ids of a rendered prompt in parts, which are in turns text and a token of `control`: in the text none of
        `control` is recognised, but all other special tokens are."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids, including special tokens. For reports, not for answers."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """What a chat template writes."""

    text: str
    proof: Proof | None = None
    """Confirms the text. Until then work with it may begin, but nothing of an answer may be sent; None: there is
    nothing to confirm."""

    def proven(self) -> str:
        """The text, once it is confirmed. Raises the error if it is not."""
        if self.proof is not None:
            self.proof()
        return self.text


class ChatTemplate(Protocol):
    """Messages to the text a model reads. Thread-safe."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        kwargs: Mapping[str, Any],
        *,
        add_generation_prompt: bool = True,
    ) -> Rendered:
        """Raises InvalidRequest with the template's message if the template refuses the messages."""


class ImageReader(Protocol):
    """What identifies images before they are read. Thread-safe, and too slow for the event loop."""

    tokens: ImageTokens
    sees_itself: bool
    """State inside an image depends on all of it, so nothing can resume there."""

    def size(self, data: bytes) -> ImageSize:
        """The size of an image file by its header, without decoding it. Raises InvalidRequest as `facts` does."""

    def facts(self, data: bytes) -> ImageFacts:
        """The facts of an image file. Raises InvalidRequest if it cannot be read or is too large."""


class Embedder(Protocol):
    """Vectors for texts, computed apart from all conversations. Thread-safe, and too slow for the event loop."""

    ranks: bool
    """Its vectors have one number, how well a document answers a query."""
    most_tokens: int
    """The longest text."""

    def tokens(self, text: str) -> list[int]:
        """The ids of a text, with those that the vocabulary puts around every text."""

    def pair(self, query: str, document: str) -> list[int]:
        """The ids of a document and the query that it is to answer."""

    def embed(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """`[dimensions]`, as the model gives it: not normalised. Raises EngineFailure."""


class TextStream(Protocol):
    """Turns ids into text, piece by piece. Holds back incomplete characters."""

    @property
    def mid_character(self) -> bool:
        """Whether the tokens so far end inside a character, whose beginning is held back."""

    def push(self, token_ids: Sequence[int]) -> str: ...

    def flush(self) -> str:
        """The rest, after the last token."""


class ResponseReader(Protocol):
    """Parses one answer as the model's own files declare.

    Events have a `type`, `region_open`, `region_chunk` (with `text`, and `dirty` where only the whole has a meaning) or
    `region_close` (with `value`), and a `field`, the key of the message.
    """

    initial: Sequence[Mapping[str, Any]]
    """Events of regions that the prompt has opened already."""

    def closing(self, field: str, text: str) -> int:
        """Length of the mark at the start of `text` that closes the field's region; 0 if there is none."""

    def feed(self, text: str) -> Sequence[Mapping[str, Any]]:
        """Raises, usually ValueError, if the answer does not fit; the reader must not be used afterwards."""

    def finish(self) -> Sequence[Mapping[str, Any]]:
        """Ends the answer. Raises as `feed` does."""
