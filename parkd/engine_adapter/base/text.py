"""What goes in and comes out of a model: text to ids and back, chat templates, pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from parkd.types import Proof


class Tokenizer(Protocol):
    """Text to ids and back. Thread-safe."""

    special_tokens: tuple[str, ...]
    """Texts that the tokenizer cuts out before anything else, so that what lies between them is tokenised alone."""

    def encode(self, text: str) -> list[int]:
        """Ids of a rendered prompt; special tokens in the text are recognised, none is added."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids, special tokens included: for reports, not for answers."""


class UnprovenText(str):
    """A rendered prompt that is to be confirmed yet: it may be worked with, but nothing of its answer given out."""

    proof: Proof

    def __new__(cls, text: str, proof: Proof) -> UnprovenText:
        made = super().__new__(cls, text)
        made.proof = proof
        return made


def proven(text: str) -> str:
    """The text, once it is confirmed. Raises what speaks against it."""
    if isinstance(text, UnprovenText):
        text.proof.result()
    return str(text)


class ChatTemplate(Protocol):
    """Messages to the text a model reads. Thread-safe."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        kwargs: Mapping[str, Any],
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """May be an `UnprovenText`. Raises InvalidRequest when the template refuses the messages, with its words."""


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """How pictures stand in a prompt."""

    placeholder: str
    """What the chat template writes for one picture."""
    wrapped: str
    """What is tokenised in its place; it holds `token_id` once."""
    token_id: int
    """Stands at every position of a picture: what is there is told by the picture alone."""


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """What a prompt's identity needs of a picture."""

    digest: bytes
    """32 bytes over pixels, size, mode and preprocessing: equal for equal pictures, however their files are packed."""
    tokens: int
    """Positions that it takes."""


class ImageReader(Protocol):
    """What an engine does with pictures before they are read. Thread-safe, and slow: not for the event loop."""

    tokens: ImageTokens
    sees_itself: bool
    """State inside a picture depends on all of it, so nothing can go on from there."""

    def facts(self, data: bytes) -> ImageFacts:
        """Of a picture's file. Raises InvalidRequest for one that cannot be read, or is too large."""


@dataclass(frozen=True, slots=True)
class TextPiece:
    """What became visible when tokens were pushed."""

    text: str
    stop_string: str | None = None
    """Set when a stop string was met: `text` ends before it and nothing comes after."""


class TextStream(Protocol):
    """Turns ids into text a piece at a time. Never gives out half a character, nor text that may turn out to be the
    head of a stop string."""

    def push(self, token_ids: Sequence[int]) -> TextPiece: ...

    def flush(self) -> TextPiece:
        """The rest, once no token follows."""


class ResponseReader(Protocol):
    """Reads one answer as the model's own files say it is to be read.

    Events have a `type`, `region_open`, `region_chunk` (with `text`, and `dirty` where only the whole has a meaning) or
    `region_close` (with `value`), and a `field`, the key of the message.
    """

    initial: Sequence[Mapping[str, Any]]
    """What the prompt has opened already."""

    def closing(self, field: str, text: str) -> int:
        """Length of the mark at the start of `text` that closes the field's region; 0 if there is none."""

    def feed(self, text: str) -> Sequence[Mapping[str, Any]]:
        """Raises, mostly ValueError, for an answer that does not fit; then the reader is not used again."""

    def finish(self) -> Sequence[Mapping[str, Any]]:
        """No text follows. Raises as `feed` does."""
