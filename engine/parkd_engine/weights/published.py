"""Tensors of published formats, as they are named and shaped in files, and what they become.

    compressed-tensors   weight_packed, weight_scale, weight_zero_point, weight_g_idx; or weight, weight_scale
    awq                  qweight [in, out / 8], qzeros, scales: eight columns in a word, even ones first
    gptq                 qweight [in / 8, out], qzeros (one less than the zero, but in v2), scales, g_idx
    fp8                  weight, weight_scale_inv for each block
    modelopt             weight [out, in / 2], low bits first, weight_scale, weight_scale_2 for all of it; or fp8
    parkd                codes, scales

Activations may have scales in the file too: they are not read, since products here take the vectors as they are, which
is at least as exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from parkd_engine.weights.kinds import Codes, WeightKind, packed
from parkd_engine.weights.linear import QuantisedLinear
from parkd_engine.weights.schemes import OWN_METHOD, Scheme

Tensors = Mapping[str, torch.Tensor]
Shape = tuple[int, int]
"""Rows and columns."""
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word of each of eight columns."""
SIGN = 128
"""What lies between an unsigned and a signed code of 8 bits."""


class PublishedLinear(nn.Module):
    """A linear layer while it is loaded: its tensors as they are in the file."""

    bias: nn.Parameter | None

    def __init__(self, scheme: Scheme, kind: WeightKind, linear: nn.Linear, tensors: Tensors) -> None:
        """`tensors` have the names, shapes and dtypes of the file, and need no memory."""
        super().__init__()
        self.scheme, self.kind = scheme, kind
        self.in_features, self.out_features = linear.in_features, linear.out_features
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)
        self.register_parameter("bias", linear.bias)

    def finished(self) -> QuantisedLinear:
        """The layer over codes. Raises ValueError if tensors are missing or do not fit."""
        given = dict(self.named_buffers())
        if lost := [name for name, tensor in given.items() if tensor.is_meta]:
            raise ValueError(f"{', '.join(lost)} was not read")
        read = FORMATS[self.scheme.format].read
        codes, kind = read(given, self.kind, (self.out_features, self.in_features))
        return QuantisedLinear(kind, self.in_features, self.out_features, codes, self.bias)


class Format:
    """A way to store the weights of a linear layer."""

    def __init__(
        self, marks: tuple[str, ...], others: tuple[str, ...], read: Callable[..., tuple[dict[str, Any], WeightKind]]
    ) -> None:
        self.marks = marks
        """Names of tensors, one of which a quantised layer has, and no other."""
        self.names = (*marks, *others)
        """Names of all tensors that are read; others are left in the file."""
        self.read = read
        """(tensors, kind, shape) -> the tensors of the kind, and the kind with the file's dtypes."""


def _needed(tensors: Tensors, *names: str) -> torch.Tensor:
    found = next((tensors[name] for name in names if name in tensors), None)
    if found is None:
        raise ValueError(f"{names[0]} is missing")
    return found


def _words_along(words: torch.Tensor, bits: int, axis: int) -> torch.Tensor:
    """Codes of int32 words `[a, b]`, lowest bits first, uint8; `axis` gets as many times longer as a word holds
    codes."""
    parts = words.contiguous().view(torch.uint8).view(*words.shape, 4)
    if bits == 4:
        parts = torch.stack((parts & 15, parts >> 4), dim=-1).flatten(-2)
    return parts.flatten(1) if axis == 1 else parts.transpose(1, 2).flatten(0, 1)


