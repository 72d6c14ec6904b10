"""Checks whether the engine supports a model, from its configuration alone, before any weights are read."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from parkd.errors import UnsupportedModel
from parkd_engine.families.layer_shapes import kv_shape, layer_kinds
from parkd_engine.families.layer_state import INDEXED, LAYER_KINDS
from parkd_engine.families.multimodal import is_whole, language_config
from parkd_engine.families.records import ARCHITECTURES, FAMILY_BY_TYPE, family_of, vision_of
from parkd_engine.weights.schemes import scheme_of

SLIDING = "sliding_attention"

CAPPED_LOGITS = "final_logit_softcapping"
TWO_WAYS = "use_bidirectional_attention"
"""Its value `vision` means within images only, so it changes nothing where no images are read."""
UNHONOURED_SETTINGS: Mapping[str, str] = MappingProxyType(
    {
        "attn_logit_softcapping": "a soft cap on attention scores",
        CAPPED_LOGITS: "a soft cap on logits",
        "attention_chunk_size": "chunked attention",
        "attention_sinks": "attention sinks",
        "num_kv_shared_layers": "layers that share keys and values",
        "hidden_size_per_layer_input": "embeddings of its own for each layer",
        TWO_WAYS: "bidirectional attention",
    }
)
"""Configuration entry -> the feature that it enables. A model that sets one is refused, since its state or logits would
be silently wrong."""

STRETCHED_ROTARY = "dynamic"
"""The `rope_type` whose frequencies depend on the longest sequence that the model has read recently, in any
conversation. A conversation's state would depend on other conversations, and on whether it was parked."""


def check_config(config: Any) -> str:
    """Returns the architecture's class name. Raises UnsupportedModel, whose message names what is not supported.

    `config` is the transformers configuration object, as read from a checkpoint.
    """
    architecture = architecture_of(config)
    if architecture not in ARCHITECTURES and (is_whole(config) or config.model_type in FAMILY_BY_TYPE):
        known, reason = ", ".join(ARCHITECTURES), _unhonoured(language_config(config), caps=False, sees=False)
        because = "" if reason is None else f" (it {reason})"
        raise UnsupportedModel(
            f"the architecture {architecture} is not supported{because}; by name, these are: {known}"
        )
    try:
        scheme_of(config)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{architecture} is not supported as it is stored: {error.message}") from error
    sees, config = vision_of(config) is not None, language_config(config)
    if architecture in ARCHITECTURES and config.model_type not in FAMILY_BY_TYPE:
        raise UnsupportedModel(f"{architecture} has text of the kind {config.model_type}, which is not supported")
    caps = config.model_type in FAMILY_BY_TYPE and FAMILY_BY_TYPE[config.model_type].caps_logits
    if (reason := _unhonoured(config, caps=caps, sees=sees)) is not None:
        raise UnsupportedModel(f"{architecture} {reason}, which is not supported")
    if STRETCHED_ROTARY in _rotary_kinds(config):
        raise UnsupportedModel(
            f"{architecture} sets rope_type {STRETCHED_ROTARY} (frequencies that change with the length read), "
            f"which is not supported; yarn, linear and longrope are"
        )
    family = family_of(config)
    if family.by_parts:  # Its trial has compared all the rest with what its code does.
        return architecture
    kinds = layer_kinds(config)
    unknown = sorted(set(kinds) - set(LAYER_KINDS))
    if unknown:
        known = ", ".join(LAYER_KINDS)
        raise UnsupportedModel(
            f"{architecture} has layers of kind {', '.join(unknown)}, which are not supported; these are: {known}"
        )
    if len(kinds) != config.num_hidden_layers:
        raise UnsupportedModel(f"{architecture} names {len(kinds)} layer kinds for {config.num_hidden_layers} layers")
    # Some configurations contain a window that is not used; it counts only if it is enabled.
    window = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    if window and (SLIDING not in kinds or not (getattr(config, "layer_types", None) or family.is_windowed)):
        raise UnsupportedModel(
            f"{architecture} uses a sliding window of {config.sliding_window} tokens without naming its layers, "
            f"which is not supported"
        )
    linear = {kind for kind in kinds if LAYER_KINDS[kind].is_recurrent}
    if linear and family.linear_states is None:
        raise UnsupportedModel(
            f"{architecture} has layers of kind {', '.join(sorted(linear))}, whose state is not known"
        )
    # Latent attention caches neither keys nor values, so their sizes do not matter.
    width = None if family.has_latents else getattr(config, "v_head_dim", None)
    key_width = kv_shape(config)[1]
    if width and width != key_width:
        raise UnsupportedModel(
            f"{architecture} sets v_head_dim ({width}) unlike the keys' head size ({key_width}), which is not supported"
        )
    if INDEXED in kinds and not getattr(config, "indexer_budget", None):
        raise UnsupportedModel(
            f"{architecture} has layers of kind {INDEXED} without the settings of their index (indexer_*)"
        )
    return architecture


def _unhonoured(config: Any, *, caps: bool, sees: bool) -> str | None:
    """What a text configuration sets that the engine does not honour; None: nothing."""
    found = [
        f"{name} ({meaning})"
        for name, meaning in UNHONOURED_SETTINGS.items()
        if (value := getattr(config, name, None)) and not _is_honoured(name, value, caps=caps, sees=sees)
    ]
    return f"sets {', '.join(found)}" if found else None


def _is_honoured(name: str, value: Any, *, caps: bool, sees: bool) -> bool:
    if name == CAPPED_LOGITS:
        return caps
    return name == TWO_WAYS and value == "vision" and not sees


def _rotary_kinds(config: Any) -> set[str]:
    """The values of `rope_type`: one for the whole model, or one for each kind of layer."""
    settings = getattr(config, "rope_parameters", None) or {}
    each = (settings, *(part for part in settings.values() if isinstance(part, Mapping)))
    return {str(part["rope_type"]) for part in each if "rope_type" in part}


def architecture_of(config: Any) -> str:
    """The class name in the configuration. If it has none (a configuration built in code), the class name for its
    `model_type`."""
    names = getattr(config, "architectures", None) or []
    if names:
        return str(names[0])
    for name, model_type in ARCHITECTURES.items():
        if config.model_type == model_type:
            return name
    return str(config.model_type)
