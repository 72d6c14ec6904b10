"""What a layer keeps, by its kind: the fields of a row, and those of the fixed state, before they have a place.

    full          key | value                  what one token leaves, of every KV head
    latent        latent | rotary key          latent attention: keys and values are made of them each time
    hybrid        key | value, and a convolution and a recurrence in the fixed state
    sliding       nothing a token: the last `window - 1` keys and values are fixed state
    linear        nothing a token: convolutions and recurrences are fixed state

Which fields a layer has follows from its kind and its family alone: supporting another is adding an entry here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from engine.kv_format import SCALE_DTYPE, is_quantised
from engine.linear_state import linear_states

WINDOW_FIELDS = ("window_key", "window_value")
LATENT_FIELDS = ("latent", "rotary_key")
INDEX_KEY = "index_key"
INDEX_POSITION = "index_position"
STREAMS = "hc_count"
"""Configuration entry: residual streams that go side by side through all layers, in families that have several."""
RECURRENT_KINDS = frozenset({"linear_attention", "conv", "hybrid"})
"""Layers some of whose state is true at one position only."""
LATENT_FAMILIES = frozenset({"deepseek_v2", "deepseek_v3", "glm4_moe_lite"})
"""`model_type` of models with latent attention. (DeepSeek-V2, section 2.1.)"""


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """A field before it has a place."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LayerState:
    """What one layer of some kind keeps: a part that grows a row a token, and a part that does not grow."""

    row: tuple[FieldSpec, ...] = ()
    fixed: tuple[FieldSpec, ...] = ()
    row_once: tuple[FieldSpec, ...] = ()
    """Of the row too, but the same for all such layers: the first of a stage keeps it."""


@dataclass(frozen=True, slots=True)
class StateTypes:
    """The dtypes state is kept in, where the model leaves a choice."""

    kv: torch.dtype
    compute: torch.dtype


LayerKind = Callable[[Any, int, StateTypes], LayerState]
"""(the library's configuration, layer, dtypes) -> what that layer keeps."""


def attention_state(config: Any, layer: int, types: StateTypes) -> LayerState:  # noqa: ARG001
    """Full attention: keys and values of every KV head, a token a row; and their scales if they are quantised.

    Latent attention keeps what both are made of, of one head that all share: the latent, and the part of the key that
    is turned by its position. The two have different sizes.
    """
    if config.model_type in LATENT_FAMILIES:
        names, heads, dims = LATENT_FIELDS, 1, (int(config.kv_lora_rank), int(config.qk_rope_head_dim))
    else:
        heads, dim = _kv_shape(config)
        names, dims = ("key", "value"), (dim, dim)
    fields = tuple(FieldSpec(name, types.kv, (heads, dim)) for name, dim in zip(names, dims, strict=True))
    if is_quantised(types.kv):
        fields += (FieldSpec("scale", SCALE_DTYPE, (2, heads)),)
    return LayerState(row=fields)


def sliding_state(config: Any, layer: int, types: StateTypes) -> LayerState:  # noqa: ARG001
    """Attention that sees `sliding_window` tokens, itself among them: what the next token sees of the past.

    Windows stay as they were computed where rows are quantised: they are small, and do not grow.
    """
    shape = (config.sliding_window - 1, *_kv_shape(config))
    dtype = types.compute if is_quantised(types.kv) else types.kv
    return LayerState(fixed=tuple(FieldSpec(name, dtype, shape) for name in WINDOW_FIELDS))


def indexed_state(config: Any, layer: int, types: StateTypes) -> LayerState:
    """Sparse attention: as full attention, with the indexer's key, and the position it is turned to (time, height,
    width). The indexer's keys stay as they were computed where rows are quantised: they decide what is seen."""
    index = FieldSpec(INDEX_KEY, types.compute, (config.indexer_head_dim,))
    rows = (*attention_state(config, layer, types).row, index)
    return LayerState(row=rows, row_once=(FieldSpec(INDEX_POSITION, torch.int32, (3,)),))


def linear_state(config: Any, layer: int, types: StateTypes) -> LayerState:
    """Convolution and recurrent states."""
    return LayerState(fixed=tuple(FieldSpec(*state) for state in linear_states(config, layer, types.compute)))


def hybrid_state(config: Any, layer: int, types: StateTypes) -> LayerState:
    """Full attention and a recurrence side by side in one layer."""
    rows, fixed = attention_state(config, layer, types).row, linear_state(config, layer, types).fixed
    return LayerState(row=rows, fixed=fixed)


def draft_state(config: Any, layer: int, types: StateTypes) -> LayerState:
    """A draft head: what a layer of its kind keeps, and the hidden state behind the token (of all residual streams),
    which the next row of the head is made from.

    That hidden state is a field of every row where the timeline can be cut to any token, so that the head goes on from
    there too; where fixed state forbids that, it is part of it, and costs no row anything.
    """
    state = LAYER_KINDS[config.mtp_layer_types[0]](config, layer, types)
    hidden = FieldSpec("hidden", types.compute, (int(config.hidden_size) * streams_of(config),))
    if RECURRENT_KINDS & set(layer_kinds(config)):
        return LayerState(state.row, (hidden,), state.row_once)
    return LayerState((*state.row, hidden), (), state.row_once)


LAYER_KINDS: Mapping[str, LayerKind] = MappingProxyType(
    {
        "full_attention": attention_state,
        "sliding_attention": sliding_state,
        "indexed_attention": indexed_state,
        "linear_attention": linear_state,
        "conv": linear_state,
        "hybrid": hybrid_state,
    }
)
"""Layer kind, as the library's `layer_types` names it -> what a layer of it keeps."""


def _kv_shape(config: Any) -> tuple[int, int]:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return (config.num_key_value_heads, head_dim)


def layer_kinds(config: Any) -> tuple[str, ...]:
    """The kind of every layer, `[num_hidden_layers]`; a configuration that names none has full attention only."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return ("full_attention",) * int(config.num_hidden_layers)
    return tuple(kinds)


def streams_of(config: Any) -> int:
    """Residual streams of a model; the library's configuration of its text."""
    return int(getattr(config, STREAMS, 1))


def draft_layers(config: Any) -> int:
    """Layers of the draft head that runs beside the model: 1, or 0 without one.

    Some configurations count layers of a head whether or not it is loaded; `draft_loading` also names their kinds.
    """
    return len(getattr(config, "mtp_layer_types", None) or ())
