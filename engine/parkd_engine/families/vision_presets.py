"""Shapes of models that read images, and the tokens around images in their prompts.

Ids 0 to 2 are the special tokens of every preset. The image tokens follow, in the order of `VISION_TOKENS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from parkd_engine.families.hybrid_presets import HYBRID_PRESETS

_QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
VISION_TOKENS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "qwen3_5": _QWEN_TOKENS,
        "qwen4_exp": _QWEN_TOKENS,
        "gemma3": ("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
    }
)
"""`model_type` -> special tokens, the first with id 3."""

VISION_TEMPLATE = (
    "{% macro show(content) %}{% if content is string %}{{ content }}{% else %}{% for part in content or [] %}"
    "{% if part.type == 'image' %}{{ image }}{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endmacro %}"
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ show(message.content) }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML with images between texts. `vision_template` defines how an image is written."""

_TEXT: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
)
_IDS = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
_VISION: Mapping[str, Any] = MappingProxyType({"hidden_size": 32, "intermediate_size": 64, "patch_size": 8})
_MROPE: Mapping[str, Any] = MappingProxyType(
    {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 1.0,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    }
)
_QWEN_VISION: Mapping[str, Any] = MappingProxyType(
    {
        "vision_config": {
            **_VISION,
            "depth": 2,
            "num_heads": 2,
            "out_hidden_size": 64,
            "num_position_embeddings": 64,
        },
        "vision_start_token_id": 3,
        "vision_end_token_id": 4,
        "image_token_id": 5,
        "video_token_id": 6,
    }
)

VISION_PRESETS: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "tiny-qwen3.5-vl": (
            "qwen3_5",
            {
                "text_config": {
                    **_TEXT,
                    "linear_num_key_heads": 2,
                    "linear_num_value_heads": 4,
                    "linear_key_head_dim": 16,
                    "linear_value_head_dim": 16,
                    "rope_parameters": dict(_MROPE),
                },
                **_QWEN_VISION,
            },
        ),
        "tiny-qwen4-exp-vl": (
            "qwen4_exp",
            {
                "text_config": {
                    **HYBRID_PRESETS["tiny-qwen4-exp"][1],
                    "max_position_embeddings": 4096,
                    "rope_parameters": dict(_MROPE),
                },
                **_QWEN_VISION,
            },
        ),
        "tiny-gemma3-vl": (
            "gemma3",
            {
                "text_config": {
                    **_TEXT,
                    "query_pre_attn_scalar": 16,
                    "sliding_window": 64,
                    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
                },
                "vision_config": {
                    **_VISION,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 2,
                    "image_size": 48,
                },
                "mm_tokens_per_image": 36,
                "boi_token_index": 3,
                "eoi_token_index": 4,
                "image_token_index": 5,
                "tie_word_embeddings": False,
            },
        ),
    }
)
"""Tiny models: name -> the library's `model_type` and settings."""

LARGE_VISION_PRESETS: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "qwen3.5-27b-vl": (
            "qwen3_5",
            {
                "text_config": HYBRID_PRESETS["qwen3.5-27b"][1],
                "vision_config": {"out_hidden_size": HYBRID_PRESETS["qwen3.5-27b"][1]["hidden_size"]},
                **{name: VISION_PRESETS["tiny-qwen3.5-vl"][1][name] for name in _IDS},
            },
        )
    }
)
"""Models of published sizes; the vision tower has the library's default size."""

_QWEN_PROCESSOR: Mapping[str, Any] = MappingProxyType(
    {
        "patch_size": 8,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 32 * 32, "longest_edge": 128 * 128},
    }
)
PROCESSORS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "tiny-qwen3.5-vl": _QWEN_PROCESSOR,
        "tiny-qwen4-exp-vl": _QWEN_PROCESSOR,
        "tiny-gemma3-vl": {"size": {"height": 48, "width": 48}},
        "qwen3.5-27b-vl": {
            "patch_size": 16,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "size": {"shortest_edge": 256 * 256, "longest_edge": 4096 * 4096},
        },
    }
)
"""Name -> settings of the library's image processor."""


def vision_template(model_type: str) -> str:
    """The chat template of a preset. Qwen's writes begin, image and end token of an image, Gemma's only the begin."""
    start, end, image = VISION_TOKENS[model_type][:3]
    written = start if model_type == "gemma3" else f"{start}{image}{end}"
    return f"{{% set image = '{written}' %}}{VISION_TEMPLATE}"
