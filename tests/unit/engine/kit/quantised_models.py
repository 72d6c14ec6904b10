"""Tiny models of every family whose linear layers and experts are codes, of each kind of weights."""

from __future__ import annotations

from typing import Any

import torch
from parkd_engine.weights.experts import QuantisedExperts, matrix_shapes
from parkd_engine.weights.kinds import Codes, WeightKind
from parkd_engine.weights.linear import QuantisedLinear
from torch import nn

from tests.unit.engine.kit.core_models import FAMILIES, tiny_model
from tests.unit.engine.kit.hybrid_models import HYBRIDS, hybrid_model

KINDS: dict[str, WeightKind] = {
    "int4": WeightKind(Codes.INT4, 32),
    "int4-zeros": WeightKind(Codes.INT4, 64, has_zeros=True, scale_dtype=torch.float16),
    "int4-order": WeightKind(Codes.INT4, 32, has_zeros=True, is_ordered=True),
    "fp4": WeightKind(Codes.FP4, 32, scale_dtype=torch.float8_e8m0fnu),
    "fp4-rows": WeightKind(Codes.FP4, 16, scale_dtype=torch.float8_e4m3fn, has_row_scales=True),
    "int8": WeightKind(Codes.INT8),
    "int8-zeros": WeightKind(Codes.INT8, 32, has_zeros=True),
    "fp8": WeightKind(Codes.FP8, scale_dtype=torch.float32),
    "fp8-blocks": WeightKind(Codes.FP8, 48, 20, scale_dtype=torch.float32),
}
WIDE = {"hidden_size": 192, "intermediate_size": 128}
"""Widths that whole groups divide."""
ROW_SCALED = 64.0
"""How much larger scales are where each row has one more, so that 8 bits say them well."""
NARROW = ("granite-h", "falcon-h1")
"""Families whose other sizes follow from these: they stay as they are, and only kinds by rows fit them."""
NEVER = ("in_proj_a", "in_proj_b", "router", "gate")


def random_codes(
    kind: WeightKind, rows: int, columns: int, generator: torch.Generator, device: str = "cpu"
) -> QuantisedLinear:
    """Random codes, scales and zeros; numbers of about the size that keeps a vector's length."""
    tensors: dict[str, torch.Tensor] = {}
    for name, (shape, dtype) in kind.tensors(rows, columns).items():
        if name == "order":
            made = torch.randperm(columns, generator=generator)
        elif name == "zeros":
            low, high = (4, 12) if kind.codes is Codes.INT4 else (-9, 10)
            made = torch.randint(low, high, shape, generator=generator)
        elif name == "row_scales":
            made = (torch.rand(shape, generator=generator) + 0.5) * (1.2 / ROW_SCALED)
        elif name == "scales":
            size = {Codes.INT4: 5.0, Codes.FP4: 2.9, Codes.INT8: 73.0, Codes.FP8: 100.0}[kind.codes] * columns**0.5
            made = (torch.rand(shape, generator=generator) + 0.5) * (1.2 / size)
            if kind.has_row_scales:
                made *= ROW_SCALED
        elif kind.codes in (Codes.INT4, Codes.FP4):
            made = torch.randint(-(2**31), 2**31, shape, generator=generator)
        elif kind.codes is Codes.INT8:
            made = torch.randint(-128, 128, shape, generator=generator)
        else:
            made = (torch.randn(shape, generator=generator) * 100).clamp(-448, 448)
        tensors[name] = made.to(dtype).to(device)
    return QuantisedLinear(kind, columns, rows, tensors)


def e2m1(codes: torch.Tensor) -> torch.Tensor:
    """A sign, two bits of exponent with a bias of 1, one of mantissa; without an exponent, halves."""
    sign, exponent, mantissa = codes >> 3, (codes >> 1) & 3, codes & 1
    size = torch.where(exponent > 0, (1 + mantissa / 2) * 2.0 ** (exponent - 1), mantissa / 2)
    return torch.where(sign > 0, -size, size)


def numbers_of(layer: QuantisedLinear) -> torch.Tensor:
    """What the codes mean, float32 `[out, in]`, in the order of the vector: one column after the other."""
    kind, columns = layer.kind, []
    for column in range(layer.in_features):
        if kind.codes in (Codes.INT4, Codes.FP4):
            block, inside = divmod(column, 32)
            lane, word = divmod(inside, 4)
            codes = (layer.codes[:, block * 4 + word] >> (4 * lane)) & 15
            codes = e2m1(codes) if kind.codes is Codes.FP4 else codes.float()
        else:
            codes = layer.codes[:, column].float()
        group = column // kind.group if kind.group else 0
        rows = torch.arange(layer.out_features, device=codes.device) // kind.rows
        zero = 8.0 if kind.codes is Codes.INT4 else 0.0
        shift = zero if layer.zeros is None else layer.zeros[rows, group].float()
        scale = layer.scales.float()[rows, group]
        if layer.row_scales is not None:
            scale = scale * layer.row_scales
        columns.append((codes - shift) * scale)
    stored = torch.stack(columns, dim=1)
    if layer.order is None:
        return stored
    out = torch.empty_like(stored)
    out[:, layer.order.long()] = stored
    return out


def quantised_model(family: str, kind: str, **changes: Any) -> Any:
    """A model of any family, with codes in its decoder's linear layers, experts and output head."""
    wide = {} if family in NARROW else dict(WIDE)
    if "moe_intermediate_size" in HYBRIDS.get(family, ("", {}))[1]:
        wide["moe_intermediate_size"] = 32
    sizes = {**wide, **changes}
    model: Any = tiny_model(family, **sizes) if family in FAMILIES else hybrid_model(family, **sizes)
    put_codes(model, KINDS[kind])
    return model


def put_codes(model: Any, kind: WeightKind, seed: int = 4) -> None:
    """Replaces the linear layers and experts that a kind fits, except those whose few numbers decide much."""
    generator = torch.Generator().manual_seed(seed)
    for name, module in list(model.named_modules()):
        parent, _, child = name.rpartition(".")
        if child == "experts" and not isinstance(module, nn.ModuleList):
            if (coded := coded_experts(module, kind, generator)) is not None:
                setattr(model.get_submodule(parent), child, coded)
            continue
        if type(module) is not nn.Linear or child in NEVER or "vis" in name or not kind.fits(module.in_features):
            continue
        layer = random_codes(kind, module.out_features, module.in_features, generator)
        layer.bias = module.bias
        setattr(model.get_submodule(parent), child, layer)


def coded_experts(module: Any, kind: WeightKind, generator: torch.Generator) -> QuantisedExperts | None:
    """Random codes in place of the weights of a layer's experts; None if the kind does not fit them."""
    shapes = matrix_shapes(module)
    if kind.is_ordered or not all(kind.fits(columns) and rows % kind.rows == 0 for rows, columns in shapes.values()):
        return None
    count = module.num_experts
    return QuantisedExperts(
        module, {name: random_codes(kind, count * rows, columns, generator) for name, (rows, columns) in shapes.items()}
    )


def put_numbers(model: Any, dtype: torch.dtype) -> Any:
    """Replaces the codes by what they mean, in ordinary layers of this dtype."""
    for name, module in list(model.named_modules()):
        if isinstance(module, QuantisedLinear):
            parent, _, child = name.rpartition(".")
            linear = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
            linear.weight = nn.Parameter(numbers_of(module))
            linear.bias = module.bias
            setattr(model.get_submodule(parent), child, linear.to(dtype))
    return model.to(dtype)
