"""Models that read pictures: what is their own about it, by family.

text     ... <vision start> <image> <vision end> ...          what the chat template writes
ids      ...       s        i i i i i     e      ...          one id, as often as the picture has positions
rows     ...                p p p p p            ...          there the vision tower's output is read instead
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """How one kind of model takes pictures in."""

    processor: str
    """The library's class that makes a picture into what the tower reads, the one that needs Pillow alone."""
    sees_itself: bool
    """Positions of one picture attend to each other in both directions: no chunk may end inside."""
    by_grid: bool
    """Positions have three coordinates (M-RoPE): a picture's follow its rows and columns, and the text behind it goes
    on as if the picture had been as long as its longer side."""


VISION_FAMILIES: Mapping[str, VisionFamily] = MappingProxyType(
    {
        "qwen3_5": VisionFamily("Qwen2VLImageProcessorPil", sees_itself=False, by_grid=True),
        "qwen4_exp": VisionFamily("Qwen2VLImageProcessorPil", sees_itself=False, by_grid=True),
        "gemma3": VisionFamily("Gemma3ImageProcessorPil", sees_itself=True, by_grid=False),
    }
)
"""`model_type` of the whole model's configuration -> how it takes pictures in."""


def family_of(config: Any) -> VisionFamily | None:
    """None for a model of text alone. `config` is the library's configuration."""
    return VISION_FAMILIES.get(getattr(config, "model_type", ""))


def language_config(config: Any) -> Any:
    """The part of a configuration that is about text; the whole one where there is nothing else."""
    return config.get_text_config() if family_of(config) is not None else config


def language_model(model: Any) -> Any:
    """The decoder of a causal language model: embedding, layers and final norm."""
    inner = model.base_model
    return inner.language_model if family_of(model.config) is not None else inner


def longest_span(config: Any) -> int:
    """Positions that must be read in one chunk at least: those of a picture that sees itself. 0 without such."""
    family = family_of(config)
    return int(config.mm_tokens_per_image) if family is not None and family.sees_itself else 0
