"""Products over codes on tensor cores (`coded_products.cu`): one launch for a token or for a few of them.

The Triton kernels of `codes` are held up by unpacking; these are less so, and take eight tokens in the time of one.
What they do not take (groups that are no multiple of 128 columns, older GPUs, no NVRTC) those kernels do.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from parkd_engine.kernels import compiled
from parkd_engine.weights.kinds import CodedLinear, Codes, WeightKind, numbers

log = logging.getLogger("parkd.engine")

FILE, NAME = "coded_products.cu", "coded_products"
VERSION = 1
"""Part of the fingerprint of models with codes. Change it with the order of sums."""
CAPABILITY = (8, 0)
"""The first with these instructions."""
STEP_COLUMNS = 128
ROWS = 16
"""Rows of the weights that a program takes."""
TILE_TOKENS, MOST_TOKENS = 8, 16
STAGED_PADDING, STAGED_BYTES = 32, 36 << 10
"""Halves between two vectors in shared memory, and the most of it that a program takes for them; if they need more,
they are read from memory again and again."""
ALIGNMENT = 16
"""Bytes."""
LONG_COLUMNS = 8192
MOST_AHEAD_OF_TWO = 2
"""Steps that are read ahead of two matrices at once: more take too many registers."""
TRIED_ROWS, WRONG, EPS = 40, 0.02, 1e-6
"""Rows of the layer on which a kernel is tried, and the relative difference from which it is not used."""
NUMBERS = {Codes.INT4: 0, Codes.INT8: 1, Codes.FP8: 2}
SCALES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


@dataclass(frozen=True, slots=True)
class Division:
    """How a product's columns are divided."""

    warps: int
    """Parts of the columns, whose sums are added in this order: it decides the bits."""
    ahead: int
    """Steps of 128 columns that are read before they are needed."""


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("zeros", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("rows", ctypes.c_int),
        ("padding", ctypes.c_int),
    )


class _Work(ctypes.Structure):
    """As in the source."""

    _fields_ = (
        ("matrices", _Matrix * 3),
        ("x", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("columns", ctypes.c_int),
        ("groups", ctypes.c_int),
        ("scale_rows", ctypes.c_int),
        ("tokens", ctypes.c_int),
        ("row_stride", ctypes.c_int),
        ("eps", ctypes.c_float),
        ("offset", ctypes.c_float),
        ("out_is_float", ctypes.c_int),
        ("gelu", ctypes.c_int),
        ("early", ctypes.c_int),
        ("lets_next", ctypes.c_int),
    )


def division_of(linear: CodedLinear) -> Division:
    """How the products of a layer are divided: by its kind and width alone, so that all of them have the same bits. The
    best of four, H200, microseconds for 17,408 rows of 5120, beside the Triton kernels: int4 19 (25), int8 28 (32), fp8
    28 (51), both matrices of a gate in int4 40 (69)."""
    is_long = linear.kind.codes is not Codes.INT4 and linear.in_features > LONG_COLUMNS
    return Division(8, 4) if is_long else Division(8, 2)


@dataclass(frozen=True, slots=True)
class Launch:
    """What a product is to run."""

    settings: tuple[tuple[str, int], ...]
    """Of the compiler."""
    work: ctypes.Structure
    programs: int
    threads: int
    shared_bytes: int
    held: tuple[torch.Tensor, ...]
    """Tensors that live until the kernel is queued."""


def product(
    x: torch.Tensor,
    linears: Sequence[CodedLinear],
    out: torch.Tensor,
    *,
    norm: torch.Tensor | None = None,
    offset: bool = False,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    division: Division | None = None,
) -> bool:
    """`kernels.matvec.matvec` over codes of one kind, or of one layer for `x` `[tokens, k]` of up to `MOST_TOKENS`
    tokens: `out` is then `[tokens, n]`. Does nothing and returns False if that cannot be done here."""
    return _run(planned(x, linears, out, norm, residual, offset, eps, division), linears[0], x)


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
    division: Division | None = None,
) -> bool:
    """The same for `kernels.matvec.gated`."""
    launch = planned(x, (gate, up), out, norm, None, offset, eps, division, is_gated=True, gelu=gelu)
    return _run(launch, gate, x)


