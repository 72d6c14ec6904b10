"""A Gemma 3 layer for one token in nine kernels; transformers launches thirty.

    hidden -> norm, q k v       one matvec         -> norms, rotary, row written at the position on the device
           -> attention         two kernels        -> output matvec
           -> norm, residual    one kernel
           -> norm, gate, up    one kernel         -> down matvec
           -> norm, residual    one kernel

Rounds where transformers does, except in the norms before products, whose results are not stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

GELU = "gelu_pytorch_tanh"


def is_known(layer: Any) -> bool:
    """Whether the layer is built as in the published models, as these kernels assume."""
    attention = layer.self_attn
    return (
        layer.config.hidden_activation == GELU
        and attention.q_proj.bias is None
        and attention.attn_logit_softcapping is None
        and attention.is_causal
    )


def one_token(layer: Any) -> Callable[..., torch.Tensor]:
    """The layer's forward pass for use while a step of one token is recorded."""
    from parkd_engine.kernels.matvec import gated, matvec
    from parkd_engine.kernels.pointwise import add_offset_norm

    mlp = layer.mlp

    def forward(
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        cache: Any = None,
        **_: Any,
    ) -> torch.Tensor:
        hidden = hidden_states.view(-1)
        assert len(hidden) == mlp.gate_proj.in_features, "one token"
        attended = _attended(layer, hidden, position_embeddings, cache)
        delta, between = torch.empty_like(hidden), torch.empty_like(hidden)
        matvec(attended, (layer.self_attn.o_proj,), delta)
        norm = layer.post_attention_layernorm
        add_offset_norm(hidden, delta, norm.weight, between, norm.eps)
        inner = hidden.new_empty(mlp.gate_proj.out_features)
        norm = layer.pre_feedforward_layernorm
        gated(between, mlp.gate_proj, mlp.up_proj, inner, norm=norm.weight, offset=True, eps=norm.eps, gelu=True)
        matvec(inner, (mlp.down_proj,), delta)
        norm, out = layer.post_feedforward_layernorm, torch.empty_like(hidden_states)
        add_offset_norm(between, delta, norm.weight, out.view(-1), norm.eps)
        return out

    return forward


def _attended(
    layer: Any, hidden: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], cache: Any
) -> torch.Tensor:
    """The layer's attention before the output projection, `[q_heads * dim]`; writes the token's row."""
    from parkd_engine.kernels.matvec import matvec
    from parkd_engine.kernels.rows import write_rows

    attention, norm = layer.self_attn, layer.input_layernorm
    mixers = (attention.q_proj, attention.k_proj, attention.v_proj)
    widths = [mixer.out_features for mixer in mixers]
    qkv = hidden.new_empty(sum(widths))
    matvec(hidden, mixers, qkv, norm=norm.weight, offset=True, eps=norm.eps)
    q, k, v = torch.split(qkv[None], widths, dim=1)
    cos, sin = (turn[0] for turn in position_embeddings)
    rows_of = cache.layers[attention.layer_idx]
    rows = rows_of.placed()
    query, attended = torch.empty_like(q[0]), torch.empty_like(q[0])
    write_rows(
        q,
        k,
        v,
        cos,
        sin,
        rows.slot,
        query,
        rows.keys,
        rows.values,
        rows.scales,
        q_norm=attention.q_norm.weight,
        k_norm=attention.k_norm.weight,
        offset=True,
        eps=norm.eps,
    )
    kv_heads, dim = rows.keys.shape[1:]
    attend = rows_of.place.attention(len(query) // dim, kv_heads, dim, codes=rows.scales is not None)
    scaling = float(attention.scaling)
    seen = {"window": rows.window, "first": rows.first}
    attend(query, rows.keys, rows.values, rows.slot, attended, scaling, rows.scales, **seen)
    return attended
