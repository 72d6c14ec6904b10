"""Products of vectors with weights that are codes (`weights.kinds`): a few tokens over the codes themselves, and the
codes of many rows as numbers.

    words   four of them a thread, int4 or fp4: 32 columns, of which bits 4 k of a word meet column 4 k + j
    bytes   eight codes a thread, int8 or fp8

Experts are rows of one matrix: a launch multiplies each of a few vectors by the rows of the experts that it chose
(`apart`), which it reads from memory, so that nothing comes back from the device.

An integer of few bits becomes a float by writing it into the low bits of 2^23: no conversion, which would take longer
than reading the codes. Sums are in float32 and are multiplied by the scale once for a thread's run of columns. The
products of one vector (`matvec`) do what those of `kernels.matvec` do, and those of a few vectors what those of
`kernels.few_tokens` do: a token gets the same bits however many there are. What `kernels.coded` takes goes there, to
tensor cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from parkd_engine.kernels import coded
from parkd_engine.kernels.overlap import overlap, wait, wait_alone
from parkd_engine.kernels.tiling import CUBIC, SQRT_8_OVER_PI, Tiling
from parkd_engine.weights.kinds import IN_WORDS, CodedLinear, Codes, kind_of

MAGIC_BITS, MAGIC = tl.constexpr(0x4B000000), tl.constexpr(8388608.0)
"""2^23 as a float, whose lowest bit counts one."""
SIGNED_MAGIC_BITS, SIGNED_MAGIC = tl.constexpr(0x4B000080), tl.constexpr(8388736.0)
"""The same for signed bytes, whose highest bit is turned: 2^23 + 128."""
FP8_EXPONENTS = tl.constexpr(2.0**120)
"""Between a float32 with the exponent and mantissa of an e4m3 code, and what the code means."""
FP4_EXPONENTS = tl.constexpr(2.0**126)
"""The same for an e2m1 code."""
LEAST_E8M0 = tl.constexpr(0x00400000)
"""2^-127, which a float32 has no exponent for."""
INT4, INT8, FP8, FP4 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
NUMBER_OF = {Codes.INT4: 0, Codes.INT8: 1, Codes.FP8: 2, Codes.FP4: 3}
NUMBERS, E4M3, E8M0 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
SCALES_OF = {torch.float8_e4m3fn: 1, torch.float8_e8m0fnu: 2}
"""Scales of 8 bits; others are numbers that the compiler knows."""
RUN = 8
"""Codes of a byte that a thread reads at once; no scale changes within them."""
NIBBLES, LONG_NIBBLES, BYTES = Tiling(4, 32, 1), Tiling(4, 128, 2), Tiling(4, 128, 4)
LONG_COLUMNS = 8192
"""Rows of a program; runs of columns for each step (32 columns of int4, 8 of bytes); warps. The best of those in
`benchmarks/gpu/weights.py`, H200: int4 in 25 microseconds for 17,408 rows of 5120 (bf16 43), 29 for 5120 of 17,408 (46,
LONG_NIBBLES), 20 for 10,240 of 5120 (28); int8 in 29, 34 and 19; fp8 in 40, 42 and 26."""
FEW_ROWS, FEW_WORDS, FEW_BYTES, FEW_WARPS = 32, 64, 128, 4
"""Tiles of `products`: rows of a program, words or bytes for each step, warps."""


@triton.jit
def _byte(codes, zero, CODES: tl.constexpr):
    # What bytes mean, in float32, without their scale.
    bits = codes.to(tl.int32) & 255
    if CODES == INT8:
        number = (bits ^ SIGNED_MAGIC_BITS).to(tl.float32, bitcast=True) - (SIGNED_MAGIC + zero)
    else:
        number = (((bits & 128) << 24) | ((bits & 127) << 20)).to(tl.float32, bitcast=True) * FP8_EXPONENTS
    return number


@triton.jit
def _nibble(words, zero, LANE: tl.constexpr):
    # `16^(LANE % 5) (code - zero)` of the codes at bits `4 LANE`, in float32: five fit below the exponent.
    placed = words if LANE < 5 else words >> 20
    number = ((placed & (15 << (4 * (LANE % 5)))) | MAGIC_BITS).to(tl.float32, bitcast=True)
    return number - (MAGIC + zero * (16.0 ** (LANE % 5)))


@triton.jit
def _four(words, SHIFT: tl.constexpr):
    # What the e2m1 codes at these bits mean, in float32.
    bits = words >> SHIFT
    return (((bits & 8) << 28) | ((bits & 7) << 22)).to(tl.float32, bitcast=True) * FP4_EXPONENTS


@triton.jit
def _scales(scales_ptr, at, mask, SCALES: tl.constexpr):
    # In float32; 0 where there are none.
    stored = tl.load(scales_ptr + at, mask=mask, other=0)
    if SCALES == E4M3:
        scale = ((stored.to(tl.int32) & 127) << 20).to(tl.float32, bitcast=True) * FP8_EXPONENTS
        scale = tl.where((stored.to(tl.int32) & 128) != 0, -scale, scale)
    elif SCALES == E8M0:
        bits = stored.to(tl.int32)
        placed = tl.where(bits == 0, LEAST_E8M0, bits << 23)
        scale = tl.where(mask, placed.to(tl.float32, bitcast=True), 0.0)
    else:
        scale = stored.to(tl.float32)
    return scale


@triton.jit
def _numbers(
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    row_scales_ptr,
    rows,
    columns,
    valid,
    K: tl.constexpr,
    CODES: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    ZEROS: tl.constexpr,
    SCALES: tl.constexpr,
    ROW_SCALES: tl.constexpr,
):
    # Numbers in float32, [rows, columns]. Adjacent columns lie together here, so a word is read by eight of them.
    groups_a_row: tl.constexpr = (K + GROUP - 1) // GROUP
    scale_at = (rows // SCALE_ROWS)[:, None] * groups_a_row + (columns // GROUP)[None, :]
    scale = _scales(scales_ptr, scale_at, valid, SCALES)
    if ROW_SCALES:
        scale *= tl.load(row_scales_ptr + rows[:, None] + columns[None, :] * 0, mask=valid, other=0.0)
    if ZEROS:
        zero = tl.load(zeros_ptr + scale_at, mask=valid, other=0).to(tl.float32)
    elif CODES == INT4:
        zero = 8.0
    else:
        zero = 0.0
    if CODES == INT4 or CODES == FP4:  # noqa: SIM109 - the compiler has no `in`
        words = (columns // 32) * 4 + columns % 4
        codes = tl.load(codes_ptr + rows.to(tl.int64)[:, None] * (K // 8) + words[None, :], mask=valid, other=0)
        bits = (codes >> ((columns % 32) // 4 * 4)[None, :]) & 15
        if CODES == INT4:  # noqa: SIM108 - other types meet in an expression
            number = (bits | MAGIC_BITS).to(tl.float32, bitcast=True) - (MAGIC + zero)
        else:
            number = _four(bits, 0)
    else:
        codes = tl.load(codes_ptr + rows.to(tl.int64)[:, None] * K + columns[None, :], mask=valid, other=0)
        number = _byte(codes, zero, CODES)
    return number * scale


@triton.jit
def _row_sums(
    x_ptr,
    norm_ptr,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    row_scales_ptr,
    rows,
    inside,
    K: tl.constexpr,
    CODES: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    ZEROS: tl.constexpr,
    SCALES: tl.constexpr,
    ROW_SCALES: tl.constexpr,
    NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
    RUNS: tl.constexpr,
):
    # The products of some rows, [ROWS], and the sum of the vector's squares. Runs are the first axis, so that the
    # compiler gives a thread the same runs of codes, of the vector and of scales, and exchanges nothing in between.
    # A group may be half of a run of words (NVFP4).
    in_words: tl.constexpr = CODES != INT8 and CODES != FP8
    lanes: tl.constexpr = 8 if in_words else 1
    width: tl.constexpr = 4 if in_words else 8
    run_columns: tl.constexpr = 32 if in_words else 8
    stored: tl.constexpr = K // 8 if in_words else K
    parts: tl.constexpr = 2 if in_words and GROUP % 32 != 0 else 1
    part_lanes: tl.constexpr = lanes // parts
    part_columns: tl.constexpr = run_columns // parts
    groups_a_row: tl.constexpr = (K + GROUP - 1) // GROUP
    runs: tl.constexpr = K // run_columns
    starts = rows.to(tl.int64)[None, :, None] * stored
    scale_rows = (rows // SCALE_ROWS)[None, :] * groups_a_row
    place = tl.arange(0, width)[None, None, :]
    sums = tl.zeros([RUNS, ROWS], dtype=tl.float32)
    squares = tl.zeros([RUNS, 1, width], dtype=tl.float32)
    for start in range(0, runs, RUNS):
        run = start + tl.arange(0, RUNS)
        there = run < runs
        whole = run[:, None, None]
        codes = tl.load(
            codes_ptr + starts + whole * width + place, mask=there[:, None, None] & inside[None, :, None], other=0
        )
        valid = there[:, None] & inside[None, :]
        for half in tl.static_range(parts):
            groups = ((run * run_columns + half * part_columns) // GROUP)[:, None]
            scale = _scales(scales_ptr, scale_rows + groups, valid, SCALES)
            if ZEROS:
                zero = tl.load(zeros_ptr + scale_rows + groups, mask=valid, other=0).to(tl.float32)[:, :, None]
            elif CODES == INT4:
                zero = 8.0
            else:
                zero = 0.0
            part = tl.zeros([RUNS, ROWS, width], dtype=tl.float32)
            for step in tl.static_range(part_lanes):
                columns = whole * run_columns + (half * part_lanes + step) * width + place
                x = tl.load(x_ptr + columns, mask=there[:, None, None], other=0.0).to(tl.float32)
                if NORM:
                    squares += x * x
                    x *= tl.load(norm_ptr + columns, mask=there[:, None, None], other=0.0).to(tl.float32) + OFFSET
                if CODES == INT4:
                    x *= 1.0 / 16.0 ** ((half * part_lanes + step) % 5)
                    part += _nibble(codes, zero, half * part_lanes + step) * x
                elif CODES == FP4:
                    part += _four(codes, 4 * (half * part_lanes + step)) * x
                else:
                    part += _byte(codes, zero, CODES) * x
            sums += tl.sum(part, axis=2) * scale
    y = tl.sum(sums, axis=0)
    if ROW_SCALES:
        y *= tl.load(row_scales_ptr + rows, mask=inside, other=0.0)
    return y, tl.sum(tl.sum(tl.sum(squares, axis=2), axis=1), axis=0)


@triton.jit
def _matvec_kernel(
    x_ptr,
    norm_ptr,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    row_scales_ptr,
    codes1,
    codes2,
    scales1,
    scales2,
    zeros1,
    zeros2,
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
    CODES: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    ZEROS: tl.constexpr,
    SCALES: tl.constexpr,
    ROW_SCALES: tl.constexpr,
    NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    RUNS: tl.constexpr,
    EARLY: tl.constexpr,
):
    # Up to three matrices, as in `kernels.matvec`; with row scales, one.
    program = tl.program_id(0)
    blocks0 = tl.cdiv(n0, ROWS)
    blocks1 = blocks0 + tl.cdiv(n1, ROWS)
    is1 = (program >= blocks0) & (program < blocks1)
    is2 = program >= blocks1
    block = program - tl.where(is2, blocks1, tl.where(is1, blocks0, 0))
    n = tl.where(is2, n2, tl.where(is1, n1, n0))
    base = tl.where(is2, n0 + n1, tl.where(is1, n0, 0))
    codes = codes_ptr + tl.where(is2, codes2, tl.where(is1, codes1, 0))
    scales = scales_ptr + tl.where(is2, scales2, tl.where(is1, scales1, 0))
    zeros = zeros_ptr + tl.where(is2, zeros2, tl.where(is1, zeros1, 0))
    rows = block * ROWS + tl.arange(0, ROWS)
    inside = rows < n
    wait(EARLY)
    y, squares = _row_sums(
        x_ptr, norm_ptr, codes, scales, zeros, row_scales_ptr, rows, inside,
        K, CODES, GROUP, SCALE_ROWS, ZEROS, SCALES, ROW_SCALES, NORM, OFFSET, ROWS, RUNS,
    )  # fmt: skip
    if NORM:
        y *= tl.rsqrt(squares / K + eps)
    if BIAS:
        b0 = tl.load(bias0_ptr + rows, mask=inside & ~is1 & ~is2, other=0.0)
        b1 = tl.load(bias1_ptr + rows, mask=inside & is1, other=0.0)
        b2 = tl.load(bias2_ptr + rows, mask=inside & is2, other=0.0)
        y += (b0 + b1 + b2).to(tl.float32)
    if RESIDUAL:
        y = y.to(residual_ptr.dtype.element_ty).to(tl.float32)
        y += tl.load(residual_ptr + rows, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + base + rows, y.to(x_ptr.dtype.element_ty).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gated_kernel(
    x_ptr,
    norm_ptr,
    gate_codes_ptr,
    gate_scales_ptr,
    gate_zeros_ptr,
    gate_row_scales_ptr,
    up_codes_ptr,
    up_scales_ptr,
    up_zeros_ptr,
    up_row_scales_ptr,
    out_ptr,
    n,
    eps,
    K: tl.constexpr,
    CODES: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    ZEROS: tl.constexpr,
    SCALES: tl.constexpr,
    ROW_SCALES: tl.constexpr,
    NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    GELU: tl.constexpr,
    ROWS: tl.constexpr,
    RUNS: tl.constexpr,
    EARLY: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < n
    wait_alone(EARLY)  # The down projection is next.
    gates, squares = _row_sums(
        x_ptr, norm_ptr, gate_codes_ptr, gate_scales_ptr, gate_zeros_ptr, gate_row_scales_ptr, rows, inside,
        K, CODES, GROUP, SCALE_ROWS, ZEROS, SCALES, ROW_SCALES, NORM, OFFSET, ROWS, RUNS,
    )  # fmt: skip
    ups, _ = _row_sums(
        x_ptr, norm_ptr, up_codes_ptr, up_scales_ptr, up_zeros_ptr, up_row_scales_ptr, rows, inside,
        K, CODES, GROUP, SCALE_ROWS, ZEROS, SCALES, ROW_SCALES, NORM, OFFSET, ROWS, RUNS,
    )  # fmt: skip
    if NORM:
        scale = tl.rsqrt(squares / K + eps)
        gates *= scale
        ups *= scale
    dtype = x_ptr.dtype.element_ty
    gates = gates.to(dtype).to(tl.float32)
    ups = ups.to(dtype).to(tl.float32)
    # The tanh approximation of GELU, as in `kernels.matvec`.
    turned = SQRT_8_OVER_PI * (gates + CUBIC * gates * gates * gates) if GELU else gates
    act = (gates * tl.sigmoid(turned)).to(dtype).to(tl.float32)
    tl.store(out_ptr + rows, (act * ups).to(dtype), mask=inside)


@triton.jit
def _apart_kernel(
    x_ptr,
    chosen_ptr,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    row_scales_ptr,
    bias_ptr,
    out_ptr,
    n,
    share,
    K: tl.constexpr,
    CODES: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    ZEROS: tl.constexpr,
    SCALES: tl.constexpr,
    ROW_SCALES: tl.constexpr,
    CHOSEN: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    RUNS: tl.constexpr,
    EARLY: tl.constexpr,
):
    # Each pair of a vector and a part of the matrix of `n` rows is as if alone.
    local = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    pair = tl.program_id(1).to(tl.int64)
    inside = local < n
    wait(EARLY)
    rows = local.to(tl.int64)
    if CHOSEN:
        rows += tl.load(chosen_ptr + pair).to(tl.int64) * n
    vector = x_ptr + pair // share * K
    y, _ = _row_sums(
        vector, vector, codes_ptr, scales_ptr, zeros_ptr, row_scales_ptr, rows, inside,
        K, CODES, GROUP, SCALE_ROWS, ZEROS, SCALES, ROW_SCALES, False, 0.0, ROWS, RUNS,
    )  # fmt: skip
    if BIAS:
        y += tl.load(bias_ptr + rows, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + pair * n + local, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _products_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    row_scales_ptr,
    bias_ptr,
    out_ptr,
    n,
    K: tl.constexpr,
    CODES: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    ZEROS: tl.constexpr,
    SCALES: tl.constexpr,
    ROW_SCALES: tl.constexpr,
    BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    PLACES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
):
    # Weights are rounded to the vectors' dtype.
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < n
    wait(EARLY)
    token = tl.arange(0, PLACES)
    is_there = token < TOKENS
    dtype = x_ptr.dtype.element_ty
    sums = tl.zeros([ROWS, PLACES], dtype=tl.float32)
    if CODES == INT4:
        # A step takes `COLUMNS` words, whose eight lanes are multiplied one after the other.
        groups_a_row: tl.constexpr = (K + GROUP - 1) // GROUP
        for start in range(0, K // 8, COLUMNS):
            at = start + tl.arange(0, COLUMNS)
            there = at < K // 8
            valid = inside[:, None] & there[None, :]
            words = tl.load(codes_ptr + rows.to(tl.int64)[:, None] * (K // 8) + at[None, :], mask=valid, other=0)
            first = (at // 4) * 32 + at % 4
            scale_at = (rows // SCALE_ROWS)[:, None] * groups_a_row + (first // GROUP)[None, :]
            scale = tl.load(scales_ptr + scale_at, mask=valid, other=0.0).to(tl.float32)
            zero = tl.load(zeros_ptr + scale_at, mask=valid, other=0).to(tl.float32) if ZEROS else 8.0
            for lane in tl.static_range(8):
                x = tl.load(
                    x_ptr + token[None, :] * K + (first + 4 * lane)[:, None],
                    mask=is_there[None, :] & there[:, None],
                    other=0.0,
                )
                w = _nibble(words, zero, lane) * (1.0 / 16.0 ** (lane % 5)) * scale
                sums = tl.dot(w.to(dtype), x, sums)
    else:
        for start in range(0, K, COLUMNS):
            columns = start + tl.arange(0, COLUMNS)
            there = columns < K
            w = _numbers(
                codes_ptr, scales_ptr, zeros_ptr, row_scales_ptr, rows, columns, inside[:, None] & there[None, :],
                K, CODES, GROUP, SCALE_ROWS, ZEROS, SCALES, ROW_SCALES,
            )  # fmt: skip
            x = tl.load(
                x_ptr + token[None, :] * K + columns[:, None], mask=is_there[None, :] & there[:, None], other=0.0
            )
            sums = tl.dot(w.to(dtype), x, sums)
    if BIAS:
        sums += tl.load(bias_ptr + rows, mask=inside, other=0.0).to(tl.float32)[:, None]
    at = token[None, :] * n + rows[:, None]
    tl.store(out_ptr + at, sums.to(out_ptr.dtype.element_ty), mask=inside[:, None] & is_there[None, :])


@triton.jit
def _numbers_kernel(
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    row_scales_ptr,
    out_ptr,
    first_row,
    end_row,
    K: tl.constexpr,
    CODES: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    ZEROS: tl.constexpr,
    SCALES: tl.constexpr,
    ROW_SCALES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    rows = first_row + tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    valid = (rows < end_row)[:, None] & (columns < K)[None, :]
    w = _numbers(
        codes_ptr, scales_ptr, zeros_ptr, row_scales_ptr, rows, columns, valid,
        K, CODES, GROUP, SCALE_ROWS, ZEROS, SCALES, ROW_SCALES,
    )  # fmt: skip
    target = out_ptr + (rows - first_row).to(tl.int64)[:, None] * K + columns[None, :]
    tl.store(target, w.to(out_ptr.dtype.element_ty), mask=valid)


def are_known(linears: Sequence[Any]) -> bool:
    """Whether `matvec` and `gated` take these layers in one launch: codes of one kind and width. Where columns have an
    order, or rows a scale, each layer has its own launch."""
    first = linears[0]
    if len(linears) > 1 and any(_has_its_own(each) for each in linears):
        return False
    return all(
        kind_of(each) is not None
        and is_known(each)
        and (each.kind, each.in_features) == (first.kind, first.in_features)
        for each in linears
    )


def _has_its_own(linear: Any) -> bool:
    return any(getattr(linear, name, None) is not None for name in ("order", "row_scales"))


def is_known(linear: CodedLinear) -> bool:
    """Whether the kernels take this layer's codes."""
    return linear.kind.codes in IN_WORDS or (linear.in_features % RUN == 0 and linear.kind.group % RUN == 0)


