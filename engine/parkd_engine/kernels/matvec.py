"""Products of weight matrices with one token's vector, on which decoding spends its time.

Each program reads a few rows of the weights once, at memory speed, and also does the adjacent operations of the layer:
the norm of the vector before, the residual sum or the gate after. Sums are in float32. Where the library rounds after
each operation, these kernels round at the end.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl

from parkd_engine.kernels import codes
from parkd_engine.kernels.overlap import overlap, wait, wait_alone
from parkd_engine.kernels.tiling import CUBIC, SQRT_8_OVER_PI, Tiling
from parkd_engine.weights.kinds import kind_of

NARROW, UNEVEN, MIDDLE, WIDE = Tiling(4, 2048, 8), Tiling(4, 512, 4), Tiling(2, 1024, 4), Tiling(8, 512, 4)
NARROW_COLUMNS, MIDDLE_COLUMNS, WIDE_ROWS = 4096, 8192, 4096
"""The best of those in `benchmarks/gpu/kernels.py`, H200, bf16: 3.1 and 4.5 TB/s for 6144 and 151,936 rows of 4096, 3.7
and 4.6 for 10,240 and 248,320 rows of 5120, 4.0 for 5120 rows of 17,408, and 3.8 for the gate's two matrices of 12,288
rows of 4096 (the last two with WIDE). With 2560 columns 2.3 for 4096 rows and 4.5 for 262,208 (UNEVEN); 2.9 for 2560
rows of 10,240, which are too few rows for WIDE."""


def tiling_for(rows: int, columns: int) -> Tiling:
    """The tiling for matrices of this shape."""
    if columns <= NARROW_COLUMNS:
        return NARROW if columns % NARROW.columns == 0 else UNEVEN
    return MIDDLE if columns <= MIDDLE_COLUMNS or rows < WIDE_ROWS else WIDE


@triton.jit
def _matvec_kernel(
    x_ptr,
    norm_ptr,
    weight_ptr,
    offset1,
    offset2,
    bias0_ptr,
    bias1_ptr,
    bias2_ptr,
    residual_ptr,
    out_ptr,
    n0,
    n1,
    n2,
    eps,
    K: tl.constexpr,
    NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
):
    # Up to three matrices, whose outputs are concatenated. `offset1` and `offset2` are the distances, in elements, from
    # the first matrix's weights to the others'.
    program = tl.program_id(0)
    blocks0 = tl.cdiv(n0, ROWS)
    blocks1 = blocks0 + tl.cdiv(n1, ROWS)
    is1 = (program >= blocks0) & (program < blocks1)
    is2 = program >= blocks1
    block = program - tl.where(is2, blocks1, tl.where(is1, blocks0, 0))
    n = tl.where(is2, n2, tl.where(is1, n1, n0))
    base = tl.where(is2, n0 + n1, tl.where(is1, n0, 0))
    weights = weight_ptr + tl.where(is2, offset2, tl.where(is1, offset1, 0))
    rows = block * ROWS + tl.arange(0, ROWS)
    inside = rows < n
    starts = rows.to(tl.int64) * K
    wait(EARLY)
    sums = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    squares = tl.zeros([COLUMNS], dtype=tl.float32)
    for start in range(0, K, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        if K % COLUMNS == 0:
            w = tl.load(weights + starts[:, None] + columns[None, :], mask=inside[:, None], other=0.0)
            x = tl.load(x_ptr + columns).to(tl.float32)
            if NORM:
                squares += x * x
                x *= tl.load(norm_ptr + columns).to(tl.float32) + OFFSET
        else:
            there = columns < K
            w = tl.load(weights + starts[:, None] + columns[None, :], mask=inside[:, None] & there[None, :], other=0.0)
            x = tl.load(x_ptr + columns, mask=there, other=0.0).to(tl.float32)
            if NORM:
                squares += x * x
                x *= tl.load(norm_ptr + columns, mask=there, other=0.0).to(tl.float32) + OFFSET
        sums += w.to(tl.float32) * x[None, :]
    y = tl.sum(sums, axis=1)
    if NORM:
        y *= tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
    if BIAS:
        b0 = tl.load(bias0_ptr + rows, mask=inside & ~is1 & ~is2, other=0.0)
        b1 = tl.load(bias1_ptr + rows, mask=inside & is1, other=0.0)
        b2 = tl.load(bias2_ptr + rows, mask=inside & is2, other=0.0)
        y += (b0 + b1 + b2).to(tl.float32)
    if RESIDUAL:
        y = y.to(residual_ptr.dtype.element_ty).to(tl.float32)
        y += tl.load(residual_ptr + rows, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + base + rows, y.to(weight_ptr.dtype.element_ty).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gated_kernel(
    x_ptr,
    norm_ptr,
    gate_ptr,
    up_offset,
    out_ptr,
    n,
    eps,
    K: tl.constexpr,
    NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    GELU: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < n
    starts = rows.to(tl.int64) * K
    wait_alone(EARLY)  # The down projection is next.
    gates = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    ups = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    squares = tl.zeros([COLUMNS], dtype=tl.float32)
    for start in range(0, K, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        there = columns < K
        at = starts[:, None] + columns[None, :]
        valid = inside[:, None] & there[None, :]
        gate = tl.load(gate_ptr + at, mask=valid, other=0.0)
        up = tl.load(gate_ptr + up_offset + at, mask=valid, other=0.0)
        x = tl.load(x_ptr + columns, mask=there, other=0.0).to(tl.float32)
        if NORM:
            squares += x * x
            x *= tl.load(norm_ptr + columns, mask=there, other=0.0).to(tl.float32) + OFFSET
        gates += gate.to(tl.float32) * x[None, :]
        ups += up.to(tl.float32) * x[None, :]
    gate_out, up_out = tl.sum(gates, axis=1), tl.sum(ups, axis=1)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
        gate_out *= scale
        up_out *= scale
    dtype = gate_ptr.dtype.element_ty
    gate_out = gate_out.to(dtype).to(tl.float32)
    up_out = up_out.to(dtype).to(tl.float32)
    # The tanh approximation of GELU is x sigmoid(2 u), since 1 + tanh(u) = 2 sigmoid(2 u).
    turned = SQRT_8_OVER_PI * (gate_out + CUBIC * gate_out * gate_out * gate_out) if GELU else gate_out
    act = (gate_out * tl.sigmoid(turned)).to(dtype).to(tl.float32)
    tl.store(out_ptr + rows, (act * up_out).to(dtype), mask=inside)


def _distance(first: torch.Tensor, other: torch.Tensor) -> int:
    """Distance in elements between two tensors, so that a kernel needs one pointer for both."""
    return (other.data_ptr() - first.data_ptr()) // first.element_size()


def matvec(
    x: torch.Tensor,
    linears: tuple[Any, ...],
    out: torch.Tensor,
    *,
    norm: torch.Tensor | None = None,
    offset: bool = False,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    tiling: Tiling | None = None,
) -> None:
    """`out[...] = residual + concat(W x + b)` over one to three linear modules.

    `x` is `[k]`, weights are `[n_i, k]`, `out` is `[sum of n_i]`, in the weights' dtype or float32 (rounded to the
    weights' dtype first, as a product in that dtype would be). With `norm` `[k]`, `x` is first divided by the root of
    its mean square plus `eps`, and multiplied by `norm` (plus one if `offset`). `out` may be `residual` itself. Raises
    ValueError if only some of the modules have a bias.
    """
    if any(kind_of(linear) is not None for linear in linears):
        _codes_matvec(x, linears, out, norm=norm, offset=offset, eps=eps, residual=residual)
        return
    weights = [linear.weight for linear in linears]
    tiling = tiling or tiling_for(*weights[0].shape)
    sizes = [weight.shape[0] for weight in weights] + [0, 0]
    others = [_distance(weights[0], weight) for weight in weights[1:]] + [0, 0]
    biases = [linear.bias for linear in linears]
    has_bias = any(bias is not None for bias in biases)
    if has_bias and any(bias is None for bias in biases):
        raise ValueError("either all or none of the matrices have a bias")
    tables = [weights[0] if bias is None else bias for bias in biases] + [weights[0], weights[0]]
    programs = sum(triton.cdiv(size, tiling.rows) for size in sizes)
    _matvec_kernel[(programs,)](
        x,
        x if norm is None else norm,
        weights[0],
        others[0],
        others[1],
        tables[0],
        tables[1],
        tables[2],
        x if residual is None else residual,
        out,
        sizes[0],
        sizes[1],
        sizes[2],
        eps,
        K=weights[0].shape[1],
        NORM=norm is not None,
        OFFSET=float(offset),
        BIAS=has_bias,
        RESIDUAL=residual is not None,
        ROWS=tiling.rows,
        COLUMNS=tiling.columns,
        num_warps=tiling.warps,
        **overlap(x.device),
    )


def gated(
    x: torch.Tensor,
    gate: Any,
    up: Any,
    out: torch.Tensor,
    *,
    norm: torch.Tensor | None = None,
    offset: bool = False,
    eps: float = 0.0,
    gelu: bool = False,
    tiling: Tiling = WIDE,
) -> None:
    """`out = silu(G x) * (U x)`; with `gelu`, its tanh approximation in place of silu. `x` is `[k]` and is first normed
    as in `matvec` if there is a `norm`. Weights are `[n, k]` without bias, `out` is `[n]`."""
    if kind_of(gate) is not None or kind_of(up) is not None:
        _codes_gated(x, gate, up, out, norm=norm, offset=offset, eps=eps, gelu=gelu)
        return
    rows = gate.weight.shape[0]
    _gated_kernel[(triton.cdiv(rows, tiling.rows),)](
        x,
        x if norm is None else norm,
        gate.weight,
        _distance(gate.weight, up.weight),
        out,
        rows,
        eps,
        K=gate.weight.shape[1],
        NORM=norm is not None,
        OFFSET=float(offset),
        GELU=gelu,
        ROWS=tiling.rows,
        COLUMNS=tiling.columns,
        num_warps=tiling.warps,
        **overlap(x.device),
    )


def _codes_matvec(
    x: torch.Tensor,
    linears: tuple[Any, ...],
    out: torch.Tensor,
    *,
    norm: torch.Tensor | None,
    offset: bool,
    eps: float,
    residual: torch.Tensor | None,
) -> None:
    """`matvec` over matrices of which some are codes: in one launch if they are alike, else one after the other."""
    if codes.are_known(linears):
        codes.matvec(x, linears, out, norm=norm, offset=offset, eps=eps, residual=residual)
        return
    if len(linears) > 1:
        starts = [0, *accumulate(linear.out_features for linear in linears)]
        # The vector may be the output: products read it to their end.
        vector = x.clone() if x.data_ptr() == out.data_ptr() else x
        for linear, first, end in zip(linears, starts, starts[1:], strict=False):
            beside = None if residual is None else residual[first:end]
            matvec(vector, (linear,), out[first:end], norm=norm, offset=offset, eps=eps, residual=beside)
        return
    (linear,) = linears
    if norm is not None:
        scale = norm.float() + float(offset)
        x = (x.float() * torch.rsqrt(x.float().square().mean() + eps) * scale).to(x.dtype)
    product = linear(x[None])[0]
    out.copy_(product if residual is None else residual + product)


def _codes_gated(
    x: torch.Tensor,
    gate: Any,
    up: Any,
    out: torch.Tensor,
    *,
    norm: torch.Tensor | None,
    offset: bool,
    eps: float,
    gelu: bool,
) -> None:
    """`gated` over matrices of which some are codes."""
    if codes.are_known((gate, up)):
        codes.gated(x, gate, up, out, norm=norm, offset=offset, eps=eps, gelu=gelu)
        return
    both = x.new_empty(2, len(out))
    for linear, half in zip((gate, up), both, strict=True):
        matvec(x, (linear,), half, norm=norm, offset=offset, eps=eps)
    activation = torch.nn.functional.gelu(both[0], approximate="tanh") if gelu else torch.nn.functional.silu(both[0])
    torch.mul(activation, both[1], out=out)
