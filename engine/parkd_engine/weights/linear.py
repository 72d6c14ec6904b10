"""A linear layer whose weights are codes and scales, and its product with any number of vectors.

    a few vectors, on GPUs                   kernels over the codes
    a few vectors, on CPUs, int8 by rows     torch's product over the codes: vectors and results are rounded to bf16
    the same in int4                         likewise, over codes in tiles (`tiles`)
    others                                   some rows of the matrix at a time become numbers, and the matrix library
                                             multiplies

Numbers of a prompt's product are rounded to the dtype of the vectors, like weights that were never quantised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear as full_product

from parkd_engine.kernels import has_triton
from parkd_engine.weights.kinds import Codes, WeightKind, meaning, numbers, untiled

HALVES = frozenset({torch.bfloat16, torch.float16})
WORKSPACE_BYTES = 256 << 20
"""The most memory for numbers that a product makes of codes for a while."""
QUICK = torch.bfloat16
"""The dtype in which torch's product over int8 codes is quick on CPUs; in float32 it is slower than numbers are."""
FEW_ON_CPU = 16
"""Vectors up to which torch's product over int8 codes is used: it takes 1/17 of the time for one, 1/2 for 32 (1536 rows
of 576, one core)."""
FEW_OVER_TILES = 8
"""The same for the product over int4 codes in tiles: it takes a third of the time of a float32 product for one vector
(1536 rows of 576, one core), and grows with the number of vectors."""
CPU_ROWS, CPU_COLUMNS = 16, 64
"""Rows and columns of matrices whose multiples that product takes. It reads beyond the end of others."""


class QuantisedLinear(nn.Module):
    """Takes the place of an `nn.Linear`. Codes, scales, zeros and order are buffers, so that they are moved, shared and
    counted like any other tensors of a module."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    order: torch.Tensor | None
    """int32 `[in]`: the column of the vector for each stored column."""
    row_scales: torch.Tensor | None
    pairs: torch.Tensor | None
    """Scales in the form of `tiles`, in place of `scales`, if the codes are in tiles."""
    tile_rows: int
    """Rows of a tile; 0 if the codes are as `kind` says."""
    bias: nn.Parameter | None

    def __init__(
        self,
        kind: WeightKind,
        in_features: int,
        out_features: int,
        tensors: Mapping[str, torch.Tensor],
        bias: nn.Parameter | None = None,
    ) -> None:
        """`tensors` as `kind.tensors` names them. Raises ValueError if they are others."""
        super().__init__()
        self.kind, self.in_features, self.out_features = kind, in_features, out_features
        self.tile_rows = 0
        for name, (shape, dtype) in kind.tensors(out_features, in_features).items():
            tensor = tensors.get(name)
            if tensor is None or tuple(tensor.shape) != shape or tensor.dtype != dtype:
                seen = "missing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
                raise ValueError(f"{name} should be {dtype} {list(shape)} and is {seen}")
            self.register_buffer(name, tensor)
        for name in ("zeros", "order", "row_scales", "pairs"):
            if name not in self._buffers:
                self.register_buffer(name, None)
        self.register_parameter("bias", bias)

    @classmethod
    def empty(cls, kind: WeightKind, linear: nn.Linear, device: torch.device | str = "meta") -> QuantisedLinear:
        """A layer of the shape of `linear`, with its bias, and codes that are not set."""
        shapes = kind.tensors(linear.out_features, linear.in_features)
        tensors = {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in shapes.items()}
        return cls(kind, linear.in_features, linear.out_features, tensors, linear.bias)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and what belongs to them, without the bias."""
        return sum(buffer.nbytes for buffer in self.buffers())

    def numbers(self, dtype: torch.dtype, first: int = 0, end: int | None = None) -> torch.Tensor:
        """The rows `[first, end)` as numbers, `[end - first, in]`, in the stored order of columns."""
        stop = self.out_features if end is None else end
        if self.codes.is_cuda and has_triton():
            from parkd_engine.kernels import codes

            return codes.numbers(self, dtype, first, stop)
        if self.pairs is not None:
            plain = untiled(self.codes, self.tile_rows, first, stop)
            return meaning(self.kind, plain, self.pairs[..., 0].T, None, dtype, first, None)
        return numbers(self.kind, self.codes[first:stop], self.scales, self.zeros, dtype, first, self.row_scales)

    def in_order(self, x: torch.Tensor) -> torch.Tensor:
        """`x` `[..., in]` with its last axis in the stored order of columns."""
        return x if self.order is None else x[..., self.order]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return product(x, self)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> QuantisedLinear:
        """As of any module, but a change of dtype is one of the bias alone: codes and scales stay what they are."""
        kept = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in kept.items():
            changed = self._buffers[name]
            if buffer is not None and changed is not None and changed.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(changed.device)
        return self

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, kind={self.kind}"


