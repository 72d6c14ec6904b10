"""What is known of each family of models: one record a family, and every other module looks it up here.

To add a family, add its record to `FAMILIES` and a small random model of it to `presets.shapes`. What is not in the
record follows from the configuration: which kind each layer is (`layer_state`), how many residual streams there are,
and the factors of embeddings and logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from parkd_engine.families.family import Family, FusedPart, VisionFamily
from parkd_engine.families.linear_state import (
    delta_net_and_ngrams,
    gated_delta_net,
    mamba2,
    mamba2_by_heads,
    short_convolution,
)
from parkd_engine.families.parts import family_by_parts


def _qwen_vision(model_type: str, architecture: str) -> VisionFamily:
    """Qwen's models of one generation and the next read images alike."""
    return VisionFamily(
        model_type=model_type,
        architecture=architecture,
        processor="Qwen2VLImageProcessorPil",
        tokens=("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
        begins_only=False,
        sees_itself=False,
        by_grid=True,
    )


FAMILIES: tuple[Family, ...] = (
    Family(model_type="llama", architecture="LlamaForCausalLM", gguf_name="llama", is_dense=True),
    Family(model_type="qwen2", architecture="Qwen2ForCausalLM", gguf_name="qwen2", is_dense=True),
    Family(model_type="qwen3", architecture="Qwen3ForCausalLM", gguf_name="qwen3", is_dense=True),
    Family(model_type="qwen3_moe", architecture="Qwen3MoeForCausalLM", is_windowed=True),
    Family(
        model_type="mistral",
        architecture="MistralForCausalLM",
        is_windowed=True,
        text_of={"mistral3": "Mistral3ForConditionalGeneration"},
    ),
    Family(model_type="ministral3", architecture="Ministral3ForCausalLM", is_windowed=True),
    Family(model_type="gpt_oss", architecture="GptOssForCausalLM"),
    Family(model_type="glm4_moe", architecture="Glm4MoeForCausalLM"),
    Family(model_type="minimax_m2", architecture="MiniMaxM2ForCausalLM"),
    Family(
        model_type="gemma4_text",
        architecture="Gemma4ForCausalLM",
        caps_logits=True,
        text_of={"gemma4": "Gemma4ForConditionalGeneration"},
    ),
    Family(
        model_type="gemma3_text",
        architecture="Gemma3ForCausalLM",
        gguf_name="gemma3",
        caps_logits=True,
        fused_parts={"Gemma3RMSNorm": FusedPart.NORM, "Gemma3DecoderLayer": FusedPart.GEMMA_LAYER},
        vision=VisionFamily(
            model_type="gemma3",
            architecture="Gemma3ForConditionalGeneration",
            processor="Gemma3ImageProcessorPil",
            tokens=("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
            begins_only=True,
            sees_itself=True,
            by_grid=False,
        ),
    ),
    Family(
        model_type="qwen3_next",
        architecture="Qwen3NextForCausalLM",
        linear_states=gated_delta_net,
        recurrent_module="linear_attn",
        draft_head={},
        fused_parts={"Qwen3NextRMSNorm": FusedPart.NORM},
    ),
    Family(
        model_type="qwen3_vl_text",
        architecture=None,
        vision=_qwen_vision("qwen3_vl", "Qwen3VLForConditionalGeneration"),
    ),
    Family(
        model_type="qwen3_vl_moe_text",
        architecture=None,
        vision=_qwen_vision("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration"),
    ),
    Family(
        model_type="qwen3_5_text",
        architecture="Qwen3_5ForCausalLM",
        linear_states=gated_delta_net,
        recurrent_module="linear_attn",
        draft_head={},
        fused_parts={
            "Qwen3_5RMSNorm": FusedPart.NORM,
            "Qwen3_5MLP": FusedPart.GATED,
            "Qwen3_5GatedDeltaNet": FusedPart.DELTA_NET,
        },
        recorded_chunks="Qwen3_5DecoderLayer",
        vision=_qwen_vision("qwen3_5", "Qwen3_5ForConditionalGeneration"),
    ),
    Family(
        model_type="qwen3_5_moe_text",
        architecture="Qwen3_5MoeForCausalLM",
        linear_states=gated_delta_net,
        recurrent_module="linear_attn",
        draft_head={},
        fused_parts={"Qwen3_5MoeRMSNorm": FusedPart.NORM, "Qwen3_5MoeGatedDeltaNet": FusedPart.DELTA_NET},
        vision=_qwen_vision("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
    ),
    Family(
        model_type="qwen4_exp_text",
        architecture="Qwen4ExpForCausalLM",
        linear_states=delta_net_and_ngrams,
        recurrent_module="linear_attn",
        draft_head={"mtp_layer_types": ["indexed_attention"]},
        vision=_qwen_vision("qwen4_exp", "Qwen4ExpForConditionalGeneration"),
    ),
    Family(
        model_type="lfm2",
        architecture="Lfm2ForCausalLM",
        linear_states=short_convolution,
        final_norm="embedding_norm",
    ),
    Family(
        model_type="nemotron_h",
        architecture="NemotronHForCausalLM",
        linear_states=mamba2_by_heads,
        final_norm="norm_f",
    ),
    Family(model_type="granitemoehybrid", architecture="GraniteMoeHybridForCausalLM", linear_states=mamba2),
    Family(
        model_type="falcon_h1",
        architecture="FalconH1ForCausalLM",
        linear_states=mamba2,
        final_norm="final_layernorm",
        layers_give_tuples=True,
    ),
    Family(model_type="deepseek_v2", architecture="DeepseekV2ForCausalLM", has_latents=True),
    Family(model_type="deepseek_v3", architecture="DeepseekV3ForCausalLM", has_latents=True, draft_head={}),
    Family(
        model_type="glm4_moe_lite",
        architecture="Glm4MoeLiteForCausalLM",
        has_latents=True,
        draft_head={"mtp_mlp_layer_types": ["sparse"]},
    ),
)
"""Every family. A model of any other is refused (`architectures.check_config`)."""

VISION_FAMILIES: Mapping[str, VisionFamily] = MappingProxyType(
    {family.vision.model_type: family.vision for family in FAMILIES if family.vision is not None}
)
"""`model_type` of a whole model that reads images -> how."""
ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {family.architecture: family.model_type for family in FAMILIES if family.architecture is not None}
    | {vision.architecture: vision.model_type for vision in VISION_FAMILIES.values()}
    | {whole: model_type for family in FAMILIES for model_type, whole in family.text_of.items()}
)
"""Class name, as in checkpoints -> `model_type` of its configuration."""
FUSED_PARTS: Mapping[str, FusedPart] = MappingProxyType(
    {name: part for family in FAMILIES for name, part in family.fused_parts.items()}
)
"""Name of a class of the library -> its kernels, over all families."""
RECORDED_CHUNKS = frozenset(family.recorded_chunks for family in FAMILIES if family.recorded_chunks is not None)
"""Classes of layers whose chunks can be recorded, over all families."""
FAMILY_BY_TYPE: Mapping[str, Family] = MappingProxyType(
    {family.model_type: family for family in FAMILIES}
    | {family.vision.model_type: family for family in FAMILIES if family.vision is not None}
    | {model_type: family for family in FAMILIES for model_type in family.text_of}
)
"""`model_type` of the text model or of the whole model -> the family. A whole model may have text of any of several
families, which is that of its text part's configuration."""


def family_of(config: Any) -> Family:
    """The family of a model with this configuration of the library's: its record, or else what a trial finds of its
    parts. Raises UnsupportedModel if that finds a reason to refuse it."""
    return FAMILY_BY_TYPE.get(config.model_type) or family_by_parts(config)


def vision_of(config: Any) -> VisionFamily | None:
    """How a model with this configuration reads images; None for a text model."""
    return VISION_FAMILIES.get(getattr(config, "model_type", ""))
