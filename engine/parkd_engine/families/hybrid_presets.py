"""Shapes of models whose state is not only keys and values: name -> the library's `model_type` and settings.

Real shapes are taken from the published configurations. Tiny models have every kind of layer, placed so that a stage
can be without rows or without fixed state.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_TINY: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
)
_TINY_DELTA_NET: Mapping[str, Any] = MappingProxyType(
    {
        **_TINY,
        "head_dim": 16,
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

HYBRID_PRESETS: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "tiny-gemma3": (
            "gemma3_text",
            {
                **_TINY,
                "head_dim": 16,
                "query_pre_attn_scalar": 16,
                "sliding_window": 64,
                "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            },
        ),
        "tiny-qwen3-next": (
            "qwen3_next",
            {
                **_TINY_DELTA_NET,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
                "shared_expert_intermediate_size": 32,
            },
        ),
        "tiny-qwen3.5": ("qwen3_5_text", _TINY_DELTA_NET),
        "tiny-lfm2": ("lfm2", {**_TINY, "layer_types": ["conv", "full_attention", "conv", "conv"]}),
        "tiny-granite-h": (
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
        "tiny-falcon-h1": (
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
        "tiny-deepseek-v2": ("deepseek_v2", {**_TINY_LATENT, "q_lora_rank": None}),
        "tiny-deepseek-v3": ("deepseek_v3", {**_TINY_LATENT, "q_lora_rank": 32}),
        "tiny-glm4-lite": ("glm4_moe_lite", {**_TINY_LATENT, "q_lora_rank": 32}),
        "tiny-qwen4-exp": (
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
        "qwen4-exp-small": (
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
        "qwen3.5-27b": (
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
        "gemma3-4b": (
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
