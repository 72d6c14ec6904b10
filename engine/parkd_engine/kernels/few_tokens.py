"""Products of weight matrices with the vectors of a few tokens, on tensor cores. The weights are read once for all.

    weights [32 rows, 256 columns] x tokens [256 columns, 16]      one step of a program; unused tokens are zeros

Each token's sums are computed separately, in an order that does not depend on the number of tokens. So a token gets the
same bits in a step with draft tokens as in a step of its own, and drafts are checked against what would have been said
without them. For a single token `matvec` is faster, by a twentieth.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from parkd_engine.kernels import codes
from parkd_engine.kernels.overlap import overlap, wait
from parkd_engine.weights.kinds import kind_of

MOST_TOKENS = 16
ROWS, COLUMNS, WARPS, STEPS_AHEAD = 32, 256, 2, 4
"""The best of twelve settings, H200, bf16, equal for one and three tokens: 3.8 TB/s for 17,408 rows of 5120 and for
5120 of 17,408, 3.4 for 10,240 of 5120, 4.5 for 248,320 of 5120."""


@triton.jit
def _products_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    n,
    K,
    WHOLE: tl.constexpr,
    BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    PLACES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS_AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < n
    starts = rows.to(tl.int64) * K
    wait(EARLY)
    token = tl.arange(0, PLACES)
    is_there = token < TOKENS
    sums = tl.zeros([ROWS, PLACES], dtype=tl.float32)
    for start in tl.range(0, K, COLUMNS, num_stages=STEPS_AHEAD):
        columns = start + tl.arange(0, COLUMNS)
        weights_mask = inside[:, None]
        tokens_mask = is_there[None, :]
        if not WHOLE:
            weights_mask = weights_mask & (columns < K)[None, :]
            tokens_mask = tokens_mask & (columns < K)[:, None]
        w = tl.load(weight_ptr + starts[:, None] + columns[None, :], mask=weights_mask, other=0.0)
        x = tl.load(x_ptr + token[None, :] * K + columns[:, None], mask=tokens_mask, other=0.0)
        sums = tl.dot(w, x, sums)
    if BIAS:
        sums += tl.load(bias_ptr + rows, mask=inside, other=0.0).to(tl.float32)[:, None]
    at = token[None, :] * n + rows[:, None]
    tl.store(out_ptr + at, sums.to(out_ptr.dtype.element_ty), mask=inside[:, None] & is_there[None, :])


def products(x: torch.Tensor, linear: Any, out: torch.Tensor) -> None:
    """`out[t] = W x[t] + b` for up to `MOST_TOKENS` tokens. `x` is `[tokens, k]`, `out` `[tokens, n]`; both contiguous
    and in the weights' dtype. Weights may be codes that the kernels know (`codes.is_known`)."""
    if kind_of(linear) is not None:
        codes.products(x, linear, out, MOST_TOKENS)
        return
    weight = linear.weight
    rows, columns = weight.shape
    _products_kernel[(triton.cdiv(rows, ROWS),)](
        x,
        weight,
        weight if linear.bias is None else linear.bias,
        out,
        rows,
        columns,
        WHOLE=columns % COLUMNS == 0,
        BIAS=linear.bias is not None,
        TOKENS=x.shape[0],
        PLACES=MOST_TOKENS,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        STEPS_AHEAD=STEPS_AHEAD,
        num_warps=WARPS,
        **overlap(x.device),
    )
