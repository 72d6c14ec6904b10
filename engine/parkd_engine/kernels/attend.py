"""Attention of one token over arena rows in place, with the rows divided into parts that run in parallel.

    rows    0 ....... | ........ | ........ | .... position        one program per part and KV head
            part 0      part 1     part 2     part 3

Each part keeps a running softmax (Milakov and Gimelshein 2018); a second kernel merges the parts (split-KV, as in
Flash-Decoding). First row and length are read from device memory, so that one CUDA graph serves every position. The
number of rows and the window alone determine the parts, so the same rows give the same bits. A head's sink, a score
without a value, joins the softmax where the parts are merged.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from parkd_engine.kernels.overlap import overlap, wait

LOG2_E = 1.4426950408889634
LOG2_E_IN_KERNELS = tl.constexpr(LOG2_E)
TILE_BYTES = 1 << 14
"""Bytes of 16-bit keys, and of values, per step of a program; with 256 programs 3.9 TB/s over 86k rows (H200)."""
CODE_TILE = 64
"""Rows of codes per step; 2.6 TB/s with 512 programs of two warps, 2.5 with 256 of four for heads twice as wide."""
SMALLEST_TILE = 16
MERGED_DIM = 64
"""Elements of a head that one program merges from all parts."""
UNBOUNDED = 1 << 30
"""A window larger than any context."""


_AS_FLOAT16 = tl.constexpr("""
{
.reg .b32 shifted, offset;
xor.b32 shifted, $2, 0x80808080;
mov.b32 offset, 0x64806480;
prmt.b32 $0, shifted, 0x64646464, 0x4140;
prmt.b32 $1, shifted, 0x64646464, 0x4342;
sub.f16x2 $0, $0, offset;
sub.f16x2 $1, $1, offset;
}
""")
"""Converts four 8-bit codes to float16, exactly: each becomes the low byte of 1024 + 128 + code, and 1152 is
subtracted. The conversion instruction is slower than memory delivers codes."""


@triton.jit
def _key_numbers(codes):
    return tl.inline_asm_elementwise(_AS_FLOAT16, "=&r,=&r,r", [codes], dtype=tl.float16, is_pure=True, pack=4)


@triton.jit
def _value_numbers(codes):
    # Declared impure, so that the compiler does not move it after the exchange between threads that the product needs.
    # Values would be exchanged byte by byte there; keys go four at a time.
    return tl.inline_asm_elementwise(_AS_FLOAT16, "=&r,=&r,r", [codes], dtype=tl.float16, is_pure=False, pack=4)


@triton.jit
def _attend_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    position_ptr,
    first_ptr,
    sums_ptr,
    peaks_ptr,
    weights_ptr,
    scale_ptr,
    row_stride,
    scale_stride,
    scale,
    window,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    QUANTISED: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait(EARLY)
    head = tl.program_id(0)
    part = tl.program_id(1)
    length = tl.load(position_ptr).to(tl.int32) + 1
    seen = tl.maximum(length - window, 0)
    if HAS_FIRST:
        seen = tl.maximum(seen, tl.load(first_ptr).to(tl.int32))
    tiles = tl.cdiv(tl.cdiv(length - seen, TILE), PARTS)
    first = seen + part * tiles * TILE
    last = tl.minimum(first + tiles * TILE, length)
    g = tl.arange(0, BLOCK_GROUP)
    d = tl.arange(0, BLOCK_DIM)
    in_group = g < GROUP
    in_dim = d < DIM
    at = (head * GROUP + g)[:, None] * DIM + d[None, :]
    mask = in_group[:, None] & in_dim[None, :]
    query = tl.load(query_ptr + at, mask=mask, other=0.0)
    if QUANTISED:
        # Codes are multiplied as float16, whose range is narrow, so queries are first scaled to at most 1.
        largest = tl.max(tl.abs(query.to(tl.float32)), axis=1)
        largest = tl.where(largest == 0.0, 1.0, largest)
        query = (query.to(tl.float32) / largest[:, None]).to(tl.float16)
    peak = tl.full([BLOCK_GROUP], float("-inf"), dtype=tl.float32)
    weight = tl.zeros([BLOCK_GROUP], dtype=tl.float32)
    total = tl.zeros([BLOCK_GROUP, BLOCK_DIM], dtype=tl.float32)
    keys = key_ptr + head * DIM
    values = value_ptr + head * DIM
    if QUANTISED:
        # Scales are loaded one tile ahead, since the compiler does not prefetch them.
        scales = scale_ptr + head
        n = first + tl.arange(0, TILE)
        next_key_scale = tl.load(scales + n.to(tl.int64) * scale_stride, mask=n < last, other=0.0)
        next_value_scale = tl.load(scales + n.to(tl.int64) * scale_stride + KV_HEADS, mask=n < last, other=0.0)
    for start in range(first, last, TILE):
        n = start + tl.arange(0, TILE)
        valid = n < last
        rows = n.to(tl.int64) * row_stride
        key = tl.load(keys + rows[None, :] + d[:, None], mask=valid[None, :] & in_dim[:, None], other=0.0)
        if QUANTISED:
            key_scale = next_key_scale.to(tl.float32) * scale
            value_scale = next_value_scale.to(tl.float32)
            ahead = n + TILE
            next_key_scale = tl.load(scales + ahead.to(tl.int64) * scale_stride, mask=ahead < last, other=0.0)
            next_value_scale = tl.load(
                scales + ahead.to(tl.int64) * scale_stride + KV_HEADS, mask=ahead < last, other=0.0
            )
            scores = tl.dot(query, _key_numbers(key)) * (largest[:, None] * key_scale[None, :])
        else:
            scores = tl.dot(query, key.to(query.dtype)) * scale
        scores = tl.where(valid[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        p = tl.exp2(scores - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        weight = weight * shrink + tl.sum(p, axis=1)
        value = tl.load(values + rows[:, None] + d[None, :], mask=valid[:, None] & in_dim[None, :], other=0.0)
        if QUANTISED:
            most = tl.maximum(tl.max(value_scale, axis=0), 1e-30)
            p *= (value_scale / most)[None, :]
            total = total * shrink[:, None] + tl.dot(p.to(tl.float16), _value_numbers(value)) * most
        else:
            total = total * shrink[:, None] + tl.dot(p.to(query.dtype), value.to(query.dtype))
        peak = new_peak
    slot = (head * GROUP + g) * PARTS + part
    tl.store(sums_ptr + slot[:, None] * DIM + d[None, :], total, mask=mask)
    tl.store(peaks_ptr + slot, peak, mask=in_group)
    tl.store(weights_ptr + slot, weight, mask=in_group)


@triton.jit
def _merge_kernel(
    sums_ptr,
    peaks_ptr,
    weights_ptr,
    sinks_ptr,
    out_ptr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PARTS: tl.constexpr,
    SINKS: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait(EARLY)
    head = tl.program_id(0)
    part = tl.arange(0, PARTS)
    d = tl.program_id(1) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    peaks = tl.load(peaks_ptr + head * PARTS + part)
    weights = tl.load(weights_ptr + head * PARTS + part)
    # A part without rows has a peak of -inf and so a share of 0; the first part always has rows.
    peak = tl.max(peaks, axis=0)
    if SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E_IN_KERNELS
        peak = tl.maximum(peak, sink)
    shares = tl.exp2(peaks - peak)
    weight = tl.sum(weights * shares, axis=0)
    if SINKS:
        weight += tl.exp2(sink - peak)
    at = (head * PARTS + part)[:, None] * DIM + d[None, :]
    sums = tl.load(sums_ptr + at, mask=(d < DIM)[None, :], other=0.0)
    out = tl.sum(sums * shares[:, None], axis=0) / weight
    tl.store(out_ptr + head * DIM + d, out.to(out_ptr.dtype.element_ty), mask=d < DIM)


class DecodeAttention:
    """Attention of one query. Owns the memory for the parts' results, so calls must follow each other on one stream."""

    def __init__(
        self,
        q_heads: int,
        kv_heads: int,
        dim: int,
        device: torch.device,
        parts: int | None = None,
        *,
        codes: bool = False,
    ) -> None:
        """`parts` is the number of parts per KV head; None: enough to keep an H200 busy. `codes`: rows are 8-bit codes.
        Raises ValueError if `parts` is not a power of two."""
        programs = 512 if codes and dim <= 128 else 256
        parts = parts or max(1, triton.next_power_of_2(programs // kv_heads))
        if parts & (parts - 1):
            raise ValueError(f"{parts} parts: a power of two is needed")
        self.q_heads, self.kv_heads, self.dim, self.parts = q_heads, kv_heads, dim, parts
        self._warps = 2 if codes and dim <= 128 else 4
        tile = TILE_BYTES // (2 * triton.next_power_of_2(dim))
        self._tile = CODE_TILE if codes else max(SMALLEST_TILE, min(CODE_TILE, tile))
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
        *,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
        first: torch.Tensor | None = None,
    ) -> None:
        """Attends with `query` to the last `window` of the rows `[first, position]`. Both `query` and `out` are
        `[q_heads * dim]`.

        `first` is int64 `[1]` on the device; None: 0. As many rows give the same bits wherever they begin. `key_rows`
        and `value_rows` are `[context, kv_heads, dim]` with any stride between rows; `position` is int64 `[1]` on the
        device. With `scale_rows`, float16 `[context, 2, kv_heads]`, the rows are int8 codes
        (`parkd_engine.arenas.kv_format`). `sinks`, `[q_heads]`, are scores that join the softmax without a value.
        """
        group = self.q_heads // self.kv_heads
        block_dim = max(16, triton.next_power_of_2(self.dim))
        _attend_kernel[(self.kv_heads, self.parts)](
            query,
            key_rows,
            value_rows,
            position,
            position if first is None else first,
            self._sums,
            self._peaks,
            self._weights,
            position if scale_rows is None else scale_rows,
            key_rows.stride(0),
            0 if scale_rows is None else scale_rows.stride(0),
            scale * LOG2_E,
            window or UNBOUNDED,
            KV_HEADS=self.kv_heads,
            GROUP=group,
            BLOCK_GROUP=max(16, triton.next_power_of_2(group)),
            DIM=self.dim,
            BLOCK_DIM=block_dim,
            TILE=self._tile,
            PARTS=self.parts,
            QUANTISED=scale_rows is not None,
            HAS_FIRST=first is not None,
            num_warps=self._warps,
            num_stages=3,
            **overlap(query.device),
        )
        merged = min(MERGED_DIM, block_dim)
        _merge_kernel[(self.q_heads, triton.cdiv(self.dim, merged))](
            self._sums,
            self._peaks,
            self._weights,
            self._weights if sinks is None else sinks,
            out,
            DIM=self.dim,
            BLOCK_DIM=merged,
            PARTS=self.parts,
            SINKS=sinks is not None,
            num_warps=4,
            **overlap(query.device),
        )