def _integers(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    kind: WeightKind,
    groups: torch.Tensor | None = None,
) -> tuple[dict[str, Any], WeightKind]:
    """The kind's tensors from unsigned codes `[rows, columns]` and zeros `[rows, groups]`, both uint8. `groups` is the
    group of each column, `[columns]`, if it is not its place divided by the group's size."""
    rows, columns = codes.shape
    is_int4 = kind.codes is Codes.INT4
    out: dict[str, Any] = {}
    group = kind.group or columns
    if groups is not None and not torch.equal(groups, torch.arange(columns, dtype=groups.dtype) // group):
        counts = torch.bincount(groups, minlength=scales.shape[1])
        if not bool((counts == group).all()):
            raise ValueError("its groups of columns differ in size")
        order = torch.argsort(groups, stable=True)
        codes, out["order"] = codes[:, order], order.to(torch.int32)
    middle = 8 if is_int4 else SIGN
    # Zeros that are all the middle need not be stored.
    if zeros is not None and bool((zeros == middle).all()):
        zeros = None
    if is_int4:
        out["codes"] = packed(codes.contiguous())
    else:
        out["codes"] = (codes.to(torch.int16) - SIGN).to(torch.int8)
    if zeros is not None:
        out["zeros"] = zeros.contiguous().to(torch.int8) if is_int4 else (zeros.to(torch.int16) - SIGN).to(torch.int8)
    out["scales"] = scales.expand(kind.scale_shape(rows, columns)).contiguous()
    kind = replace(kind, has_zeros=zeros is not None, is_ordered="order" in out, scale_dtype=out["scales"].dtype)
    return out, kind


def _compressed(tensors: Tensors, kind: WeightKind, shape: Shape) -> tuple[dict[str, Any], WeightKind]:
    rows, columns = shape
    scales = _needed(tensors, "weight_scale")
    scales = scales.view(-1, 1) if scales.dim() < 2 else scales
    if kind.codes is Codes.FP8:
        return _floats(_needed(tensors, "weight"), scales, kind, shape)
    bits = 4 if kind.codes is Codes.INT4 else 8
    zeros = tensors.get("weight_zero_point")
    if "weight_packed" in tensors:
        codes = _words_along(tensors["weight_packed"], bits, 1)[:, :columns]
        if zeros is not None:
            zeros = (
                _words_along(zeros, bits, 0)[:rows]
                if zeros.dtype is torch.int32
                else (zeros + 2 ** (bits - 1)).to(torch.uint8)
            )
    else:
        codes = (_needed(tensors, "weight").to(torch.int16) + SIGN).to(torch.uint8)
        if zeros is not None:
            zeros = (zeros.to(torch.int16) + SIGN).to(torch.uint8)
    if kind.has_zeros and zeros is None:
        raise ValueError("weight_zero_point is missing")
    if zeros is not None:
        zeros = zeros.view(scales.shape).expand(kind.scale_shape(rows, columns))
    if kind.rows > 1:
        raise ValueError("integers in blocks of rows")
    groups = tensors.get("weight_g_idx")
    return _integers(codes, scales, zeros, kind, groups if kind.is_ordered else None)


def _floats(
    codes: torch.Tensor, scales: torch.Tensor, kind: WeightKind, shape: Shape
) -> tuple[dict[str, Any], WeightKind]:
    if codes.dtype is not torch.float8_e4m3fn:
        raise ValueError(f"weight is {codes.dtype}, not float8_e4m3fn")
    # One scale for the whole matrix is stored for every row.
    scales = scales.expand(kind.scale_shape(*shape)).contiguous()
    return {"codes": codes, "scales": scales}, replace(kind, scale_dtype=scales.dtype)


def _fp8(tensors: Tensors, kind: WeightKind, shape: Shape) -> tuple[dict[str, Any], WeightKind]:
    scales = _needed(tensors, "weight_scale_inv", "weight_scale")
    return _floats(_needed(tensors, "weight"), scales.view(-1, 1) if scales.dim() < 2 else scales, kind, shape)


def _awq(tensors: Tensors, kind: WeightKind, _: Shape) -> tuple[dict[str, Any], WeightKind]:
    def columns_of(words: torch.Tensor) -> torch.Tensor:
        lanes = _words_along(words, 4, 1).view(len(words), -1, 8)
        return lanes[:, :, list(AWQ_ORDER)].reshape(len(words), -1)

    codes, zeros = columns_of(_needed(tensors, "qweight")), columns_of(_needed(tensors, "qzeros"))
    return _integers(codes.T, _needed(tensors, "scales").T, zeros.T, kind)


def _gptq(version: int) -> Callable[..., tuple[dict[str, Any], WeightKind]]:
    def read(tensors: Tensors, kind: WeightKind, shape: Shape) -> tuple[dict[str, Any], WeightKind]:
        bits = 4 if kind.codes is Codes.INT4 else 8
        codes = _words_along(_needed(tensors, "qweight"), bits, 0)
        zeros = _words_along(_needed(tensors, "qzeros"), bits, 1)
        if version == 1:
            # Kept minus one, in so many bits.
            zeros = (zeros + 1) & (2**bits - 1)
        scales = _needed(tensors, "scales")
        groups = tensors.get("g_idx")
        return _integers(codes.T, scales.T, zeros[:, : shape[0]].T, kind, None if groups is None else groups.long())

    return read


def _modelopt(tensors: Tensors, kind: WeightKind, shape: Shape) -> tuple[dict[str, Any], WeightKind]:
    codes, scales = _needed(tensors, "weight"), _needed(tensors, "weight_scale")
    if kind.codes is Codes.FP8:
        return _floats(codes, scales.view(-1, 1) if scales.dim() < 2 else scales, kind, shape)
    whole = _needed(tensors, "weight_scale_2").to(torch.float32)
    return {"codes": packed(halves(codes)), "scales": scales, "row_scales": whole.expand(shape[0]).contiguous()}, kind


def halves(pairs: torch.Tensor) -> torch.Tensor:
    """Codes of 4 bits, uint8 `[rows, columns]`, of bytes `[rows, columns / 2]`, the lower bits first."""
    if pairs.dtype is not torch.uint8:
        raise ValueError(f"codes of 4 bits are {pairs.dtype}, not uint8")
    return torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1)


def _own(tensors: Tensors, kind: WeightKind, _: Shape) -> tuple[dict[str, Any], WeightKind]:
    return dict(tensors), kind


def _no_layers(*_: Any) -> tuple[dict[str, Any], WeightKind]:
    raise ValueError("only experts are stored so")


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        OWN_METHOD: Format(("codes",), ("scales",), _own),
        "compressed-tensors": Format(
            ("weight_scale", "weight_packed"), ("weight", "weight_zero_point", "weight_g_idx"), _compressed
        ),
        "awq": Format(("qweight",), ("qzeros", "scales"), _awq),
        "gptq": Format(("qweight",), ("qzeros", "scales", "g_idx"), _gptq(1)),
        "gptq_v2": Format(("qweight",), ("qzeros", "scales", "g_idx"), _gptq(2)),
        "fp8": Format(("weight_scale_inv", "weight_scale"), ("weight",), _fp8),
        "modelopt": Format(("weight_scale",), ("weight", "weight_scale_2"), _modelopt),
        "mxfp4": Format((), (), _no_layers),  # Of experts alone (`loading.expert_loading`).
    }
)
"""Name, as in `Scheme.format` -> the format."""
