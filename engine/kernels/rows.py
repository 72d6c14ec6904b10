"""One token's queries, keys and values: normed, turned by their position, and written into the arena's row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _write_row_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    position_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    row_stride,
    eps,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
):
    head = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    inside = i < HALF
    dtype = qkv_ptr.dtype.element_ty
    source = qkv_ptr + head * 2 * HALF
    low = tl.load(source + i, mask=inside, other=0.0)
    high = tl.load(source + HALF + i, mask=inside, other=0.0)
    row = tl.load(position_ptr).to(tl.int64) * row_stride
    if head >= Q_HEADS + KV_HEADS:
        target = value_ptr + row + (head - Q_HEADS - KV_HEADS) * 2 * HALF
        tl.store(target + i, low.to(value_ptr.dtype.element_ty), mask=inside)
        tl.store(target + HALF + i, high.to(value_ptr.dtype.element_ty), mask=inside)
    else:
        a = low.to(tl.float32)
        b = high.to(tl.float32)
        if NORM:
            scale = tl.rsqrt((tl.sum(a * a, axis=0) + tl.sum(b * b, axis=0)) / (2 * HALF) + eps)
            if head < Q_HEADS:
                norm_low = tl.load(q_norm_ptr + i, mask=inside, other=0.0)
                norm_high = tl.load(q_norm_ptr + HALF + i, mask=inside, other=0.0)
            else:
                norm_low = tl.load(k_norm_ptr + i, mask=inside, other=0.0)
                norm_high = tl.load(k_norm_ptr + HALF + i, mask=inside, other=0.0)
            # Rounded where the library rounds: keys then differ from its own as little as may be.
            a = ((a * scale).to(dtype).to(tl.float32) * norm_low.to(tl.float32)).to(dtype).to(tl.float32)
            b = ((b * scale).to(dtype).to(tl.float32) * norm_high.to(tl.float32)).to(dtype).to(tl.float32)
        cos_low = tl.load(cos_ptr + i, mask=inside, other=0.0).to(tl.float32)
        cos_high = tl.load(cos_ptr + HALF + i, mask=inside, other=0.0).to(tl.float32)
        sin_low = tl.load(sin_ptr + i, mask=inside, other=0.0).to(tl.float32)
        sin_high = tl.load(sin_ptr + HALF + i, mask=inside, other=0.0).to(tl.float32)
        new_low = (a * cos_low).to(dtype).to(tl.float32) + (-b * sin_low).to(dtype).to(tl.float32)
        new_high = (b * cos_high).to(dtype).to(tl.float32) + (a * sin_high).to(dtype).to(tl.float32)
        if head < Q_HEADS:
            tl.store(query_ptr + head * 2 * HALF + i, new_low.to(dtype), mask=inside)
            tl.store(query_ptr + head * 2 * HALF + HALF + i, new_high.to(dtype), mask=inside)
        else:
            target = key_ptr + row + (head - Q_HEADS) * 2 * HALF
            tl.store(target + i, new_low.to(key_ptr.dtype.element_ty), mask=inside)
            tl.store(target + HALF + i, new_high.to(key_ptr.dtype.element_ty), mask=inside)


def write_row(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position: torch.Tensor,
    query: torch.Tensor,
    key_rows: torch.Tensor,
    value_rows: torch.Tensor,
    *,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> None:
    """Splits `qkv` `[(q_heads + 2 kv_heads) * dim]`, norms queries and keys a head, turns them, writes all three.

    `cos` and `sin` are `[dim]`, `position` is int64 `[1]` on the device; `query` `[q_heads * dim]` is written, and row
    `position` of `key_rows` and `value_rows`, `[context, kv_heads, dim]` with any stride between rows.
    """
    kv_heads, dim = key_rows.shape[1:]
    assert key_rows.stride() == value_rows.stride()
    assert key_rows.stride()[1:] == (dim, 1)
    q_heads = query.numel() // dim
    _write_row_kernel[(q_heads + 2 * kv_heads,)](
        qkv,
        cos,
        sin,
        qkv if q_norm is None else q_norm,
        qkv if k_norm is None else k_norm,
        position,
        query,
        key_rows,
        value_rows,
        key_rows.stride(0),
        eps,
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        HALF=dim // 2,
        BLOCK=triton.next_power_of_2(dim // 2),
        NORM=q_norm is not None,
        num_warps=1,
    )
