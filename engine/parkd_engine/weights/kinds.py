"""The kinds of quantised weights. A matrix `[out, in]` is codes, and a scale for each block of them.

    number[r, c] = (code[r, c] - zero[r, c / group]) * (scale[r / rows, c / group] * row_scale[r])

    int4   int32 [out, in / 8]    eight codes from 0 to 15 in a word; without zeros, the zero is 8
    fp4    int32 [out, in / 8]    eight codes in a word, each of which means one of `FP4_NUMBERS`; no zeros
    int8   int8 [out, in]         without zeros, the zero is 0
    fp8    float8_e4m3fn [out, in]

Four words of int4 or fp4 hold 32 adjacent columns: bits 4 k of word j hold column 4 k + j, so that a thread that reads
four words needs runs of four numbers of the vector. Only scales that are numbers of 8 bits themselves (NVFP4) have row
scales beside them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch

CODES_A_WORD = 8
BLOCK_WORDS = 4
BLOCK_COLUMNS = CODES_A_WORD * BLOCK_WORDS
"""Columns of codes of 4 bits that lie together."""
MIDDLE = 8
"""The zero of int4 codes without zeros of their own."""
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4_NUMBERS = (*_MAGNITUDES, *(-each for each in _MAGNITUDES))
"""What the codes of fp4 (e2m1) mean: the highest bit is the sign. (OCP Microscaling Formats, version 1.0, table 5.)"""


class Codes(Enum):
    """What a code is."""

    INT4 = "int4"
    FP4 = "fp4"
    INT8 = "int8"
    FP8 = "fp8"


CODE_DTYPES = {
    Codes.INT4: torch.int32,
    Codes.FP4: torch.int32,
    Codes.INT8: torch.int8,
    Codes.FP8: torch.float8_e4m3fn,
}
IN_WORDS = frozenset({Codes.INT4, Codes.FP4})
"""Codes of 4 bits, eight in a word."""
INTEGERS = frozenset({Codes.INT4, Codes.INT8})


@dataclass(frozen=True, slots=True)
class WeightKind:
    """How the weights of a linear layer are stored. Raises ValueError for what cannot be."""

    codes: Codes
    group: int = 0
    """Columns that share a scale; 0 for all of a row."""
    rows: int = 1
    """Rows that share a scale."""
    has_zeros: bool = False
    """Whether each group has its own zero; of integers only."""
    scale_dtype: torch.dtype = torch.bfloat16
    is_ordered: bool = False
    """Whether the columns are stored in an order of their own (GPTQ's `desc_act`)."""
    has_row_scales: bool = False
    """Whether each row has a scale in float32 beside those of its groups (NVFP4)."""

    def __post_init__(self) -> None:
        if self.has_zeros and (self.codes not in INTEGERS or self.rows != 1):
            raise ValueError("only integers in groups of one row have zeros")
        if self.group < 0 or self.rows < 1:
            raise ValueError(f"groups of {self.group} columns and {self.rows} rows")

    @property
    def middle(self) -> int:
        """The zero of integers without zeros of their own."""
        return MIDDLE if self.codes is Codes.INT4 else 0

    def fits(self, columns: int) -> bool:
        """Whether a matrix of so many columns can be stored so."""
        whole = not self.group or self.rows > 1 or columns % self.group == 0
        return whole and (self.codes not in IN_WORDS or columns % BLOCK_COLUMNS == 0)

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        return -(-rows // self.rows), -(-columns // self.group) if self.group else 1

    def tensors(self, rows: int, columns: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Name of each tensor that stores a matrix `[rows, columns]` -> its shape and dtype."""
        width = columns // CODES_A_WORD if self.codes in IN_WORDS else columns
        scales = self.scale_shape(rows, columns)
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "codes": ((rows, width), CODE_DTYPES[self.codes]),
            "scales": (scales, self.scale_dtype),
        }
        if self.has_zeros:
            shapes["zeros"] = (scales, torch.int8)
        if self.is_ordered:
            shapes["order"] = ((columns,), torch.int32)
        if self.has_row_scales:
            shapes["row_scales"] = ((rows,), torch.float32)
        return shapes

    def __str__(self) -> str:
        if self.rows > 1:
            block = f" in blocks of {self.rows}x{self.group}"
        else:
            block = f" in groups of {self.group}" if self.group else " by rows"
        return self.codes.value + block + (" with zeros" if self.has_zeros else "")


class CodedLinear(Protocol):
    """A linear layer over codes, such as a `linear.QuantisedLinear`, as kernels see it."""

    kind: WeightKind
    in_features: int
    out_features: int
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    order: torch.Tensor | None
    row_scales: torch.Tensor | None
    bias: Any
    """A tensor `[out]`, or None."""

    def in_order(self, x: torch.Tensor) -> torch.Tensor:
        """`x` `[..., in]` with its last axis in the stored order of columns."""


def kind_of(linear: Any) -> WeightKind | None:
    """The kind of a linear layer's weights; None for full precision."""
    kind: WeightKind | None = getattr(linear, "kind", None)
    return kind


def packed(codes: torch.Tensor) -> torch.Tensor:
    """Codes from 0 to 15, any integer dtype `[rows, columns]` -> words, int32 `[rows, columns / 8]`. `columns` is
    a multiple of `BLOCK_COLUMNS`."""
    rows = codes.shape[0]
    lanes = codes.view(rows, -1, CODES_A_WORD, BLOCK_WORDS)
    words = torch.zeros((rows, lanes.shape[1], BLOCK_WORDS), dtype=torch.int32, device=codes.device)
    for lane in range(CODES_A_WORD):
        words |= lanes[:, :, lane].to(torch.int32) << (4 * lane)
    return words.view(rows, -1)


def unpacked(words: torch.Tensor) -> torch.Tensor:
    """Words, int32 `[rows, columns / 8]` -> codes, uint8 `[rows, columns]`."""
    rows = words.shape[0]
    blocks = words.view(rows, -1, BLOCK_WORDS)
    lanes = [((blocks >> (4 * lane)) & 15).to(torch.uint8) for lane in range(CODES_A_WORD)]
    return torch.stack(lanes, dim=2).view(rows, -1)


def tiled(codes: torch.Tensor, tile_rows: int) -> torch.Tensor:
    """Codes from 0 to 15, uint8 `[rows, columns]` -> tiles (see `tiles`), uint8 `[rows, columns / 2]`. `rows` is a
    multiple of `tile_rows`."""
    rows, columns = codes.shape
    lower, upper = codes.view(-1, 2, tile_rows // 2, columns).unbind(1)
    return (lower | (upper << 4)).transpose(1, 2).reshape(rows, columns // 2)


def untiled(tiles: torch.Tensor, tile_rows: int, first: int, end: int) -> torch.Tensor:
    """The codes of the rows `[first, end)`, uint8 `[end - first, columns]`, of tiles."""
    columns = 2 * tiles.shape[1]
    begin, stop = first // tile_rows, -(-end // tile_rows)
    chosen = tiles.view(-1, columns, tile_rows // 2)[begin:stop]
    both = torch.cat((chosen & 15, chosen >> 4), dim=2)
    plain = both.transpose(1, 2).reshape(-1, columns)
    return plain[first - begin * tile_rows : end - begin * tile_rows]


def numbers(
    kind: WeightKind,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    dtype: torch.dtype,
    first_row: int = 0,
    row_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """What some rows of codes mean, `[rows, columns]` in `dtype`: computed in float32, then rounded. `codes` are those
    of the rows from `first_row` on; `scales`, `zeros` and `row_scales` those of the whole matrix. Columns stay in
    stored order."""
    plain = unpacked(codes) if kind.codes in IN_WORDS else codes
    return meaning(kind, plain, scales, zeros, dtype, first_row, row_scales)


def meaning(
    kind: WeightKind,
    plain: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    dtype: torch.dtype,
    first_row: int,
    row_scales: torch.Tensor | None,
) -> torch.Tensor:
    """As `numbers`, of codes that are one number each."""
    codes, rows = plain, plain.shape[0]
    chosen = slice(first_row, first_row + rows)
    if kind.codes is Codes.FP4:
        out = torch.tensor(FP4_NUMBERS, device=codes.device)[plain.to(torch.int32)]
    else:
        out = plain.to(torch.float32)
    columns = out.shape[1]
    group = kind.group or columns
    if kind.rows > 1:
        places = torch.arange(first_row, first_row + rows, device=codes.device) // kind.rows
        each = scales[places].to(torch.float32)
    else:
        each = scales[chosen].to(torch.float32)
    if kind.has_row_scales:
        assert row_scales is not None, "the kind has them"
        each = each * row_scales[chosen, None]
    grouped = out.view(rows, -1, group) if columns % group == 0 else None
    if kind.has_zeros:
        assert zeros is not None, "the kind has them"
        assert grouped is not None, "kinds with zeros have whole groups"
        grouped -= zeros[chosen].to(torch.float32)[..., None]
    elif kind.middle:
        out -= kind.middle
    if grouped is None:
        out *= each.repeat_interleave(group, dim=1)[:, :columns]
    else:
        grouped *= each[..., None]
    return out.to(dtype)
