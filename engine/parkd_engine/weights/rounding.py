"""Numbers to codes, each to the nearest, with the scale that fits the largest of its group: no data is needed.

Symmetric: int4 codes are -7 to 7, int8 codes -127 to 127 and fp8 codes up to 448 times the scale. Scales are rounded to
their dtype before codes are made, so that codes are right for the scale that is stored.
"""

from __future__ import annotations

import torch

from parkd_engine.weights.kinds import MIDDLE, Codes, WeightKind, packed

LARGEST = {Codes.INT4: 7.0, Codes.INT8: 127.0, Codes.FP8: 448.0}
ROUNDED_ROWS = 4096
"""Rows that are rounded at once: their float32 numbers take memory for a while."""


def rounded(matrix: torch.Tensor, kind: WeightKind) -> dict[str, torch.Tensor]:
    """Codes and scales of `matrix` `[rows, columns]`, any floating dtype, on its device; as `kind.tensors` names them.
    For kinds without zeros and order, with scales for single rows."""
    assert (kind.rows, kind.has_zeros, kind.is_ordered) == (1, False, False), "a kind that needs no data"
    shapes = kind.tensors(*matrix.shape)
    out = {name: torch.empty(shape, dtype=dtype, device=matrix.device) for name, (shape, dtype) in shapes.items()}
    for start in range(0, matrix.shape[0], ROUNDED_ROWS):
        chosen = slice(start, start + ROUNDED_ROWS)
        _round(matrix[chosen], kind, out["codes"][chosen], out["scales"][chosen])
    return out


def _round(matrix: torch.Tensor, kind: WeightKind, codes: torch.Tensor, scales: torch.Tensor) -> None:
    grouped = matrix.to(torch.float32).view(matrix.shape[0], -1, kind.group or matrix.shape[1])
    largest = LARGEST[kind.codes]
    scales.copy_(grouped.abs().amax(dim=-1) / largest)
    # A group of zeros, or one whose scale would round to zero, has codes of zero.
    each = scales.to(torch.float32)[..., None]
    scaled = torch.where(each > 0, grouped / each, 0.0).clamp_(-largest, largest).view(matrix.shape)
    if kind.codes is Codes.FP8:
        codes.copy_(scaled.to(torch.float8_e4m3fn))
    elif kind.codes is Codes.INT8:
        codes.copy_(scaled.round_())
    else:
        codes.copy_(packed(scaled.round_().add_(MIDDLE).to(torch.uint8)))
