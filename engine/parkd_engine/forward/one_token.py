"""Runs a decode step in fewer kernels, for models that run through the library's code.

While a forward is recorded (`forward.decode_graph`), modules for which `kernels` has a kernel for one or a few
tokens use it:

    linear layer                 one matrix-vector product at memory speed
    norm                         one kernel instead of seven
    gate, up, silu, product      one kernel, and one for the down projection
    gated delta net              four products, convolution, recurrence with gate, one product: 7 kernels, not some 30
    Gemma 3 layer                9 kernels instead of some 30 (`parkd_engine.forward.gemma_layer`)

With a draft head a step can have several tokens. Each is computed as if alone, to the bit: products read the weights
once for all tokens (`parkd_engine.kernels.few_tokens`), and the rest runs token by token. All other modules, and prompt
chunks, run the library's code, except for norms and gates (`chunks_in_fewer_kernels`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from parkd_engine.families.family import FusedPart
from parkd_engine.families.records import FUSED_PARTS
from parkd_engine.weights.linear import compute_dtype, is_linear

Forward = Callable[..., Any]
Note = Callable[[int, int], None]
"""Called with (layer, token) when the layer's state is the one after that token."""
OF_ANY_LENGTH = frozenset({FusedPart.NORM, FusedPart.GATED})
"""Kinds whose kernels take chunks of any length as well as single tokens."""
SILU = "silu"


@contextmanager
def few_kernels(*modules: nn.Module | None, together: bool = False, note: Note | None = None) -> Iterator[None]:
    """Inside the context, `modules` and their submodules run a step in few kernels where there is one for them. A step
    has one token; with `together` it can have more, and each gets the same bits as alone. `note` is called for the
    recurrent state after each token. The modules must be on a GPU, in bf16 or f16."""
    changed: list[tuple[Any, Forward | None]] = []
    try:
        for root in modules:
            for module in () if root is None else root.modules():
                forward = _in_few_kernels(module, note, together=together)
                if forward is not None:
                    changed.append((module, module.__dict__.get("forward")))
                    module.forward = forward
        yield
    finally:
        for module, earlier in reversed(changed):
            del module.forward
            if earlier is not None:
                module.forward = earlier


def _in_few_kernels(module: Any, note: Note | None, *, together: bool) -> Forward | None:
    if is_linear(module):
        return _products(module) if together else _product(module)
    part = FUSED_PARTS.get(type(module).__name__)
    if part is FusedPart.NORM:
        return _norm(module)
    if part is FusedPart.GATED and module.config.hidden_act == SILU:
        return _gated_together(module) if together else _gated(module)
    if part is FusedPart.DELTA_NET and module.activation == SILU and _has_even_heads(module):
        return _delta_net(module, note)
    if part is FusedPart.GEMMA_LAYER:
        from parkd_engine.forward.gemma_layer import is_known, one_token

        return one_token(module) if is_known(module) else None
    return None


def chunks_in_fewer_kernels(inner: nn.Module) -> None:
    """From now on chunks of any length use the kernels for norms and gates. For models on a GPU in bf16 or f16."""
    module: Any
    for module in inner.modules():
        if FUSED_PARTS.get(type(module).__name__) in OF_ANY_LENGTH:
            forward = _in_few_kernels(module, None, together=True)
            if forward is not None:
                module.forward = forward


def _has_even_heads(module: Any) -> bool:
    """Whether the head sizes are powers of two, as the kernel requires."""
    return all(size & (size - 1) == 0 for size in (module.head_k_dim, module.head_v_dim))


def _product(linear: Any) -> Forward:
    from parkd_engine.kernels.matvec import matvec

    usual: Callable[[torch.Tensor], torch.Tensor] = linear.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        if x.numel() != linear.in_features or x.dtype != compute_dtype(linear, x):
            return usual(x)
        out = x.new_empty((*x.shape[:-1], linear.out_features))
        matvec(x.reshape(-1), (linear,), out.view(-1))
        return out

    return forward


def _products(linear: Any) -> Forward:
    from parkd_engine.kernels.few_tokens import MOST_TOKENS, products

    usual: Callable[[torch.Tensor], torch.Tensor] = linear.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        vectors = x.reshape(-1, linear.in_features)
        if len(vectors) > MOST_TOKENS or x.dtype != compute_dtype(linear, x):
            return usual(x)
        out = x.new_empty((*x.shape[:-1], linear.out_features))
        products(vectors, linear, out.view(-1, linear.out_features))
        return out

    return forward


def _norm(norm: Any) -> Forward:
    from parkd_engine.kernels.pointwise import offset_norm

    def forward(x: torch.Tensor) -> torch.Tensor:
        # One row per head. Their stride is constant, also where the projection interleaves heads and gates.
        rows = x.flatten(0, -2) if x.dim() > 2 else x
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        offset_norm(rows, norm.weight, out.view(rows.shape), norm.eps)
        return out

    return forward


def _gated(mlp: Any) -> Forward:
    from parkd_engine.kernels.matvec import gated

    def forward(x: torch.Tensor) -> torch.Tensor:
        assert x.numel() == mlp.gate_proj.in_features, "one token"
        inner = x.new_empty((*x.shape[:-1], mlp.gate_proj.out_features))
        gated(x.reshape(-1), mlp.gate_proj, mlp.up_proj, inner.view(-1))
        down: torch.Tensor = mlp.down_proj(inner)
        return down

    return forward


def _gated_together(mlp: Any) -> Forward:
    from parkd_engine.kernels.pointwise import gate

    def forward(x: torch.Tensor) -> torch.Tensor:
        gates, ups = mlp.gate_proj(x), mlp.up_proj(x)
        gate(gates, ups)
        down: torch.Tensor = mlp.down_proj(gates)
        return down

    return forward


def _delta_net(net: Any, note: Note | None) -> Forward:
    from parkd_engine.kernels.delta import move_memory, move_window

    def forward(hidden_states: torch.Tensor, cache: Any = None, **_: Any) -> torch.Tensor:
        projected = net.in_proj_qkv(hidden_states)[0]
        z, beta, decay = (part(hidden_states)[0] for part in (net.in_proj_z, net.in_proj_b, net.in_proj_a))
        out = torch.empty_like(z)
        window = cache.get_conv_state(net.layer_idx, state_idx=0)[0]
        memory = cache.get_recurrent_state(net.layer_idx, state_idx=0)[0]
        eps = net.norm.variance_epsilon
        for token in range(len(projected)):
            qkv = torch.empty_like(projected[token])
            move_window(projected[token], window, net.conv1d.weight.squeeze(1), qkv)
            given = (qkv, z[token], beta[token], decay[token])
            move_memory(*given, net.dt_bias, net.A_log, net.norm.weight, memory, out[token], eps)
            if note is not None:
                note(net.layer_idx, token)
        result: torch.Tensor = net.out_proj(out[None])
        return result

    return forward
