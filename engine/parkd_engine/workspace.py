"""The memory that reading a chunk takes for a while, computed from a model's configuration.

    chunk    residual streams | the largest of: feed-forward, attention, convolution, recurrence   a token of the chunk
    context  what attention makes of all earlier tokens, in one layer at a time                    a token of context

The factors below are numbers of tensors of that width that live at once. They were counted on the forward passes
themselves (a test does it again), for the library's code; fused kernels need less.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from parkd_engine.arenas.kv_format import is_quantised
from parkd_engine.families.layer_shapes import experts_of, kv_shape, layer_kinds
from parkd_engine.families.layer_state import INDEXED, LAYER_KINDS, draft_layers, streams_of
from parkd_engine.families.multimodal import language_config
from parkd_engine.families.records import family_of, vision_of
from parkd_engine.forward.attention import GATHERED, QUERY_BLOCK, WINDOW_QUERIES
from parkd_engine.forward.dense import refusal
from parkd_engine.forward.indexer import MOST_SCORES
from parkd_engine.weights.linear import WORKSPACE_BYTES

FLOAT = 4
"""Bytes of a float32: the reference code of recurrences computes in it."""
DELTA_CHUNK = 64
"""Tokens that a gated delta rule takes at once."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """Bytes that are taken while a chunk is read, and free between two."""

    constant_bytes: int
    bytes_a_token: int
    """Additional bytes for each token of context."""


def chunk_workspace(
    config: Any, tokens: int, dtype: torch.dtype, kv_dtype: torch.dtype, device: str, *, linear_only: bool = False
) -> Workspace:
    """The workspace of a stage on `device` that reads `tokens` tokens at once, computing in `dtype`. `config` is the
    library's configuration of the whole model. With `linear_only`, that of its recurrent layers."""
    text, on_card = language_config(config), torch.device(device).type == "cuda"
    kinds = set(layer_kinds(text))
    if linear_only:
        kinds = {kind for kind in kinds if LAYER_KINDS[kind].is_recurrent}
    mixers = [_mixer_bytes(text, kind, dtype.itemsize, on_card=on_card) for kind in kinds]
    # The input of the layer, its sum with the mixer's output, norms of both, and the norms' float32 numbers.
    residual = 6 * int(text.hidden_size) * streams_of(text) * dtype.itemsize
    if draft_layers(text):
        residual += 4 * int(text.hidden_size) * streams_of(text) * dtype.itemsize
    each = residual + max([_feed_forward(text) * dtype.itemsize, *mixers])
    bias = _bias_bytes(config, tokens, dtype.itemsize, on_card=on_card) if "sliding_attention" in kinds else 0
    chosen = 2 * GATHERED * dtype.itemsize + 2 * MOST_SCORES * FLOAT if INDEXED in kinds else 0
    attends = bool(kinds & {"full_attention", "hybrid", INDEXED})
    scratch = _context_bytes(config, dtype, kv_dtype, on_card=on_card) if attends else 0
    return Workspace(tokens * each + bias + chosen, scratch)


def numbers_bytes(codes: int, itemsize: int, *, on_card: bool) -> int:
    """What the product of a prompt with weights that are codes takes: the numbers that some rows of a matrix become.
    `codes` is the size of the largest matrix. On CPUs the codes, unpacked, are beside them."""
    return min(codes * itemsize, WORKSPACE_BYTES) * (1 if on_card else 2)


def _feed_forward(text: Any) -> int:
    """Elements for each token: gates, their activations and the other half; with experts once for each that a token is
    routed to, and its hidden state on the way in and out."""
    width = int(getattr(text, "intermediate_size", 0) or 0)
    _, experts = experts_of(text)
    if not experts:
        return 3 * width
    expert_width = int(getattr(text, "moe_intermediate_size", None) or width)
    shared = int(getattr(text, "shared_expert_intermediate_size", 0) or getattr(text, "shared_intermediate_size", 0))
    return max(experts * 4 * (int(text.hidden_size) + expert_width), 3 * max(width, shared))


def _mixer_bytes(text: Any, kind: str, itemsize: int, *, on_card: bool) -> int:
    """Bytes for each token of a chunk in a layer of this kind, besides the residual."""
    if kind == "dummy":
        return 0
    if LAYER_KINDS[kind].is_recurrent and family_of(text).by_parts:
        return _states_of_each(text) + (_attention(text, itemsize) if kind == "hybrid" else 0)
    if kind == "conv":
        return 4 * int(text.hidden_size) * itemsize
    if kind == "linear_attention" and hasattr(text, "linear_num_value_heads"):
        return _delta_net(text, itemsize, on_card=on_card)
    if kind == "linear_attention":
        return _mamba(text)
    return _attention(text, itemsize) + (_mamba(text) if kind == "hybrid" else 0)


