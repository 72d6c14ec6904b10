"""What differs between families of models that read images.

text     ... <vision start> <image> <vision end> ...          what the chat template writes
ids      ...       s        i i i i i     e      ...          the image id, once per position of the image
rows     ...                p p p p p            ...          outputs of the vision tower, in place of embeddings
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """How one family of models reads images."""

    processor: str
    """The library's image processor class; the variant that needs only Pillow."""
    sees_itself: bool
    """Attention within an image is bidirectional, so that no chunk may end inside it."""
    by_grid: bool
    """Rotary positions have three coordinates (M-RoPE). Those of an image follow its rows and columns; the text after
    it continues as if the image were as long as its longer side."""


VISION_FAMILIES: Mapping[str, VisionFamily] = MappingProxyType(
    {
        "qwen3_5": VisionFamily("Qwen2VLImageProcessorPil", sees_itself=False, by_grid=True),
        "qwen4_exp": VisionFamily("Qwen2VLImageProcessorPil", sees_itself=False, by_grid=True),
        "gemma3": VisionFamily("Gemma3ImageProcessorPil", sees_itself=True, by_grid=False),
    }
)
"""`model_type` of the whole model's configuration -> how it reads images."""


def family_of(config: Any) -> VisionFamily | None:
    """The model's vision family; None for a text model. `config` is the library's configuration."""
    return VISION_FAMILIES.get(getattr(config, "model_type", ""))


def language_config(config: Any) -> Any:
    """The text part of a configuration; for a text model, the whole configuration."""
    return config.get_text_config() if family_of(config) is not None else config


def language_model(model: Any) -> Any:
    """The decoder of a causal language model: embedding, layers and final norm."""
    inner = model.base_model
    return inner.language_model if family_of(model.config) is not None else inner


def longest_span(config: Any) -> int:
    """The most positions that must be read in one chunk: those of an image with bidirectional attention; else 0."""
    family = family_of(config)
    return int(config.mm_tokens_per_image) if family is not None and family.sees_itself else 0
