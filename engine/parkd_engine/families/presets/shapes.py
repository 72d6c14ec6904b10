"""Shapes of random models: name -> the library's `model_type` and settings.

Real shapes are taken from the published configurations. Tiny models have every kind of layer, placed so that a stage
can be without rows or without fixed state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from transformers import AutoConfig

from parkd.errors import ModelError
from parkd_engine.families.records import FAMILY_BY_TYPE

PREFIX = "random:"
TINY_VOCABULARY = 512
END_TOKEN_ID = 2
"""The id that ends an answer, in every preset."""
WITH_HEAD = "-mtp"
ECHO = "-echo"


@dataclass(frozen=True)
class Preset:
    """A shape: the library's `model_type` and its settings."""

    model_type: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    processor: Mapping[str, Any] | None = None
    """Settings of the library's image processor; None: the model reads text only."""


_TINY: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": TINY_VOCABULARY,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
)
_TINY_HEADS: Mapping[str, Any] = MappingProxyType({**_TINY, "head_dim": 16})
_TINY_DELTA_NET: Mapping[str, Any] = MappingProxyType(
    {
        **_TINY_HEADS,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    }
)
_TINY_LATENT: Mapping[str, Any] = MappingProxyType(
    {
        **_TINY,
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 24,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    }
)


_TINY_EXPERTS: Mapping[str, Any] = MappingProxyType(
    {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
)
_ALTERNATING = ["sliding_attention", "full_attention"] * 2

_DENSE: Mapping[str, Preset] = MappingProxyType(
    {
        "tiny-llama": Preset("llama", _TINY_HEADS),
        "tiny-qwen2": Preset("qwen2", _TINY),
        "tiny-qwen3": Preset("qwen3", _TINY_HEADS),
        "tiny-qwen3-long": Preset("qwen3", {**_TINY_HEADS, "max_position_embeddings": 262144}),
        "qwen3-8b": Preset(
            "qwen3",
            {
                "hidden_size": 4096,
                "intermediate_size": 12288,
                "num_hidden_layers": 36,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "vocab_size": 151936,
                "max_position_embeddings": 131072,
                "tie_word_embeddings": False,
                "rms_norm_eps": 1e-6,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
            },
        ),
    }
)
_HYBRIDS: Mapping[str, Preset] = MappingProxyType(
    {
        "tiny-gemma3": Preset(
            "gemma3_text",
            {
                **_TINY_HEADS,
                "query_pre_attn_scalar": 16,
                "sliding_window": 64,
                "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            },
        ),
        "tiny-qwen3-next": Preset(
            "qwen3_next",
            {
                **_TINY_DELTA_NET,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
                "shared_expert_intermediate_size": 32,
            },
        ),
        "tiny-qwen3.5": Preset("qwen3_5_text", _TINY_DELTA_NET),
        "tiny-lfm2": Preset("lfm2", {**_TINY, "layer_types": ["conv", "full_attention", "conv", "conv"]}),
        "tiny-granite-h": Preset(
            "granitemoehybrid",
            {
                **_TINY,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "shared_intermediate_size": 64,
                "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
                "mamba_n_heads": 16,
                "mamba_d_head": 8,
                "mamba_d_state": 16,
                "mamba_chunk_size": 64,
                "embedding_multiplier": 2.0,
                "logits_scaling": 2.0,
            },
        ),
        "tiny-falcon-h1": Preset(
            "falcon_h1",
            {
                **_TINY,
                "mamba_d_ssm": 128,
                "mamba_n_heads": 16,
                "mamba_d_head": 8,
                "mamba_d_state": 16,
                "mamba_chunk_size": 64,
                "lm_head_multiplier": 0.5,
            },
        ),
        "tiny-deepseek-v2": Preset("deepseek_v2", {**_TINY_LATENT, "q_lora_rank": None}),
        "tiny-deepseek-v3": Preset("deepseek_v3", {**_TINY_LATENT, "q_lora_rank": 32}),
        "tiny-glm4-lite": Preset("glm4_moe_lite", {**_TINY_LATENT, "q_lora_rank": 32}),
        "tiny-qwen4-exp": Preset(
            "qwen4_exp_text",
            {
                **_TINY_DELTA_NET,
                "max_position_embeddings": 65536,
                "layer_types": ["linear_attention", "indexed_attention", "linear_attention", "indexed_attention"],
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
                "shared_expert_intermediate_size": 32,
                "hc_count": 2,
                "hc_lowrank": 16,
                "ple_layer_ids": [1, 3],
                "ple_embed_dim": 64,
                "heads_per_ngram": 4,
                "ngram_vocab_size_base": 500,
                "indexer_n_heads": 2,
                "indexer_kv_heads": 1,
                "indexer_head_dim": 16,
                "indexer_budget": 64,
                "indexer_compress_ratio": 4,
            },
        ),
        # Rows and recurrent states have the published sizes, weights do not: narrow, few experts, few n-grams.
        "qwen4-exp-small": Preset(
            "qwen4_exp_text",
            {
                "hidden_size": 1024,
                "num_hidden_layers": 48,
                "num_attention_heads": 24,
                "num_key_value_heads": 2,
                "head_dim": 256,
                "linear_num_key_heads": 16,
                "linear_num_value_heads": 48,
                "linear_key_head_dim": 128,
                "linear_value_head_dim": 128,
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 256,
                "shared_expert_intermediate_size": 256,
                "output_gate_type": "sigmoid",
                "hc_count": 4,
                "hc_lowrank": 64,
                "ple_layer_ids": [2],
                "ngram_vocab_size_base": 20000,
                "indexer_n_heads": 4,
                "indexer_kv_heads": 1,
                "indexer_head_dim": 128,
                "indexer_budget": 2048,
                "indexer_compress_ratio": 4,
                "vocab_size": 248320,
                "max_position_embeddings": 262144,
                "tie_word_embeddings": False,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10_000_000.0,
                    "partial_rotary_factor": 0.25,
                    "mrope_section": [11, 11, 10],
                    "mrope_interleaved": True,
                },
            },
        ),
        "qwen3.5-27b": Preset(
            "qwen3_5_text",
            {
                "hidden_size": 5120,
                "intermediate_size": 17408,
                "num_hidden_layers": 64,
                "num_attention_heads": 24,
                "num_key_value_heads": 4,
                "head_dim": 256,
                "linear_num_key_heads": 16,
                "linear_num_value_heads": 48,
                "linear_key_head_dim": 128,
                "linear_value_head_dim": 128,
                "vocab_size": 248320,
                "max_position_embeddings": 262144,
                "tie_word_embeddings": False,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10_000_000.0,
                    "partial_rotary_factor": 0.25,
                    "mrope_section": [11, 11, 10],
                    "mrope_interleaved": True,
                },
            },
        ),
        "gemma3-4b": Preset(
            "gemma3_text",
            {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "num_hidden_layers": 34,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "head_dim": 256,
                "query_pre_attn_scalar": 256,
                "sliding_window": 1024,
                "vocab_size": 262208,
                "max_position_embeddings": 131072,
                "tie_word_embeddings": True,
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                },
            },
        ),
    }
)
_QWEN_ROPE: Mapping[str, Any] = MappingProxyType(
    {
        "rope_type": "default",
        "rope_theta": 10_000_000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    }
)
_NEMOTRON = {"M": "linear_attention", "E": "moe", "*": "full_attention"}
"""Letters of the published configuration -> the library's kinds of layers."""
_OTHERS: Mapping[str, Preset] = MappingProxyType(
    {
        "tiny-qwen3-moe": Preset("qwen3_moe", {**_TINY_HEADS, **_TINY_EXPERTS, "norm_topk_prob": True}),
        "tiny-qwen3.5-moe": Preset(
            "qwen3_5_moe_text", {**_TINY_DELTA_NET, **_TINY_EXPERTS, "shared_expert_intermediate_size": 32}
        ),
        "tiny-gpt-oss": Preset(
            "gpt_oss",
            {
                **_TINY_HEADS,
                "intermediate_size": 32,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "sliding_window": 64,
                "layer_types": _ALTERNATING,
            },
        ),
        "tiny-mistral": Preset("mistral", {**_TINY_HEADS, "sliding_window": None}),
        "tiny-ministral3": Preset(
            "ministral3",
            {
                **_TINY_HEADS,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1_000_000.0,
                    "factor": 16.0,
                    "original_max_position_embeddings": 256,
                    "llama_4_scaling_beta": 0.1,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                },
            },
        ),
        "tiny-glm4-moe": Preset(
            "glm4_moe",
            {
                **_TINY_HEADS,
                "use_qk_norm": True,
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
                "first_k_dense_replace": 1,
            },
        ),
        "tiny-minimax-m2": Preset(
            "minimax_m2",
            {
                **_TINY_HEADS,
                "rotary_dim": 8,
                "intermediate_size": 32,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
            },
        ),
        "tiny-gemma4": Preset(
            "gemma4_text",
            {
                **_TINY_HEADS,
                "global_head_dim": 32,
                "num_global_key_value_heads": 1,
                "attention_k_eq_v": True,
                "sliding_window": 64,
                "hidden_size_per_layer_input": 0,
                "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "full_attention"],
                "final_logit_softcapping": 30.0,
                "enable_moe_block": True,
                "num_experts": 4,
                "top_k_experts": 2,
                "moe_intermediate_size": 32,
            },
        ),
        "tiny-nemotron-h": Preset(
            "nemotron_h",
            {
                **{name: value for name, value in _TINY_HEADS.items() if name != "num_hidden_layers"},
                "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
                "mamba_num_heads": 16,
                "mamba_head_dim": 8,
                "ssm_state_size": 16,
                "n_groups": 2,
                "chunk_size": 64,
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
                "moe_shared_expert_intermediate_size": 32,
            },
        ),
        "qwen3-30b-a3b": Preset(
            "qwen3_moe",
            {
                "hidden_size": 2048,
                "intermediate_size": 6144,
                "num_hidden_layers": 48,
                "num_attention_heads": 32,
                "num_key_value_heads": 4,
                "head_dim": 128,
                "num_experts": 128,
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 768,
                "norm_topk_prob": True,
                "vocab_size": 151936,
                "max_position_embeddings": 262144,
                "tie_word_embeddings": False,
                "rms_norm_eps": 1e-6,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000.0},
            },
        ),
        "qwen3.5-35b-a3b": Preset(
            "qwen3_5_moe_text",
            {
                "hidden_size": 2048,
                "num_hidden_layers": 40,
                "num_attention_heads": 16,
                "num_key_value_heads": 2,
                "head_dim": 256,
                "linear_num_key_heads": 16,
                "linear_num_value_heads": 32,
                "linear_key_head_dim": 128,
                "linear_value_head_dim": 128,
                "num_experts": 256,
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 512,
                "shared_expert_intermediate_size": 512,
                "vocab_size": 248320,
                "max_position_embeddings": 262144,
                "tie_word_embeddings": False,
                "rope_parameters": dict(_QWEN_ROPE),
            },
        ),
        "gpt-oss-20b": Preset(
            "gpt_oss",
            {
                "hidden_size": 2880,
                "intermediate_size": 2880,
                "num_hidden_layers": 24,
                "num_attention_heads": 64,
                "num_key_value_heads": 8,
                "head_dim": 64,
                "num_local_experts": 32,
                "num_experts_per_tok": 4,
                "sliding_window": 128,
                "layer_types": ["sliding_attention", "full_attention"] * 12,
                "vocab_size": 201088,
                "max_position_embeddings": 131072,
                "tie_word_embeddings": False,
            },
        ),
        "nemotron-3-nano-30b-a3b": Preset(
            "nemotron_h",
            {
                "hidden_size": 2688,
                "layers_block_type": [
                    _NEMOTRON[letter] for letter in "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
                ],
                "num_attention_heads": 32,
                "num_key_value_heads": 2,
                "head_dim": 128,
                "mamba_num_heads": 64,
                "mamba_head_dim": 64,
                "ssm_state_size": 128,
                "n_groups": 8,
                "conv_kernel": 4,
                "chunk_size": 128,
                "n_routed_experts": 128,
                "num_experts_per_tok": 6,
                "moe_intermediate_size": 1856,
                "moe_shared_expert_intermediate_size": 3712,
                "vocab_size": 131072,
                "max_position_embeddings": 262144,
                "tie_word_embeddings": False,
            },
        ),
    }
)
_QWEN_IDS: Mapping[str, int] = MappingProxyType(
    {"vision_start_token_id": 3, "vision_end_token_id": 4, "image_token_id": 5, "video_token_id": 6}
)
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
        **_QWEN_IDS,
    }
)
_QWEN3_VISION: Mapping[str, Any] = MappingProxyType(
    {
        "vision_config": {
            **_VISION,
            "depth": 3,
            "num_heads": 2,
            "out_hidden_size": 64,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1, 2],
        },
        **_QWEN_IDS,
    }
)
_QWEN_PROCESSOR: Mapping[str, Any] = MappingProxyType(
    {
        "patch_size": 8,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 32 * 32, "longest_edge": 128 * 128},
    }
)
_QWEN_LARGE_PROCESSOR: Mapping[str, Any] = MappingProxyType(
    {
        "patch_size": 16,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 256 * 256, "longest_edge": 4096 * 4096},
    }
)
_WITH_IMAGES: Mapping[str, Preset] = MappingProxyType(
    {
        "tiny-qwen3-vl": Preset(
            "qwen3_vl",
            {"text_config": {**_TINY_HEADS, "rope_parameters": dict(_MROPE)}, **_QWEN3_VISION},
            _QWEN_PROCESSOR,
        ),
        "tiny-qwen3-vl-moe": Preset(
            "qwen3_vl_moe",
            {"text_config": {**_TINY_HEADS, **_TINY_EXPERTS, "rope_parameters": dict(_MROPE)}, **_QWEN3_VISION},
            _QWEN_PROCESSOR,
        ),
        "tiny-qwen3.5-vl": Preset(
            "qwen3_5",
            {
                "text_config": {
                    **_TINY_DELTA_NET,
                    "rope_parameters": dict(_MROPE),
                },
                **_QWEN_VISION,
            },
            _QWEN_PROCESSOR,
        ),
        "tiny-qwen3.5-moe-vl": Preset(
            "qwen3_5_moe",
            {
                "text_config": {**_OTHERS["tiny-qwen3.5-moe"].settings, "rope_parameters": dict(_MROPE)},
                **_QWEN_VISION,
            },
            _QWEN_PROCESSOR,
        ),
        "tiny-qwen4-exp-vl": Preset(
            "qwen4_exp",
            {
                "text_config": {
                    **_HYBRIDS["tiny-qwen4-exp"].settings,
                    "max_position_embeddings": 4096,
                    "rope_parameters": dict(_MROPE),
                },
                **_QWEN_VISION,
            },
            _QWEN_PROCESSOR,
        ),
        "tiny-gemma3-vl": Preset(
            "gemma3",
            {
                "text_config": {
                    **_TINY_HEADS,
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
            {"size": {"height": 48, "width": 48}},
        ),
        "qwen3-vl-8b": Preset(
            "qwen3_vl",
            {
                "text_config": {
                    **_DENSE["qwen3-8b"].settings,
                    "max_position_embeddings": 262144,
                    "rope_parameters": {
                        "rope_type": "default",
                        "rope_theta": 5_000_000.0,
                        "mrope_section": [24, 20, 20],
                        "mrope_interleaved": True,
                    },
                },
                "vision_config": {"out_hidden_size": _DENSE["qwen3-8b"].settings["hidden_size"]},
                **_QWEN_IDS,
            },
            _QWEN_LARGE_PROCESSOR,
        ),
        "qwen3.5-27b-vl": Preset(
            "qwen3_5",
            {
                "text_config": _HYBRIDS["qwen3.5-27b"].settings,
                "vision_config": {"out_hidden_size": _HYBRIDS["qwen3.5-27b"].settings["hidden_size"]},
                **_QWEN_IDS,
            },
            _QWEN_LARGE_PROCESSOR,
        ),
    }
)
_WITH_HEADS = (
    *("tiny-qwen3-next", "tiny-qwen3.5", "tiny-qwen3.5-moe", "tiny-qwen3.5-vl", "tiny-qwen4-exp"),
    *("tiny-qwen4-exp-vl", "tiny-deepseek-v3", "tiny-glm4-lite"),
    *("qwen3.5-27b", "qwen4-exp-small"),
)


def _with_head(preset: Preset) -> Preset:
    text = preset.settings.get("text_config")
    settings = FAMILY_BY_TYPE[preset.model_type].head_settings
    if text is None:
        return replace(preset, settings={**preset.settings, **settings})
    return replace(preset, settings={**preset.settings, "text_config": {**text, **settings}})


_HEADLESS: Mapping[str, Preset] = MappingProxyType({**_DENSE, **_HYBRIDS, **_OTHERS, **_WITH_IMAGES})
PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        **_HEADLESS,
        **{f"{name}{WITH_HEAD}{ending}": _with_head(_HEADLESS[name]) for name in _WITH_HEADS for ending in ("", ECHO)},
    }
)
"""Every `random:` model, without the prefix."""


def preset_of(model: str) -> Preset:
    """The preset of `random:NAME`. Raises ModelError for an unknown name."""
    name = model.removeprefix(PREFIX)
    preset = PRESETS.get(name)
    if preset is None:
        raise ModelError(f"There is no random model {name!r}; these are: {', '.join(sorted(PRESETS))}.")
    return preset


def preset_config(model: str) -> Any:
    """The library's configuration of `random:NAME`. Raises ModelError for an unknown name."""
    preset = preset_of(model)
    ids = {"bos_token_id": None, "eos_token_id": END_TOKEN_ID, "pad_token_id": None}
    if "text_config" in preset.settings:
        text = {**preset.settings["text_config"], **ids}
        return AutoConfig.for_model(preset.model_type, **{**preset.settings, "text_config": text})
    return AutoConfig.for_model(preset.model_type, **{**preset.settings, **ids})
