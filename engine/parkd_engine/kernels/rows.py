"""Norms queries and keys, applies rotary positions, and writes keys and values into the arena's rows.

Rows hold floating point numbers, or 8-bit codes with one scale per token and head (`parkd_engine.arenas.kv_format`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from parkd_engine.kernels.overlap import overlap, wait

TO_INTEGER = tl.constexpr(12582912.0)
"""1.5 x 2**23: adding and subtracting it rounds a small float32 to the nearest integer, ties to even."""


@triton.jit
def _store_codes(codes_ptr, scale_ptr, low, high, i, inside, HALF: tl.constexpr):
    """Quantises and stores one head's float32 numbers."""
    largest = tl.maximum(tl.max(tl.abs(low), axis=0), tl.max(tl.abs(high), axis=0))
    scale = tl.minimum(tl.div_rn(largest, 127.0), 65504.0).to(tl.float16)
    divisor = scale.to(tl.float32)
    divisor = tl.where(divisor == 0.0, 1.0, divisor)
    low = (tl.div_rn(low, divisor) + TO_INTEGER) - TO_INTEGER
    high = (tl.div_rn(high, divisor) + TO_INTEGER) - TO_INTEGER
    low = tl.minimum(tl.maximum(low, -127.0), 127.0)
    high = tl.minimum(tl.maximum(high, -127.0), 127.0)
    tl.store(codes_ptr + i, low.to(tl.int8), mask=inside)
    tl.store(codes_ptr + HALF + i, high.to(tl.int8), mask=inside)
    tl.store(scale_ptr, scale)


