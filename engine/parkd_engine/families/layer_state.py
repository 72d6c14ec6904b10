"""State fields of a layer by its kind, before they have offsets: fields of a row, and of the fixed state.

    full          row: key | value             of every KV head
    latent        row: latent | rotary key     latent attention, which computes keys and values from them
    hybrid        row: key | value             and convolution and recurrent states in the fixed state
    sliding       no row fields                the last `window - 1` keys and values are fixed state
    linear        no row fields                convolution and recurrent states are fixed state
    dummy         nothing                      a feed-forward that counts as a layer of its own

Kind and family of a layer determine its fields. To support another kind, add an entry to `LAYER_KINDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from parkd_engine.arenas.kv_format import SCALE_DTYPE, is_quantised
from parkd_engine.families.layer_shapes import kv_shape, layer_kinds, window_of
from parkd_engine.families.records import family_of

WINDOW_FIELDS = ("window_key", "window_value")
LATENT_FIELDS = ("latent", "rotary_key")
INDEX_KEY = "index_key"
INDEX_POSITION = "index_position"
STREAMS = "hc_count"
"""Configuration entry: number of parallel residual streams, in families that have several."""
INDEXED = "indexed_attention"
"""The library's name for layers of sparse attention, which have an index."""


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """A field that has no offset yet."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LayerState:
    """The state of one layer: fields of each token's row, and fields of the fixed state."""

    row: tuple[FieldSpec, ...] = ()
    fixed: tuple[FieldSpec, ...] = ()
    row_once: tuple[FieldSpec, ...] = ()
    """Row fields with equal values in all such layers. Only the first such layer of a stage stores them."""


@dataclass(frozen=True, slots=True)
class StateTypes:
    """The dtypes of state, where the model does not determine them."""

    kv: torch.dtype
    compute: torch.dtype


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What is known of a kind of layer."""

    state: Callable[[Any, int, StateTypes], LayerState]
    """(the library's configuration, layer, dtypes) -> the state of that layer."""
    is_recurrent: bool = False
    """Whether it has state that is valid at one position only."""
    sees_all: bool = False
    """Whether each token is multiplied with every earlier one."""
    is_recorded: bool = False
    """Whether its forward pass of one token reads nothing back from the device, so that it can be recorded."""


def attention_state(config: Any, layer: int, types: StateTypes) -> LayerState:
    """Full attention: keys and values of every KV head, and their scales if they are quantised.

    Latent attention stores, for one head shared by all, what keys and values are computed from: the latent, and the
    rotary part of the key. The two differ in size.
    """
    if family_of(config).has_latents:
        names, heads, dims = LATENT_FIELDS, 1, (int(config.kv_lora_rank), int(config.qk_rope_head_dim))
    else:
        heads, dim = kv_shape(config, layer)
        names, dims = ("key", "value"), (dim, dim)
    fields = tuple(FieldSpec(name, types.kv, (heads, dim)) for name, dim in zip(names, dims, strict=True))
    if is_quantised(types.kv):
        fields += (FieldSpec("scale", SCALE_DTYPE, (2, heads)),)
    return LayerState(row=fields)


def sliding_state(config: Any, layer: int, types: StateTypes) -> LayerState:
    """Attention over the last `sliding_window` tokens, the token itself included. The state is the tokens before it.

    Windows are never quantised, since they are small and do not grow; they then keep the compute dtype.
    """
    shape = (window_of(config, layer) - 1, *kv_shape(config, layer))
    dtype = types.compute if is_quantised(types.kv) else types.kv
    return LayerState(fixed=tuple(FieldSpec(name, dtype, shape) for name in WINDOW_FIELDS))


def indexed_state(config: Any, layer: int, types: StateTypes) -> LayerState:
    """Sparse attention: full attention's fields, the indexer's key, and its rotary position (time, height, width).
    Indexer keys are never quantised, since they decide which keys are seen."""
    index = FieldSpec(INDEX_KEY, types.compute, (config.indexer_head_dim,))
    rows = (*attention_state(config, layer, types).row, index)
    return LayerState(row=rows, row_once=(FieldSpec(INDEX_POSITION, torch.int32, (3,)),))


def linear_state(config: Any, layer: int, types: StateTypes) -> LayerState:
    """Convolution and recurrent states."""
    states = family_of(config).linear_states
    assert states is not None, "check_config refuses such layers of other families"
    return LayerState(fixed=tuple(FieldSpec(*state) for state in states(config, layer, types.compute)))


def hybrid_state(config: Any, layer: int, types: StateTypes) -> LayerState:
    """Full attention and a recurrence in parallel in one layer."""
    rows, fixed = attention_state(config, layer, types).row, linear_state(config, layer, types).fixed
    return LayerState(row=rows, fixed=fixed)


def no_state(config: Any, layer: int, types: StateTypes) -> LayerState:  # noqa: ARG001
    """A layer that keeps nothing, such as a feed-forward that the model counts as a layer."""
    return LayerState()


def draft_state(config: Any, layer: int, types: StateTypes) -> LayerState:
    """A draft head: the state of a layer of its kind, and the model's hidden state after the token (all residual
    streams), from which the head computes its next row.

    If the timeline can be cut at any token, every row has that hidden state, so that the head can continue from any
    cut. In models with recurrent state it cannot; the hidden state is then part of the fixed state and not of rows.
    """
    state = LAYER_KINDS[config.mtp_layer_types[0]].state(config, layer, types)
    hidden = FieldSpec("hidden", types.compute, (int(config.hidden_size) * streams_of(config),))
    if any(LAYER_KINDS[kind].is_recurrent for kind in layer_kinds(config)):
        return LayerState(state.row, (hidden,), state.row_once)
    return LayerState((*state.row, hidden), (), state.row_once)


LAYER_KINDS: Mapping[str, LayerKind] = MappingProxyType(
    {
        "full_attention": LayerKind(attention_state, sees_all=True, is_recorded=True),
        "sliding_attention": LayerKind(sliding_state, is_recorded=True),
        INDEXED: LayerKind(indexed_state),
        "linear_attention": LayerKind(linear_state, is_recurrent=True, is_recorded=True),
        "conv": LayerKind(linear_state, is_recurrent=True, is_recorded=True),
        "hybrid": LayerKind(hybrid_state, is_recurrent=True, sees_all=True),
        "dummy": LayerKind(no_state, is_recorded=True),
    }
)
"""Layer kind, as named in the library's `layer_types` -> what is known of such layers."""


def streams_of(config: Any) -> int:
    """Number of residual streams. `config` is the library's text configuration."""
    return int(getattr(config, STREAMS, 1))


def draft_layers(config: Any) -> int:
    """Number of layers of the loaded draft head: 1, or 0 without one.

    Counts the kinds that `draft_loading` adds when it loads a head; the configuration's own count does not tell that.
    """
    return len(getattr(config, "mtp_layer_types", None) or ())
