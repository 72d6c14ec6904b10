"""The work of reading a prompt's token, in floating-point operations, computed from a model's configuration alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from parkd_engine.families.layer_shapes import experts_of, kv_shape, layer_kinds
from parkd_engine.families.layer_state import LAYER_KINDS
from parkd_engine.families.multimodal import language_config, language_model
from parkd_engine.families.records import family_of
from parkd_engine.loading.layer_weights import weightless_model
from parkd_engine.weights.schemes import without_weights_kind


@dataclass(frozen=True, slots=True)
class ReadingWork:
    """Operations for one token of a prompt."""

    flop: float
    """Two operations for each layer parameter that is used for a token. Parameters of experts are weighted by the share
    of experts that a token is routed to. The output head is left out, since only a prompt's last token needs it."""
    growth_flop: float
    """Additional operations for each earlier token: the products with its key and its value, for each head, in layers
    with full attention."""


def reading_work(config: Any) -> ReadingWork:
    """The work for a model with this configuration. Builds the model on the meta device to count its parameters."""
    text = language_config(config)
    model, _ = weightless_model(without_weights_kind(config))  # A code takes part in as many operations as a number.
    experts, chosen = experts_of(text)
    share = chosen / experts if experts else 1.0
    met = 0.0
    for layer in language_model(model).layers:
        looked_up = {id(p) for part in layer.modules() if isinstance(part, nn.Embedding) for p in part.parameters()}
        for name, parameter in layer.named_parameters():
            if id(parameter) not in looked_up:
                # Some architectures have one module per expert, others one tensor with an axis of experts.
                is_routed = ".experts." in name or (parameter.ndim == 3 and parameter.shape[0] == experts)
                met += parameter.numel() * (share if is_routed else 1.0)
    seeing = [layer for layer, kind in enumerate(layer_kinds(text)) if LAYER_KINDS[kind].sees_all]
    heads = int(text.num_attention_heads)
    if family_of(text).has_latents:
        widths = len(seeing) * int(text.qk_nope_head_dim + text.qk_rope_head_dim + text.v_head_dim)
    else:
        widths = sum(2 * kv_shape(text, layer)[1] for layer in seeing)
    return ReadingWork(2 * met, 2.0 * heads * widths)
