"""The text part of models that read images.

text     ... <vision start> <image> <vision end> ...          what the chat template writes
ids      ...       s        i i i i i     e      ...          the image id, once per position of the image
rows     ...                p p p p p            ...          outputs of the vision tower, in place of embeddings
"""

from __future__ import annotations

from typing import Any

from parkd_engine.families.records import vision_of


def language_config(config: Any) -> Any:
    """The text part of a configuration; for a text model, the whole configuration."""
    return config.get_text_config() if vision_of(config) is not None else config


def language_model(model: Any) -> Any:
    """The decoder of a causal language model: embedding, layers and final norm."""
    inner = model.base_model
    return inner.language_model if vision_of(model.config) is not None else inner


def longest_span(config: Any) -> int:
    """The most positions that must be read in one chunk: those of an image with bidirectional attention; else 0."""
    vision = vision_of(config)
    return int(config.mm_tokens_per_image) if vision is not None and vision.sees_itself else 0