def _attention(text: Any, itemsize: int) -> int:
    """Queries and a gate, turned and not, and the output; keys and values, turned and not."""
    heads = int(text.num_attention_heads)
    if family_of(text).has_latents:
        return 5 * heads * int(text.qk_nope_head_dim + text.qk_rope_head_dim) * itemsize
    return max(5 * heads * dim + 4 * width for dim, width in _widths(text)) * itemsize


def _widths(text: Any) -> set[tuple[int, int]]:
    """Head size, and elements of a token's keys, of every layer."""
    shapes = {kv_shape(text, layer) for layer in range(int(text.num_hidden_layers))}
    return {(dim, heads * dim) for heads, dim in shapes}


def _delta_net(text: Any, itemsize: int, *, on_card: bool) -> int:
    heads, key_heads = int(text.linear_num_value_heads), int(text.linear_num_key_heads)
    key, value = heads * int(text.linear_key_head_dim), heads * int(text.linear_value_head_dim)
    projected = 2 * key_heads * int(text.linear_key_head_dim) + value
    if on_card and importlib.util.find_spec("fla") is not None:
        # The convolution's input and output, contiguous copies for the kernels; products of keys within a chunk and
        # their inverse; keys and values of the update, the states before each chunk, and the output with its gate.
        states = value * int(text.linear_key_head_dim) // DELTA_CHUNK
        return (3 * projected + 2 * key + 4 * value + states) * itemsize + heads * DELTA_CHUNK * (FLOAT + itemsize)
    return (7 * key + 8 * value + 3 * heads * DELTA_CHUNK + 2 * projected) * FLOAT


def _states_of_each(text: Any) -> int:
    """Of a recurrence of which nothing but its states is known: as if each token had states of its own, four times."""
    states = family_of(text).linear_states
    assert states is not None, "its layers have recurrent state"
    layers = [layer for layer, kind in enumerate(layer_kinds(text)) if LAYER_KINDS[kind].is_recurrent]
    each = (sum(prod(shape) for _, _, shape in states(text, layer, torch.float32)) for layer in layers)
    return 4 * max(each) * FLOAT


def _mamba(text: Any) -> int:
    names = ("mamba_n_heads", "mamba_chunk_size", "mamba_d_state", "mamba_d_head")
    if not hasattr(text, names[0]):  # Nemotron-H.
        names = ("mamba_num_heads", "chunk_size", "ssm_state_size", "mamba_head_dim")
    heads, chunk, state, dim = (int(getattr(text, name)) for name in names)
    return heads * (3 * chunk + 4 * state + 11 * dim) * FLOAT


def _bias_bytes(config: Any, tokens: int, itemsize: int, *, on_card: bool) -> int:
    """Two biases and a mask of a block of queries over a window; on a GPU also keys and values for every head."""
    text = language_config(config)
    queries = min(tokens, WINDOW_QUERIES if on_card else QUERY_BLOCK)
    seen = int(text.sliding_window) + queries
    heads = int(text.num_attention_heads)
    dim = max(dim for dim, _ in _widths(text))
    return queries * seen * (2 * itemsize + 1) + (2 * seen * heads * dim * itemsize if on_card else 0)


def _context_bytes(config: Any, dtype: torch.dtype, kv_dtype: torch.dtype, *, on_card: bool) -> int:
    """Bytes for each token of context in a layer with full attention."""
    text, vision = language_config(config), vision_of(config)
    heads, itemsize = int(text.num_attention_heads), dtype.itemsize
    # On CPUs, and where an image sees itself, a block of queries has a bias over all keys; two live at once.
    scratch = 0 if on_card and not (vision is not None and vision.sees_itself) else 2 * QUERY_BLOCK * itemsize
    if family_of(text).has_latents:  # Keys and values of every head are computed from all latents.
        key, value = int(text.qk_nope_head_dim), int(text.v_head_dim)
        return scratch + heads * (2 * key + value + int(text.qk_rope_head_dim)) * itemsize
    if kv_dtype == dtype:
        return scratch
    dim, width = max(dim for dim, _ in _widths(text)), max(width for _, width in _widths(text))
    if not is_quantised(kv_dtype):
        return scratch + 2 * width * itemsize
    if not on_card:  # One head at a time.
        return scratch + 2 * dim * itemsize
    made = 2 * width * itemsize
    return scratch + made + (0 if refusal(text, dtype, {kv_dtype}) is None else width * FLOAT)