def put_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replaces the submodule of this name."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def rows_at_once(columns: int, itemsize: int) -> int:
    """Rows of a matrix of so many columns that are made numbers at once, so that they take at most `WORKSPACE_BYTES`
    (but one row at least)."""
    return max(1, WORKSPACE_BYTES // (columns * itemsize))


def is_linear(module: Any) -> bool:
    """Whether a module is a linear layer of any kind."""
    return type(module) is nn.Linear or isinstance(module, QuantisedLinear)


def matrix_of(linear: Any, dtype: torch.dtype) -> torch.Tensor:
    """The matrix `[out, in]` of a linear layer of any kind, its columns in the order of the vectors; of codes, in
    `dtype`."""
    if not isinstance(linear, QuantisedLinear):
        matrix: torch.Tensor = linear.weight
        return matrix
    stored = linear.numbers(dtype)
    if linear.order is None:
        return stored
    return torch.empty_like(stored).index_copy_(1, linear.order.long(), stored)


def compute_dtype(linear: Any, x: torch.Tensor) -> torch.dtype:
    """The dtype in which a linear layer takes its vectors: that of its numbers, or that of `x` for codes."""
    return x.dtype if isinstance(linear, QuantisedLinear) else linear.weight.dtype


def product(x: torch.Tensor, linear: QuantisedLinear) -> torch.Tensor:
    """`W x + b` for vectors `x` `[..., in]` of a floating dtype; `[..., out]` in the same."""
    if x.is_cuda and x.dtype in HALVES and has_triton():
        from parkd_engine.kernels import codes
        from parkd_engine.kernels.few_tokens import MOST_TOKENS, products

        vectors = x.reshape(-1, linear.in_features).contiguous()
        if len(vectors) <= MOST_TOKENS and codes.is_known(linear):
            out = x.new_empty((*x.shape[:-1], linear.out_features))
            with torch.cuda.device(x.device):
                products(vectors, linear, out.view(-1, linear.out_features))
            return out
    return rows_product(x, linear, 0, linear.out_features, linear.bias)


def rows_product(
    x: torch.Tensor, linear: QuantisedLinear, first: int, end: int, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The part of the product with the rows `[first, end)`, `[..., end - first]`, as the engine computes it on CPUs,
    and on cards for more than a few vectors. `bias` is that of these rows."""
    vectors = x.numel() // linear.in_features
    if linear.pairs is not None and vectors <= FEW_OVER_TILES and end - first == linear.out_features:
        return _over_tiles(x, linear, linear.pairs, bias)
    if x.device.type == "cpu" and _is_quick_on_cpu(vectors, end - first, linear):
        out = _over_codes(x.reshape(-1, linear.in_features).contiguous(), linear, first, end, bias)
        return out.view(*x.shape[:-1], end - first)
    return _through_numbers(x, linear, first, end, bias)


def _is_quick_on_cpu(vectors: int, rows: int, linear: QuantisedLinear) -> bool:
    kind = linear.kind
    by_rows = kind.group == 0 and kind.rows == 1 and not kind.has_zeros and not kind.is_ordered
    is_even = rows % CPU_ROWS == 0 and linear.in_features % CPU_COLUMNS == 0
    # Scales of another dtype would be rounded.
    return kind.codes is Codes.INT8 and by_rows and is_even and kind.scale_dtype is QUICK and vectors <= FEW_ON_CPU


def _over_codes(
    vectors: torch.Tensor, linear: QuantisedLinear, first: int, end: int, bias: torch.Tensor | None
) -> torch.Tensor:
    """`vectors` is `[tokens, in]`. A vector has the same bits alone and among others."""
    codes, scales = linear.codes[first:end], linear.scales[first:end].view(-1)
    rounded = torch.ops.aten._weight_int8pack_mm(vectors.to(QUICK), codes, scales)
    out: torch.Tensor = rounded.to(vectors.dtype)
    return out if bias is None else out + bias


def _over_tiles(
    x: torch.Tensor, linear: QuantisedLinear, pairs: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`x` is `[..., in]`. A vector has the same bits alone and among others."""
    vectors = x.reshape(-1, linear.in_features).to(QUICK).contiguous()
    rounded = torch.ops.aten._weight_int4pack_mm_for_cpu(vectors, linear.codes, linear.kind.group, pairs)
    out: torch.Tensor = rounded.to(x.dtype).view(*x.shape[:-1], linear.out_features)
    return out if bias is None else out + bias


def _through_numbers(
    x: torch.Tensor, linear: QuantisedLinear, first: int, end: int, bias: torch.Tensor | None
) -> torch.Tensor:
    x = linear.in_order(x)
    step = rows_at_once(linear.in_features, x.dtype.itemsize)
    if step >= end - first:
        return full_product(x, linear.numbers(x.dtype, first, end), bias)
    out = x.new_empty((*x.shape[:-1], end - first))
    for start in range(first, end, step):
        stop = min(start + step, end)
        its = None if bias is None else bias[start - first : stop - first]
        out[..., start - first : stop - first] = full_product(x, linear.numbers(x.dtype, start, stop), its)
    return out
