"""The text part of models that read images.

text     ... <vision start> <image> <vision end> ...          what the chat template writes
ids      ...       s        i i i i i     e      ...          the image id, once per position of the image
rows     ...                p p p p p            ...          outputs of the vision tower, in place of embeddings
"""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from parkd_engine.families.records import vision_of


def is_whole(config: Any) -> bool:
    """Whether the configuration is that of a model with a text part, rather than of a text model."""
    return getattr(config, "text_config", None) is not None


def language_config(config: Any) -> Any:
    """The text part of a configuration; for a text model, the whole configuration."""
    return config.get_text_config() if is_whole(config) else config


def model_class(config: Any) -> Any:
    """The library's class that makes the model with this configuration, whole."""
    return AutoModelForImageTextToText if is_whole(config) else AutoModelForCausalLM


def language_model(model: Any) -> Any:
    """The decoder of a causal language model: embedding, layers and final norm."""
    inner = model.base_model
    return inner.language_model if is_whole(model.config) else inner


def longest_span(config: Any) -> int:
    """The most positions that must be read in one chunk: those of an image with bidirectional attention; else 0."""
    vision = vision_of(config)
    return int(config.mm_tokens_per_image) if vision is not None and vision.sees_itself else 0