def _settings(linear: CodedLinear) -> dict[str, Any]:
    kind = linear.kind
    return {
        "K": linear.in_features,
        "CODES": NUMBER_OF[kind.codes],
        "GROUP": kind.group or linear.in_features,
        "SCALE_ROWS": kind.rows,
        "ZEROS": kind.has_zeros,
        "SCALES": SCALES_OF.get(kind.scale_dtype, 0),
        "ROW_SCALES": kind.has_row_scales,
    }


def _stored(linear: CodedLinear) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales, zeros and row scales, for kernels: floats of a byte as uint8. What is missing is not read."""
    codes = linear.codes.view(torch.uint8) if linear.kind.codes is Codes.FP8 else linear.codes
    scales = linear.scales.view(torch.uint8) if linear.kind.scale_dtype in SCALES_OF else linear.scales
    others = (scales if each is None else each for each in (linear.zeros, linear.row_scales))
    return codes, scales, *others  # type: ignore[return-value]


def _distance(first: torch.Tensor, other: torch.Tensor) -> int:
    return (other.data_ptr() - first.data_ptr()) // first.element_size()


def matvec(
    x: torch.Tensor,
    linears: tuple[CodedLinear, ...],
    out: torch.Tensor,
    *,
    norm: torch.Tensor | None = None,
    offset: bool = False,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    tiling: Tiling | None = None,
) -> None:
    """As `kernels.matvec.matvec`, over codes of one kind (`are_known`). A `tiling` asks for the Triton kernel."""
    given: dict[str, Any] = {"norm": norm, "offset": offset, "eps": eps, "residual": residual}
    if tiling is None and coded.product(x, linears, out, **given):
        return
    tiling = tiling or _tiling(linears[0])
    x, norm = linears[0].in_order(x), None if norm is None else linears[0].in_order(norm)
    stored = [_stored(linear) for linear in linears]
    sizes = [linear.out_features for linear in linears] + [0, 0]
    away = [[_distance(a, b) for a, b in zip(stored[0][:3], other, strict=False)] for other in stored[1:]]
    away += [[0] * 3] * 2
    biases = [linear.bias for linear in linears]
    has_bias = any(bias is not None for bias in biases)
    if has_bias and any(bias is None for bias in biases):
        raise ValueError("either all or none of the matrices have a bias")
    tables = [x if bias is None else bias for bias in biases] + [x, x]
    _matvec_kernel[(sum(triton.cdiv(size, tiling.rows) for size in sizes),)](
        x,
        x if norm is None else norm,
        *stored[0],
        *(each for pair in zip(away[0], away[1], strict=True) for each in pair),
        *tables[:3],
        x if residual is None else residual,
        out,
        *sizes[:3],
        eps,
        **_settings(linears[0]),
        NORM=norm is not None,
        OFFSET=float(offset),
        BIAS=has_bias,
        RESIDUAL=residual is not None,
        ROWS=tiling.rows,
        RUNS=tiling.columns,
        num_warps=tiling.warps,
        **overlap(x.device),
    )


def gated(
    x: torch.Tensor,
    gate: CodedLinear,
    up: CodedLinear,
    out: torch.Tensor,
    *,
    norm: torch.Tensor | None = None,
    offset: bool = False,
    eps: float = 0.0,
    gelu: bool = False,
    tiling: Tiling | None = None,
) -> None:
    """As `kernels.matvec.gated`, over codes of one kind (`are_known`). A `tiling` asks for the Triton kernel."""
    given: dict[str, Any] = {"norm": norm, "offset": offset, "eps": eps, "gelu": gelu}
    if tiling is None and coded.gated(x, gate, up, out, **given):
        return
    tiling = tiling or _tiling(gate)
    _gated_kernel[(triton.cdiv(gate.out_features, tiling.rows),)](
        x,
        x if norm is None else norm,
        *_stored(gate),
        *_stored(up),
        out,
        gate.out_features,
        eps,
        **_settings(gate),
        NORM=norm is not None,
        OFFSET=float(offset),
        GELU=gelu,
        ROWS=tiling.rows,
        RUNS=tiling.columns,
        num_warps=tiling.warps,
        **overlap(x.device),
    )


def products(x: torch.Tensor, linear: CodedLinear, out: torch.Tensor, places: int) -> None:
    """As `kernels.few_tokens.products`, over codes (`is_known`), for up to `places` tokens."""
    if coded.product(x, (linear,), out):
        return
    x = linear.in_order(x)
    if linear.kind.codes is Codes.FP4:
        apart(x, linear, out, bias=linear.bias)
        return
    _products_kernel[(triton.cdiv(linear.out_features, FEW_ROWS),)](
        x,
        *_stored(linear),
        x if linear.bias is None else linear.bias,
        out,
        linear.out_features,
        **_settings(linear),
        BIAS=linear.bias is not None,
        TOKENS=x.shape[0],
        PLACES=places,
        ROWS=FEW_ROWS,
        COLUMNS=FEW_WORDS if linear.kind.codes is Codes.INT4 else FEW_BYTES,
        num_warps=FEW_WARPS,
        **overlap(x.device),
    )


def apart(
    x: torch.Tensor,
    linear: CodedLinear,
    out: torch.Tensor,
    *,
    chosen: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> None:
    """`out[p] = W[e] x[p / share] + b[e]` for a few pairs, each as if alone. `out` is `[pairs, n]` and `x`
    `[pairs / share, k]`, both contiguous; `chosen`, int64 `[pairs]`, are the parts `e` of the matrix, of `n` rows each;
    None: the whole matrix for all. Columns are in their stored order."""
    pairs, rows = out.shape
    tiling = _tiling(linear)
    stored = _stored(linear)
    _apart_kernel[(triton.cdiv(rows, tiling.rows), pairs)](
        x,
        x if chosen is None else chosen,
        *stored,
        x if bias is None else bias,
        out,
        rows,
        pairs // len(x),
        **_settings(linear),
        CHOSEN=chosen is not None,
        BIAS=bias is not None,
        ROWS=tiling.rows,
        RUNS=tiling.columns,
        num_warps=tiling.warps,
        **overlap(x.device),
    )


def numbers(linear: CodedLinear, dtype: torch.dtype, first: int, end: int) -> torch.Tensor:
    """The rows `[first, end)` as numbers in `dtype`, `[end - first, in]`, in the stored order of columns."""
    stored = _stored(linear)
    device = stored[0].device
    out = torch.empty((end - first, linear.in_features), dtype=dtype, device=device)
    rows, columns = 4, 512
    grid = (triton.cdiv(end - first, rows), triton.cdiv(linear.in_features, columns))
    with torch.cuda.device(device):
        _numbers_kernel[grid](*stored, out, first, end, **_settings(linear), ROWS=rows, COLUMNS=columns)
    return out


def _tiling(linear: CodedLinear) -> Tiling:
    if linear.kind.codes not in IN_WORDS:
        return BYTES
    return NIBBLES if linear.in_features <= LONG_COLUMNS else LONG_NIBBLES
