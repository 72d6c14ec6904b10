"""Tiny random models of every family that keeps something else, or more, than keys and values."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from parkd_engine.families.records import FAMILY_BY_TYPE, VISION_FAMILIES
from parkd_engine.loading.draft_loading import declare_head
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from tests.unit.engine.kit.core_models import CONTEXT, FAMILIES, VOCAB, tiny_model
from tests.unit.engine.kit.vision_models import GEMMA_VISION, MROPE, QWEN3_VISION, QWEN_VISION

WINDOW = 24
_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "num_hidden_layers": 4,
}
_DELTA_NET = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_GEMMA = {
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
}
_LATENT = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
_SPARSE = {
    **_DELTA_NET,
    "eos_token_id": 1,
    "layer_types": ["linear_attention", "indexed_attention", "linear_attention", "indexed_attention"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "hc_count": 3,
    "hc_lowrank": 8,
    "ple_layer_ids": [1, 3],
    "ple_embed_dim": 32,
    "heads_per_ngram": 4,
    "ngram_vocab_size_base": 50,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_SHARED = {**_EXPERTS, "shared_expert_intermediate_size": 16}
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3_text", _GEMMA),
    "qwen2-window": ("qwen2", {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 2}),
    "qwen3-next": (
        "qwen3_next",
        {
            **_DELTA_NET,
            **_SHARED,
        },
    ),
    "qwen3.5": ("qwen3_5_text", _DELTA_NET),
    "qwen3.5-mtp": ("qwen3_5_text", {**_DELTA_NET, **FAMILY_BY_TYPE["qwen3_5_text"].head_settings}),
    "qwen3.5-moe": ("qwen3_5_moe_text", {**_DELTA_NET, **_SHARED}),
    "qwen3-moe": ("qwen3_moe", {"head_dim": 16, **_EXPERTS, "norm_topk_prob": True}),
    "mistral": ("mistral", {"head_dim": 16, "sliding_window": None}),
    "mistral-window": ("mistral", {"head_dim": 16, "sliding_window": WINDOW}),
    "ministral3": (
        "ministral3",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 8.0,
                "original_max_position_embeddings": 32,
                "llama_4_scaling_beta": 0.1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
    ),
    "gpt-oss": (
        "gpt_oss",
        {
            "head_dim": 16,
            "intermediate_size": 24,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "glm4-moe": (
        "glm4_moe",
        {
            "head_dim": 16,
            "use_qk_norm": True,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
        },
    ),
    "minimax-m2": (
        "minimax_m2",
        {"head_dim": 16, "rotary_dim": 8, "intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "gemma4": (
        "gemma4_text",
        {
            "head_dim": 16,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "sliding_window": WINDOW,
            "final_logit_softcapping": 5.0,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "full_attention"],
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 16,
        },
    ),
    "nemotron-h": (
        "nemotron_h",
        {
            "head_dim": 16,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "mamba_num_heads": 12,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 2,
            "chunk_size": 16,
            "time_step_min": 1e-6,  # The library heeds it in chunks only, not in single steps.
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 16,
        },
    ),
    "qwen4-exp": ("qwen4_exp_text", _SPARSE),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention", "conv", "conv"]}),
    "granite-h": (
        "granitemoehybrid",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 32,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            "mamba_n_heads": 12,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "mamba_chunk_size": 16,
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
        },
    ),
    "falcon-h1": (
        "falcon_h1",
        {
            "mamba_d_ssm": 96,
            "mamba_n_heads": 12,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "mamba_chunk_size": 16,
            "embedding_multiplier": 3.0,
            "lm_head_multiplier": 0.5,
            "key_multiplier": 0.7,
            "ssm_multipliers": [0.9, 0.8, 1.1, 1.2, 0.7],
        },
    ),
    "deepseek-v2": ("deepseek_v2", {**_LATENT, "q_lora_rank": None}),
    "deepseek-v3": ("deepseek_v3", {**_LATENT, "q_lora_rank": 24, "num_mtp_layers": 1}),
    "glm4-lite": ("glm4_moe_lite", {**_LATENT, "q_lora_rank": 24}),
    "qwen4-exp-vl": ("qwen4_exp", {**_SPARSE, "rope_parameters": MROPE}),
    "qwen3-vl": ("qwen3_vl", {"head_dim": 16, "rope_parameters": MROPE}),
    "qwen3-vl-moe": ("qwen3_vl_moe", {"head_dim": 16, **_EXPERTS, "rope_parameters": MROPE}),
    "qwen3.5-vl": ("qwen3_5", {**_DELTA_NET, "rope_parameters": MROPE}),
    "qwen3.5-moe-vl": ("qwen3_5_moe", {**_DELTA_NET, **_SHARED, "rope_parameters": MROPE}),
    "gemma3-vl": ("gemma3", _GEMMA),
}
"""Name -> `model_type` and settings, of the text where there are pictures too."""
_VISION = {
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), QWEN3_VISION),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen4_exp"), QWEN_VISION),
    "gemma3": GEMMA_VISION,
}


def hybrid_config(family: str, **changes: Any) -> Any:
    model_type, settings = HYBRIDS[family]
    if model_type in VISION_FAMILIES:
        text = {**_SHAPE, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None, **settings}
        whole = {"architectures": changes.pop("architectures", None)}
        return AutoConfig.for_model(model_type, text_config={**text, **changes}, **_VISION[model_type], **whole)
    return AutoConfig.for_model(model_type, **{**_SHAPE, **settings, **changes})


def hybrid_model(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Heads forget slowly, so that state made long ago still shows in the logits."""
    torch.manual_seed(seed)
    kind = AutoModelForImageTextToText if HYBRIDS[family][0] in VISION_FAMILIES else AutoModelForCausalLM
    model = kind.from_config(hybrid_config(family, **changes), dtype=dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_(torch.linspace(-5.0, 0.0, parameter.numel()))
            elif parameter.dim() > 1:
                parameter.normal_(0.0, 1.2 / parameter.shape[-1] ** 0.5)
    return model


@cache
def model_of(family: str) -> Any:
    """A model of any family, made once. Those named with `-mtp` behind have a draft head."""
    name = family.removesuffix("-mtp")
    model = tiny_model(name) if name in FAMILIES else hybrid_model(name)
    if name != family:
        declare_head(model.config)
    return model
