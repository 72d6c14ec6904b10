"""What the products of one vector share: how a matrix is divided among programs, and the numbers of an activation."""

from __future__ import annotations

from dataclasses import dataclass

import triton.language as tl

SQRT_8_OVER_PI, CUBIC = tl.constexpr(1.5957691216057308), tl.constexpr(0.044715)
"""Of the tanh approximation of GELU."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is divided."""

    rows: int
    """Rows of the weights per program."""
    columns: int
    """Columns of the weights per step."""
    warps: int
