"""A token's forward in fewer kernels, for models that run through the library's code.

While a forward is recorded (`engine.decode_graph`), modules whose work for one token is known to a kernel of
`engine.kernels` are run by that:

    a matrix                     one product at memory speed
    a norm                       one kernel where the library launches seven
    gate, up, silu, product      one kernel, and the product down
    a gated delta net            four products, its window, its memory and gate, one product: 7 kernels of some 30

Everything else stays the library's, and so does every chunk of a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

Forward = Callable[..., Any]
NORM, GATED, DELTA_NET = "norm", "gated", "delta net"
KNOWN: Mapping[str, str] = MappingProxyType(
    {
        "Qwen3_5RMSNorm": NORM,
        "Qwen3NextRMSNorm": NORM,
        "Gemma3RMSNorm": NORM,
        "Qwen3_5MLP": GATED,
        "Qwen3_5GatedDeltaNet": DELTA_NET,
    }
)
"""The library's class -> what it does."""
SILU = "silu"


@contextmanager
def few_kernels(*modules: nn.Module | None) -> Iterator[None]:
    """Inside, `modules` and all in them run one token in few kernels, where that is known how. They must be on a card
    and hold bf16 or f16."""
    changed = []
    try:
        for root in modules:
            for module in () if root is None else root.modules():
                forward = _one_token(module)
                if forward is not None and "forward" not in module.__dict__:
                    module.forward = forward
                    changed.append(module)
        yield
    finally:
        for module in changed:
            del module.forward


def _one_token(module: Any) -> Forward | None:
    if type(module) is nn.Linear:
        return _product(module)
    kind = KNOWN.get(type(module).__name__)
    if kind == NORM:
        return _norm(module)
    if kind == GATED and module.config.hidden_act == SILU:
        return _gated(module)
    if kind == DELTA_NET and module.activation == SILU and _has_even_heads(module):
        return _delta_net(module)
    return None


def _has_even_heads(module: Any) -> bool:
    """Sizes that are powers of two: what the kernel takes."""
    return all(size & (size - 1) == 0 for size in (module.head_k_dim, module.head_v_dim))


def _product(linear: Any) -> Forward:
    from engine.kernels.matvec import matvec

    def forward(x: torch.Tensor) -> torch.Tensor:
        if x.numel() != linear.in_features or x.dtype != linear.weight.dtype:
            return torch.nn.functional.linear(x, linear.weight, linear.bias)
        out = x.new_empty((*x.shape[:-1], linear.out_features))
        matvec(x.reshape(-1), (linear,), out.view(-1))
        return out

    return forward


def _norm(norm: Any) -> Forward:
    from engine.kernels.pointwise import offset_norm

    def forward(x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, -2) if x.dim() > 2 else x  # One token's heads: evenly apart, also where half are a gate.
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        offset_norm(rows, norm.weight, out.view(rows.shape), norm.eps)
        return out

    return forward


def _gated(mlp: Any) -> Forward:
    from engine.kernels.matvec import gated

    def forward(x: torch.Tensor) -> torch.Tensor:
        assert x.numel() == mlp.gate_proj.in_features, "one token"
        inner = x.new_empty((*x.shape[:-1], mlp.gate_proj.out_features))
        gated(x.reshape(-1), mlp.gate_proj, mlp.up_proj, inner.view(-1))
        down: torch.Tensor = mlp.down_proj(inner)
        return down

    return forward


def _delta_net(net: Any) -> Forward:
    from engine.kernels.delta import move_memory, move_window

    def forward(hidden_states: torch.Tensor, cache: Any = None, **_: Any) -> torch.Tensor:
        projected = net.in_proj_qkv(hidden_states).view(-1)
        z, beta, decay = (part(hidden_states).view(-1) for part in (net.in_proj_z, net.in_proj_b, net.in_proj_a))
        qkv, out = torch.empty_like(projected), torch.empty_like(z)
        window = cache.get_conv_state(net.layer_idx, state_idx=0)[0]
        memory = cache.get_recurrent_state(net.layer_idx, state_idx=0)[0]
        move_window(projected, window, net.conv1d.weight.squeeze(1), qkv)
        eps = net.norm.variance_epsilon
        move_memory(qkv, z, beta, decay, net.dt_bias, net.A_log, net.norm.weight, memory, out, eps)
        result: torch.Tensor = net.out_proj(out.view(1, 1, -1))
        return result

    return forward
