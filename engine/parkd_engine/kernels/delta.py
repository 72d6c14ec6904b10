"""One token through a gated delta net: updates the convolution window and each head's memory.

    x         -> window shifted, weighted, silu -> q, k, v
    memory    S <- S exp(g);  S <- S + k (v - k S) beta;  out = q S      one program per head reads and writes S once
    out       normed, weighted, gated by silu(z)

(Gated delta rule: Yang et al. 2024, "Gated Delta Networks". Rounds where the library's reference rounds.)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from parkd_engine.kernels.overlap import overlap, wait

CONV_BLOCK = 256
LINEAR_FROM = tl.constexpr(20.0)
"""Above this softplus is the identity, as in the library."""
NORM_EPS = tl.constexpr(1e-6)
"""Epsilon of the L2 norm of queries and keys."""


@triton.jit
def _window_kernel(
    x_ptr,
    window_ptr,
    weight_ptr,
    out_ptr,
    channels,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait(EARLY)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = c < channels
    x = tl.load(x_ptr + c, mask=inside, other=0.0)
    y = x.to(tl.float32) * tl.load(weight_ptr + c * WIDTH + WIDTH - 1, mask=inside, other=0.0).to(tl.float32)
    for j in tl.static_range(WIDTH - 1):
        kept = tl.load(window_ptr + c * WIDTH + j + 1, mask=inside, other=0.0)
        y += kept.to(tl.float32) * tl.load(weight_ptr + c * WIDTH + j, mask=inside, other=0.0).to(tl.float32)
        tl.store(window_ptr + c * WIDTH + j, kept, mask=inside)
    tl.store(window_ptr + c * WIDTH + WIDTH - 1, x, mask=inside)
    y = y.to(x.dtype).to(tl.float32)
    tl.store(out_ptr + c, (y * tl.sigmoid(y)).to(x.dtype), mask=inside)


@triton.jit
def _memory_kernel(
    qkv_ptr,
    z_ptr,
    beta_ptr,
    decay_ptr,
    bias_ptr,
    rate_ptr,
    weight_ptr,
    memory_ptr,
    out_ptr,
    eps,
    K_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait(EARLY)
    head = tl.program_id(0)
    k_head = head // GROUP
    i = tl.arange(0, K)
    j = tl.arange(0, V)
    q = tl.load(qkv_ptr + k_head * K + i).to(tl.float32)
    k = tl.load(qkv_ptr + K_HEADS * K + k_head * K + i).to(tl.float32)
    v = tl.load(qkv_ptr + 2 * K_HEADS * K + head * V + j)
    dtype = v.dtype
    q *= tl.rsqrt(tl.sum(q * q, axis=0) + NORM_EPS) * (K**-0.5)
    k *= tl.rsqrt(tl.sum(k * k, axis=0) + NORM_EPS)
    beta = tl.sigmoid(tl.load(beta_ptr + head).to(tl.float32)).to(dtype).to(tl.float32)
    step = tl.load(decay_ptr + head).to(tl.float32) + tl.load(bias_ptr + head).to(tl.float32)
    step = tl.where(step > LINEAR_FROM, step, tl.log(1.0 + tl.exp(tl.minimum(step, LINEAR_FROM))))
    kept = tl.exp(-tl.exp(tl.load(rate_ptr + head).to(tl.float32)) * step)
    at = memory_ptr + head * K * V + i[:, None] * V + j[None, :]
    memory = tl.load(at) * kept
    known = tl.sum(memory * k[:, None], axis=0)
    memory += k[:, None] * ((v.to(tl.float32) - known) * beta)[None, :]
    tl.store(at, memory)
    out = tl.sum(memory * q[:, None], axis=0).to(dtype).to(tl.float32)
    out *= tl.rsqrt(tl.sum(out * out, axis=0) / V + eps)
    out = (out.to(dtype).to(tl.float32) * tl.load(weight_ptr + j).to(tl.float32)).to(dtype).to(tl.float32)
    gate = tl.load(z_ptr + head * V + j).to(tl.float32)
    tl.store(out_ptr + head * V + j, (out * gate * tl.sigmoid(gate)).to(dtype))


def move_window(x: torch.Tensor, window: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Shifts `x` `[channels]` into the end of `window` `[channels, width]`. `out` `[channels]` is the silu of the
    window's sum weighted by `weight` `[channels, width]`. All contiguous."""
    channels, width = weight.shape
    _window_kernel[(triton.cdiv(channels, CONV_BLOCK),)](
        x, window, weight, out, channels, WIDTH=width, BLOCK=CONV_BLOCK, **overlap(x.device)
    )


def move_memory(
    qkv: torch.Tensor,
    z: torch.Tensor,
    beta: torch.Tensor,
    decay: torch.Tensor,
    bias: torch.Tensor,
    rate: torch.Tensor,
    weight: torch.Tensor,
    memory: torch.Tensor,
    out: torch.Tensor,
    eps: float,
) -> None:
    """Updates `memory`, float32 `[heads, k, v]`, by one token.

    `qkv` has queries and keys, `[k_heads, k]` each (`k_heads` divides `heads`), then values `[heads, v]`. `beta` and
    `decay` `[heads]` are outputs of projections; `bias` and `rate` `[heads]` are parameters (`rate` is a logarithm).
    `out` and the gate `z` are `[heads, v]`; the norm's `weight` is `[v]`. `k` and `v` are powers of two. All are
    contiguous.
    """
    heads, k, v = memory.shape
    k_heads = (qkv.numel() - heads * v) // (2 * k)
    _memory_kernel[(heads,)](
        qkv,
        z,
        beta,
        decay,
        bias,
        rate,
        weight,
        memory,
        out,
        eps,
        K_HEADS=k_heads,
        GROUP=heads // k_heads,
        K=k,
        V=v,
        num_warps=8,
        **overlap(qkv.device),
    )
