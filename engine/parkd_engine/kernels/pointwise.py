"""The work between matrix products: residual sums, norms, and the gate."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from parkd_engine.kernels.overlap import overlap, wait

GATE_BLOCK = 1024


@triton.jit
def _add_norm_kernel(
    hidden_ptr,
    delta_ptr,
    weight_ptr,
    out_ptr,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64) * WIDTH
    i = tl.arange(0, BLOCK)
    inside = i < WIDTH
    dtype = hidden_ptr.dtype.element_ty
    x = tl.load(hidden_ptr + row + i, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(delta_ptr + row + i, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(dtype)
        tl.store(hidden_ptr + row + i, rounded, mask=inside)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps)
    weight = tl.load(weight_ptr + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row + i, ((x * scale).to(dtype).to(tl.float32) * weight).to(dtype), mask=inside)


@triton.jit
def _offset_norm_kernel(
    x_ptr, row_stride, weight_ptr, out_ptr, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < WIDTH
    x = tl.load(x_ptr + row * row_stride + i, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    wide *= tl.rsqrt(tl.sum(wide * wide, axis=0) / WIDTH + eps)
    weight = 1.0 + tl.load(weight_ptr + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + i, (wide * weight).to(x.dtype), mask=inside)


@triton.jit
def _add_offset_norm_kernel(
    hidden_ptr, delta_ptr, weight_ptr, out_ptr, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    wait(EARLY)
    i = tl.arange(0, BLOCK)
    inside = i < WIDTH
    dtype = hidden_ptr.dtype.element_ty
    delta = tl.load(delta_ptr + i, mask=inside, other=0.0).to(tl.float32)
    hidden = tl.load(hidden_ptr + i, mask=inside, other=0.0).to(tl.float32)
    weight = 1.0 + tl.load(weight_ptr + i, mask=inside, other=0.0).to(tl.float32)
    delta *= tl.rsqrt(tl.sum(delta * delta, axis=0) / WIDTH + eps)
    tl.store(out_ptr + i, (hidden + (delta * weight).to(dtype).to(tl.float32)).to(dtype), mask=inside)


@triton.jit
def _gate_kernel(gate_ptr, up_ptr, BLOCK: tl.constexpr, size, EARLY: tl.constexpr):
    wait(EARLY)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    dtype = gate_ptr.dtype.element_ty
    gate = tl.load(gate_ptr + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + i, mask=inside, other=0.0).to(tl.float32)
    act = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
    tl.store(gate_ptr + i, (act * up).to(dtype), mask=inside)


def add_norm(
    hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, out: torch.Tensor, eps: float
) -> None:
    """`hidden += delta` if there is one, then `out = hidden / rms(hidden) * weight`; `[n, width]`, contiguous."""
    rows, width = hidden.shape
    block = triton.next_power_of_2(width)
    _add_norm_kernel[(rows,)](
        hidden,
        hidden if delta is None else delta,
        weight,
        out,
        eps,
        WIDTH=width,
        BLOCK=block,
        ADD=delta is not None,
        num_warps=8 if block >= 2048 else 4,
        **overlap(hidden.device),
    )


def offset_norm(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float) -> None:
    """`out = x / rms(x) * (1 + weight)`, rounded once. `x` is `[n, width]` with any stride between rows."""
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    _offset_norm_kernel[(rows,)](
        x,
        x.stride(0),
        weight,
        out,
        eps,
        WIDTH=width,
        BLOCK=block,
        num_warps=8 if block >= 2048 else 4,
        **overlap(x.device),
    )


def add_offset_norm(
    hidden: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float
) -> None:
    """`out = hidden + delta / rms(delta) * (1 + weight)`; norm and sum are each rounded. All `[width]`, contiguous."""
    (width,) = hidden.shape
    block = triton.next_power_of_2(width)
    _add_offset_norm_kernel[(1,)](
        hidden, delta, weight, out, eps, WIDTH=width, BLOCK=block, num_warps=8, **overlap(hidden.device)
    )


def gate(gates: torch.Tensor, ups: torch.Tensor) -> None:
    """`gates = silu(gates) * ups`; both contiguous and of the same shape."""
    size = gates.numel()
    _gate_kernel[(triton.cdiv(size, GATE_BLOCK),)](gates, ups, BLOCK=GATE_BLOCK, size=size, **overlap(gates.device))
