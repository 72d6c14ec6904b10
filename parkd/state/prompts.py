"""What shapes the state of a prompt beside its tokens: its images, and the control vectors that steer the model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """How images are represented in a prompt."""

    placeholder: str
    """What the chat template writes for one image."""
    wrapped: str
    """What is tokenised instead; it contains `token_id` once."""
    token_id: int
    """The id at every position of an image. It says nothing about the image."""


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """The facts about an image that a prompt's identity needs."""

    digest: bytes
    """32 bytes over pixels, size, mode and preprocessing: equal for equal images, however their files are encoded."""
    tokens: int
    """Positions that it takes."""


@dataclass(frozen=True, slots=True)
class ImageSize:
    """What the header of an image file promises, before the file is decoded."""

    pixels: int
    """Pixels that must be decoded; 0 if the facts of this file are remembered."""
    tokens: int
    """The least number of positions that it takes."""


@dataclass(frozen=True, slots=True)
class VectorFile:
    """A control vector to load."""

    name: str
    """Its name in requests: the file name without its suffix, unless another name is given."""
    path: Path
    scale: float = 1.0
    """Its scale in requests that name no control vectors; 0 loads it without using it by default."""
