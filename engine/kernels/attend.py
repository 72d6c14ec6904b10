"""Attention of one token over arena rows where they lie, the rows cut in parts that run side by side.

    rows    0 ....... | ........ | ........ | .... position        one program a part and KV head
            part 0      part 1     part 2     part 3

Each part keeps a running softmax (Milakov and Gimelshein 2018); a second kernel merges the parts (split-KV, as in
Flash-Decoding). The length is read from the device, so that one CUDA graph serves every position. Which rows make a
part follows from the length alone: the same rows give the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
PARTS = 32
"""A KV head. With 8 KV heads that is two programs on each of an H200's multiprocessors."""
TILE_ROWS = 64
CODE_TILE_ROWS = 128
"""Of 8-bit codes: as many bytes as 64 rows of 16-bit numbers."""


@triton.jit
def _attend_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    position_ptr,
    sums_ptr,
    peaks_ptr,
    weights_ptr,
    scale_ptr,
    row_stride,
    scale_stride,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    QUANTISED: tl.constexpr,
):
    head = tl.program_id(0)
    part = tl.program_id(1)
    length = tl.load(position_ptr).to(tl.int32) + 1
    tiles = tl.cdiv(tl.cdiv(length, TILE), PARTS)
    first = part * tiles * TILE
    last = tl.minimum(first + tiles * TILE, length)
    g = tl.arange(0, BLOCK_GROUP)
    d = tl.arange(0, BLOCK_DIM)
    in_group = g < GROUP
    in_dim = d < DIM
    at = (head * GROUP + g)[:, None] * DIM + d[None, :]
    mask = in_group[:, None] & in_dim[None, :]
    query = tl.load(query_ptr + at, mask=mask, other=0.0)
    peak = tl.full([BLOCK_GROUP], float("-inf"), dtype=tl.float32)
    weight = tl.zeros([BLOCK_GROUP], dtype=tl.float32)
    total = tl.zeros([BLOCK_GROUP, BLOCK_DIM], dtype=tl.float32)
    keys = key_ptr + head * DIM
    values = value_ptr + head * DIM
    for start in range(first, last, TILE):
        n = start + tl.arange(0, TILE)
        valid = n < last
        rows = n.to(tl.int64) * row_stride
        key = tl.load(keys + rows[None, :] + d[:, None], mask=valid[None, :] & in_dim[:, None], other=0.0)
        scores = tl.dot(query, key.to(query.dtype)) * scale
        if QUANTISED:
            scales = scale_ptr + n.to(tl.int64) * scale_stride + head
            scores *= tl.load(scales, mask=valid, other=0.0).to(tl.float32)[None, :]
        scores = tl.where(valid[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        p = tl.exp2(scores - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        weight = weight * shrink + tl.sum(p, axis=1)
        value = tl.load(values + rows[:, None] + d[None, :], mask=valid[:, None] & in_dim[None, :], other=0.0)
        if QUANTISED:
            p *= tl.load(scales + KV_HEADS, mask=valid, other=0.0).to(tl.float32)[None, :]
        total = total * shrink[:, None] + tl.dot(p.to(query.dtype), value.to(query.dtype))
        peak = new_peak
    slot = (head * GROUP + g) * PARTS + part
    tl.store(sums_ptr + slot[:, None] * DIM + d[None, :], total, mask=mask)
    tl.store(peaks_ptr + slot, peak, mask=in_group)
    tl.store(weights_ptr + slot, weight, mask=in_group)


@triton.jit
def _merge_kernel(
    sums_ptr, peaks_ptr, weights_ptr, out_ptr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, PARTS: tl.constexpr
):
    head = tl.program_id(0)
    part = tl.arange(0, PARTS)
    d = tl.arange(0, BLOCK_DIM)
    peaks = tl.load(peaks_ptr + head * PARTS + part)
    weights = tl.load(weights_ptr + head * PARTS + part)
    # A part without rows has a peak of -inf and so a share of 0; the first part always has rows.
    shares = tl.exp2(peaks - tl.max(peaks, axis=0))
    at = (head * PARTS + part)[:, None] * DIM + d[None, :]
    sums = tl.load(sums_ptr + at, mask=(d < DIM)[None, :], other=0.0)
    out = tl.sum(sums * shares[:, None], axis=0) / tl.sum(weights * shares, axis=0)
    tl.store(out_ptr + head * DIM + d, out.to(out_ptr.dtype.element_ty), mask=d < DIM)


class DecodeAttention:
    """Attention of one query; owns the memory in which its parts meet. One at a time on a device's stream."""

    def __init__(self, q_heads: int, kv_heads: int, dim: int, device: torch.device, parts: int = PARTS) -> None:
        if parts & (parts - 1):
            raise ValueError(f"{parts} parts: a power of two is needed")
        self.q_heads, self.kv_heads, self.dim, self.parts = q_heads, kv_heads, dim, parts
        self._sums = torch.empty((q_heads, parts, dim), dtype=torch.float32, device=device)
        self._peaks = torch.empty((q_heads, parts), dtype=torch.float32, device=device)
        self._weights = torch.empty((q_heads, parts), dtype=torch.float32, device=device)

    def __call__(
        self,
        query: torch.Tensor,
        key_rows: torch.Tensor,
        value_rows: torch.Tensor,
        position: torch.Tensor,
        out: torch.Tensor,
        scale: float,
        scale_rows: torch.Tensor | None = None,
    ) -> None:
        """`out` `[q_heads * dim]` for `query` `[q_heads * dim]` over the rows `[0, position]`.

        `key_rows` and `value_rows` are `[context, kv_heads, dim]` with any stride between rows; `position` is int64
        `[1]` on the device. With `scale_rows`, float16 `[context, 2, kv_heads]`, the rows are int8 codes
        (`engine.kv_format`).
        """
        group = self.q_heads // self.kv_heads
        block_dim = max(16, triton.next_power_of_2(self.dim))
        _attend_kernel[(self.kv_heads, self.parts)](
            query,
            key_rows,
            value_rows,
            position,
            self._sums,
            self._peaks,
            self._weights,
            position if scale_rows is None else scale_rows,
            key_rows.stride(0),
            0 if scale_rows is None else scale_rows.stride(0),
            scale * LOG2_E,
            KV_HEADS=self.kv_heads,
            GROUP=group,
            BLOCK_GROUP=max(16, triton.next_power_of_2(group)),
            DIM=self.dim,
            BLOCK_DIM=block_dim,
            TILE=TILE_ROWS if scale_rows is None else CODE_TILE_ROWS,
            PARTS=self.parts,
            QUANTISED=scale_rows is not None,
            num_warps=4,
            num_stages=3,
        )
        _merge_kernel[(self.q_heads,)](
            self._sums,
            self._peaks,
            self._weights,
            out,
            DIM=self.dim,
            BLOCK_DIM=block_dim,
            PARTS=self.parts,
            num_warps=4,
        )