def takes(linear: CodedLinear) -> bool:
    """Whether the kernels know codes of this kind and width."""
    kind = linear.kind
    whole_groups = kind.group % STEP_COLUMNS == 0 and (kind.group > 0 or kind.rows == 1)
    is_known = kind.codes in NUMBERS and kind.scale_dtype in SCALES and not kind.has_row_scales
    return linear.in_features % STEP_COLUMNS == 0 and whole_groups and is_known


def planned(
    x: torch.Tensor,
    linears: Sequence[CodedLinear],
    out: torch.Tensor,
    norm: torch.Tensor | None,
    residual: torch.Tensor | None,
    offset: bool,
    eps: float,
    division: Division | None = None,
    *,
    is_gated: bool = False,
    gelu: bool = False,
    is_staged: bool | None = None,
) -> Launch | None:
    """The launch for a product; None if the kernels do not know what it is over. Whether vectors are staged in shared
    memory follows from their size, unless `is_staged` says it."""
    first = linears[0]
    beside = [each for each in (norm, residual, *(linear.bias for linear in linears)) if each is not None]
    if not all(takes(linear) for linear in linears) or any(each.dtype is not x.dtype for each in beside):
        return None
    if x.dtype not in (torch.bfloat16, torch.float16) or out.dtype not in (x.dtype, torch.float32):
        return None
    kind, columns = first.kind, first.in_features
    tokens = x.numel() // columns
    division = division or division_of(first)
    staged = tokens * (columns + STAGED_PADDING) * x.element_size()
    if is_staged is None:
        is_staged = norm is not None or staged <= STAGED_BYTES
    settings = {
        "CODES": NUMBERS[kind.codes],
        "SCALES": SCALES[kind.scale_dtype],
        "ZEROS": int(kind.has_zeros),
        "GROUP_STEPS": kind.group // STEP_COLUMNS,
        "F16": int(x.dtype is torch.float16),
        "WARPS": division.warps,
        "DEPTH": min(MOST_AHEAD_OF_TWO, division.ahead) if is_gated else division.ahead,
        "TILES": 1 if tokens <= TILE_TOKENS else 2,
        "GATED": int(is_gated),
        "NORMED": int(norm is not None),
        "STAGED": int(is_staged),
    }
    x, *others = (_aligned(first.in_order(each)) for each in (x, norm) if each is not None)
    work = _Work(
        (_Matrix * 3)(*(_matrix(linear) for linear in linears)),
        x.data_ptr(),
        others[0].data_ptr() if others else None,
        None if residual is None else residual.data_ptr(),
        out.data_ptr(),
        columns,
        kind.scale_shape(1, columns)[1],
        kind.rows,
        tokens,
        first.out_features if is_gated else sum(linear.out_features for linear in linears),
        eps,
        float(offset),
        int(out.dtype is not x.dtype),
        int(gelu),
        0,
        int(not is_gated),  # The down projection is next: see `overlap.wait_alone`.
    )
    programs = sum(-(-linear.out_features // ROWS) for linear in (linears[:1] if is_gated else linears))
    shared_bytes = staged if is_staged else 0
    return Launch(tuple(settings.items()), work, programs, 32 * division.warps, shared_bytes, (x, *others))


def serves(linear: CodedLinear, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the layer's products with vectors of this dtype are computed by these kernels."""
    if device.type != "cuda":
        return False
    x, out = (torch.empty(size, dtype=dtype, device=device) for size in (linear.in_features, linear.out_features))
    launch = planned(x, (linear,), out, None, None, False, 0.0)
    return launch is not None and _tried(launch.settings, linear.kind, linear.in_features, dtype, device) is not None


def _run(launch: Launch | None, linear: CodedLinear, x: torch.Tensor) -> bool:
    if launch is None or x.device.type != "cuda":
        return False
    kernel = _tried(launch.settings, linear.kind, linear.in_features, x.dtype, x.device)
    if kernel is None:
        return False
    _queue(kernel, launch)
    return True


def _queue(kernel: compiled.Kernel, launch: Launch) -> None:
    launch.work.early = int(kernel.is_early)
    kernel(launch.programs, launch.threads, launch.work, launch.shared_bytes)


def _matrix(linear: CodedLinear) -> _Matrix:
    zeros, bias = (None if each is None else each.data_ptr() for each in (linear.zeros, linear.bias))
    return _Matrix(linear.codes.data_ptr(), linear.scales.data_ptr(), zeros, bias, linear.out_features, 0)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    return x if x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0 else x.clone(memory_format=torch.contiguous_format)


@cache
def _tried(
    settings: tuple[tuple[str, int], ...], kind: WeightKind, columns: int, dtype: torch.dtype, device: torch.device
) -> compiled.Kernel | None:
    """The kernel, compiled and tried on a few rows of random codes; None, with the reason in the log, if it cannot be
    used here or gives another result than the numbers that the codes mean."""
    if torch.cuda.get_device_capability(device) < CAPABILITY:
        return None
    try:
        with torch.cuda.device(device):
            kernel = compiled.kernel(FILE, NAME, dict(settings), device)
            error = _error(lambda launch: _queue(kernel, launch), dict(settings), kind, columns, dtype, device)
    except (compiled.CompileError, RuntimeError) as failure:
        log.warning("products over codes run on slower kernels, because theirs cannot be used: %s", failure)
        return None
    if error < WRONG:
        return kernel
    log.warning("products over %s run on slower kernels, because theirs are off by %.1f%%", kind, 100 * error)
    return None


def _error(
    queue: Callable[[Launch], None],
    settings: Mapping[str, int],
    kind: WeightKind,
    columns: int,
    dtype: torch.dtype,
    device: torch.device,
) -> float:
    """The relative difference of a product, that `queue` runs, from that of the numbers in float32. Infinite if a
    second run gives other bits."""
    given = torch.Generator().manual_seed(1)
    pair = [_random(kind, columns, given, device) for _ in range(2 if settings["GATED"] else 1)]
    tokens = TILE_TOKENS + 1 if settings["TILES"] == 2 else 1
    x = torch.randn((tokens, columns), generator=given).to(device, dtype)
    norm = (torch.rand(columns, generator=given) + 0.5).to(device, dtype) if settings["NORMED"] else None
    division = Division(settings["WARPS"], settings["DEPTH"])
    outs = []
    for _ in range(2):
        outs.append(torch.full((tokens, TRIED_ROWS), float("nan"), dtype=dtype, device=device))
        how = {"is_gated": bool(settings["GATED"]), "is_staged": bool(settings["STAGED"])}
        launch = planned(x, pair, outs[-1], norm, None, False, EPS, division, **how)
        assert launch is not None, "it is known"
        queue(launch)
    vectors = x.float()
    if norm is not None:
        vectors = vectors * torch.rsqrt(vectors.square().mean(dim=1, keepdim=True) + EPS) * norm.float()
    products = [pair[0].in_order(vectors) @ _numbers(linear).T for linear in pair]
    expected = torch.nn.functional.silu(products[0]) * products[1] if settings["GATED"] else products[0]
    if not torch.equal(outs[0], outs[1]):
        return float("inf")
    return float((outs[0].float() - expected).norm() / expected.norm())


@dataclass(slots=True)
class _Tried:
    """A layer with random codes."""

    kind: WeightKind
    in_features: int
    out_features: int
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    order: torch.Tensor | None
    row_scales: torch.Tensor | None = None
    bias: Any = None

    def in_order(self, x: torch.Tensor) -> torch.Tensor:
        return x


def _random(kind: WeightKind, columns: int, given: torch.Generator, device: torch.device) -> _Tried:
    made: dict[str, torch.Tensor] = {}
    for name, (shape, dtype) in kind.tensors(TRIED_ROWS, columns).items():
        if name == "scales":
            numbers = (torch.rand(shape, generator=given) + 0.5) / 100
        elif kind.codes is Codes.INT4 and name == "codes":
            numbers = torch.randint(-(2**31), 2**31, shape, generator=given)
        elif kind.codes is Codes.INT4:
            numbers = torch.randint(0, 16, shape, generator=given)
        elif kind.codes is Codes.FP8:
            numbers = torch.randn(shape, generator=given) * 20
        else:
            numbers = torch.randint(-128, 128, shape, generator=given)
        made[name] = numbers.to(dtype).to(device)
    return _Tried(kind, columns, TRIED_ROWS, made["codes"], made["scales"], made.get("zeros"), None)


def _numbers(linear: _Tried) -> torch.Tensor:
    return numbers(linear.kind, linear.codes, linear.scales, linear.zeros, torch.float32)