@triton.jit
def _write_rows_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    q_stride,
    kv_stride,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    position_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    scale_ptr,
    row_stride,
    scale_stride,
    eps,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    QUANTISED: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait(EARLY)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    i = tl.arange(0, BLOCK)
    inside = i < HALF
    dtype = q_ptr.dtype.element_ty
    position = tl.load(position_ptr + token).to(tl.int64)
    row = position * row_stride
    scales = scale_ptr + position * scale_stride
    if head >= Q_HEADS + KV_HEADS:
        value_head = head - Q_HEADS - KV_HEADS
        source = v_ptr + token * kv_stride + value_head * 2 * HALF
        target = value_ptr + row + value_head * 2 * HALF
        low = tl.load(source + i, mask=inside, other=0.0)
        high = tl.load(source + HALF + i, mask=inside, other=0.0)
        if QUANTISED:
            kept_scale = scales + KV_HEADS + value_head
            _store_codes(target, kept_scale, low.to(tl.float32), high.to(tl.float32), i, inside, HALF)
        else:
            tl.store(target + i, low.to(value_ptr.dtype.element_ty), mask=inside)
            tl.store(target + HALF + i, high.to(value_ptr.dtype.element_ty), mask=inside)
    else:
        if head < Q_HEADS:
            at = token * q_stride + head * 2 * HALF + i
            a = tl.load(q_ptr + at, mask=inside, other=0.0).to(tl.float32)
            b = tl.load(q_ptr + at + HALF, mask=inside, other=0.0).to(tl.float32)
        else:
            at = token * kv_stride + (head - Q_HEADS) * 2 * HALF + i
            a = tl.load(k_ptr + at, mask=inside, other=0.0).to(tl.float32)
            b = tl.load(k_ptr + at + HALF, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            scale = tl.rsqrt((tl.sum(a * a, axis=0) + tl.sum(b * b, axis=0)) / (2 * HALF) + eps)
            if head < Q_HEADS:
                norm_low = tl.load(q_norm_ptr + i, mask=inside, other=0.0)
                norm_high = tl.load(q_norm_ptr + HALF + i, mask=inside, other=0.0)
            else:
                norm_low = tl.load(k_norm_ptr + i, mask=inside, other=0.0)
                norm_high = tl.load(k_norm_ptr + HALF + i, mask=inside, other=0.0)
            # Rounds where the library rounds, so that keys differ from the library's as little as possible.
            if OFFSET:
                a = (a * scale * (1.0 + norm_low.to(tl.float32))).to(dtype).to(tl.float32)
                b = (b * scale * (1.0 + norm_high.to(tl.float32))).to(dtype).to(tl.float32)
            else:
                a = ((a * scale).to(dtype).to(tl.float32) * norm_low.to(tl.float32)).to(dtype).to(tl.float32)
                b = ((b * scale).to(dtype).to(tl.float32) * norm_high.to(tl.float32)).to(dtype).to(tl.float32)
        turn = token * 2 * HALF + i
        cos_low = tl.load(cos_ptr + turn, mask=inside, other=0.0).to(tl.float32)
        cos_high = tl.load(cos_ptr + turn + HALF, mask=inside, other=0.0).to(tl.float32)
        sin_low = tl.load(sin_ptr + turn, mask=inside, other=0.0).to(tl.float32)
        sin_high = tl.load(sin_ptr + turn + HALF, mask=inside, other=0.0).to(tl.float32)
        new_low = (a * cos_low).to(dtype).to(tl.float32) + (-b * sin_low).to(dtype).to(tl.float32)
        new_high = (b * cos_high).to(dtype).to(tl.float32) + (a * sin_high).to(dtype).to(tl.float32)
        if head < Q_HEADS:
            target = query_ptr + (token * Q_HEADS + head) * 2 * HALF
            tl.store(target + i, new_low.to(dtype), mask=inside)
            tl.store(target + HALF + i, new_high.to(dtype), mask=inside)
        else:
            kept = key_ptr + row + (head - Q_HEADS) * 2 * HALF
            if QUANTISED:
                new_low = new_low.to(dtype).to(tl.float32)
                new_high = new_high.to(dtype).to(tl.float32)
                _store_codes(kept, scales + head - Q_HEADS, new_low, new_high, i, inside, HALF)
            else:
                tl.store(kept + i, new_low.to(key_ptr.dtype.element_ty), mask=inside)
                tl.store(kept + HALF + i, new_high.to(key_ptr.dtype.element_ty), mask=inside)


def write_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    query: torch.Tensor,
    key_rows: torch.Tensor,
    value_rows: torch.Tensor,
    scale_rows: torch.Tensor | None = None,
    *,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    offset: bool = False,
    eps: float,
) -> None:
    """Norms queries and keys per head (weights plus one if `offset`), applies rotary positions, and writes all three.

    Inputs: `q` `[n, q_heads * dim]`, `k` and `v` `[n, kv_heads * dim]`, `cos` and `sin` `[n, dim]`, `positions` int64
    `[n]` on the device. Outputs: `query` `[n, q_heads * dim]`, and the rows `positions` of `key_rows` and `value_rows`,
    `[context, kv_heads, dim]` with any stride between rows. With `scale_rows`, float16 `[context, 2, kv_heads]`, the
    rows are int8 codes. Without `q_norm` and `k_norm` nothing is normed.
    """
    kv_heads, dim = key_rows.shape[1:]
    assert key_rows.stride() == value_rows.stride()
    assert key_rows.stride()[1:] == (dim, 1)
    assert k.stride() == v.stride()
    q_heads = q.shape[1] // dim
    _write_rows_kernel[(q.shape[0], q_heads + 2 * kv_heads)](
        q,
        k,
        v,
        q.stride(0),
        k.stride(0),
        cos,
        sin,
        q if q_norm is None else q_norm,
        q if k_norm is None else k_norm,
        positions,
        query,
        key_rows,
        value_rows,
        positions if scale_rows is None else scale_rows,
        key_rows.stride(0),
        0 if scale_rows is None else scale_rows.stride(0),
        eps,
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        HALF=dim // 2,
        BLOCK=triton.next_power_of_2(dim // 2),
        NORM=q_norm is not None,
        OFFSET=offset,
        QUANTISED=scale_rows is not None,
        num_warps=1,
        **overlap(q.device),
    )


@triton.jit
def _numbers_kernel(
    codes_ptr, scale_ptr, out_ptr, row_stride, scale_stride, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < HEADS * DIM
    codes = tl.load(codes_ptr + token * row_stride + i, mask=inside, other=0).to(tl.float32)
    scales = tl.load(scale_ptr + token * scale_stride + i // DIM, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * HEADS * DIM + i, (codes * scales).to(out_ptr.dtype.element_ty), mask=inside)


def numbers(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Dequantises rows to `[n, heads, dim]`. `codes`, int8 of that shape, and `scales`, float16 `[n, heads]`, are views
    of rows."""
    tokens, heads, dim = codes.shape
    out = torch.empty((tokens, heads, dim), dtype=dtype, device=codes.device)
    _numbers_kernel[(tokens,)](
        codes,
        scales,
        out,
        codes.stride(0),
        scales.stride(0),
        HEADS=heads,
        DIM=dim,
        BLOCK=triton.next_power_of_2(heads * dim),
    )
    return out
