"""int4 codes in the order in which torch's product over them takes them on CPUs.

    tile     64 rows (32 without AVX-512) of all columns: byte j of a column has the code of row j in its lower bits,
             and that of the row half a tile further in its upper bits
    pairs    [groups, rows, 2]: the scale of each group, and a zero, which is nothing here

A layer has its codes so instead of in words, never both. Numbers for prompts are made of them as well.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn

from parkd_engine.weights.experts import QuantisedExperts
from parkd_engine.weights.kinds import Codes, tiled, unpacked
from parkd_engine.weights.linear import QUICK, QuantisedLinear

GROUPS = frozenset({32, 64, 128, 256})
"""Columns in a group that the product takes."""
TILE_ROWS = (64, 32)
_TRIED_COLUMNS = 32


@cache
def tile_rows() -> int | None:
    """Rows of a tile on this machine; None if its order of codes is another one, or it has no such product."""
    rows = max(TILE_ROWS)
    codes = (torch.arange(rows)[:, None] * 7 + torch.arange(_TRIED_COLUMNS) * 3) % 16
    try:
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)
    except (AttributeError, RuntimeError):
        return None
    mine = {each: tiled(codes.to(torch.uint8), each) for each in TILE_ROWS}
    return next((each for each, tiles in mine.items() if torch.equal(tiles.view(-1), packed.view(-1))), None)


def put_tiles(model: nn.Module) -> None:
    """Brings the codes of the model's linear layers, where they can be, into tiles. Experts stay: one expert's rows are
    multiplied at a time."""
    rows = tile_rows()
    if rows is None:
        return
    of_experts = {
        id(part) for experts in model.modules() if isinstance(experts, QuantisedExperts) for part in experts.modules()
    }
    for part in model.modules():
        if isinstance(part, QuantisedLinear) and id(part) not in of_experts and _fits(part, rows):
            _tile(part, rows)


def _fits(linear: QuantisedLinear, rows: int) -> bool:
    kind = linear.kind
    plain = kind.rows == 1 and not kind.has_zeros and not kind.is_ordered and linear.tile_rows == 0
    # Scales of another dtype would be rounded.
    known = kind.codes is Codes.INT4 and kind.group in GROUPS and kind.scale_dtype is QUICK
    return plain and known and linear.out_features % rows == 0


def _tile(linear: QuantisedLinear, rows: int) -> None:
    buffers: dict[str, Any] = linear._buffers
    scales = linear.scales.T
    buffers["codes"] = tiled(unpacked(linear.codes), rows)
    buffers["pairs"] = torch.stack((scales, torch.zeros_like(scales)), dim=2)
    buffers["scales"] = None
    linear.tile_rows = rows
