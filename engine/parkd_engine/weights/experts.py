"""Routed experts whose weights are codes: the rows of all experts of a layer are one matrix (`linear.QuantisedLinear`).

    rows      | expert 0: gate, up | expert 1: gate, up | ... |       and another matrix for the way down

    a few tokens, on GPUs    each token and expert it chose by itself, in one launch; nothing is read back
    others                   tokens are sorted by expert, and the rows of some experts at a time become numbers

The rest is the library's arithmetic: its activation, and the sum over what a token chose, in the order of its choice.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from parkd.errors import UnsupportedModel
from parkd_engine.kernels import has_triton
from parkd_engine.weights.kinds import WeightKind
from parkd_engine.weights.linear import HALVES, QuantisedLinear, rows_at_once, rows_product
from parkd_engine.weights.schemes import OWN_METHOD, Scheme

EXPERTS = "experts"
"""Name of the submodule with a layer's routed experts."""
GATED, UNGATED, DOWN = "gate_up_proj", "up_proj", "down_proj"
PARTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {GATED: ("gate_proj", "up_proj"), UNGATED: ("up_proj",), DOWN: ("down_proj",)}
)
"""The library's name of a matrix -> those of the linear layers of an expert whose rows it has, one after the other."""
GROUPED_CAPABILITY = (8, 0)
"""The first with the matrix library's product of groups."""


def matrix_shapes(experts: Any) -> dict[str, tuple[int, int]]:
    """Name of each matrix of the library's module of experts -> rows and columns of one expert's, as of a linear layer.
    Raises UnsupportedModel for a module that is not understood."""
    if getattr(experts, "has_gate", None) is None or getattr(experts, "has_post_expert_norm", False):
        raise UnsupportedModel(
            f"its quantised experts are of the kind {type(experts).__name__}, which is not supported"
        )
    found = {}
    for name in (GATED if experts.has_gate else UNGATED, DOWN):
        rows, columns = getattr(experts, name).shape[1:]
        found[name] = (columns, rows) if experts.is_transposed else (rows, columns)
    return found


def quantised_experts(model: nn.Module, scheme: Scheme) -> dict[str, tuple[nn.Module, dict[str, WeightKind]]]:
    """Name of each module of routed experts of `model` that the scheme stores as codes -> the library's module, and the
    kind of each of its matrices. Raises UnsupportedModel for experts that are not supported."""
    found: dict[str, tuple[nn.Module, dict[str, WeightKind]]] = {}
    for name, module in model.named_modules():
        tensors = list(module.parameters(recurse=False))
        if name.rpartition(".")[2] != EXPERTS or not any(each.dim() == 3 for each in tensors):
            continue
        kinds = {}
        for matrix, (rows, columns) in matrix_shapes(module).items():
            each = {scheme.kind_of(f"{name}.0.{part}", columns) for part in PARTS[matrix]}
            if len(each) > 1:
                raise UnsupportedModel(f"its experts are quantised in part ({matrix}), which is not supported")
            if (kind := each.pop()) is None:
                continue
            if kind.is_ordered or rows // len(PARTS[matrix]) % kind.rows:
                reason = "columns in an order of their own" if kind.is_ordered else f"{rows} rows stored as {kind}"
                raise UnsupportedModel(f"its experts have {reason}, which is not supported")
            kinds[matrix] = kind
        if len(kinds) == 1 and scheme.format == OWN_METHOD:  # Of widths that no group divides: all stay as they are.
            continue
        if len(kinds) == 1:
            raise UnsupportedModel(f"its experts are quantised in part ({next(iter(kinds))}), which is not supported")
        if kinds:
            found[name] = module, kinds
    return found


class QuantisedExperts(nn.Module):
    """Takes the place of the library's module of a layer's routed experts."""

    def __init__(self, experts: Any, matrices: Mapping[str, QuantisedLinear]) -> None:
        """`matrices` are those of `matrix_shapes`, each with the rows of all experts. `experts` is the library's
        module, whose biases and activation are used; its weights are not kept."""
        super().__init__()
        self.num_experts = int(experts.num_experts)
        self._first, self._down = matrices
        for name, matrix in matrices.items():
            self.add_module(name, matrix)
            self.register_parameter(f"{name}_bias", getattr(experts, f"{name}_bias", None))
        bare = copy.copy(experts)
        bare.__dict__["_parameters"] = {}
        self._library = (bare,)  # In a tuple, so that it is no submodule.

    @classmethod
    def empty(cls, experts: Any, kinds: Mapping[str, WeightKind], device: str = "meta") -> QuantisedExperts:
        """With codes that are not set."""
        shapes, count = matrix_shapes(experts), int(experts.num_experts)
        return cls(experts, {name: _empty(kinds[name], count, *shapes[name], device) for name in shapes})

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """`[n, hidden]` of hidden states `[n, hidden]`, the experts that each token chose `[n, k]`, and their
        weights."""
        tokens, each = index.shape
        chosen = index.reshape(-1)
        if self._is_quick(hidden):
            made = self._apart(self._down, self._act(self._apart(self._first, hidden, chosen)), chosen)
        else:
            order = torch.argsort(chosen, stable=True)
            counts = torch.bincount(chosen, minlength=self.num_experts).tolist()
            inner = self._act(self._grouped(self._first, hidden[order // each], chosen[order], counts))
            sorted_out = self._grouped(self._down, inner, chosen[order], counts)
            made = torch.empty_like(sorted_out)
            made[order] = sorted_out
        weighted = made * weights.reshape(-1, 1)
        return weighted.view(tokens, each, -1).sum(1).to(hidden.dtype)

    def _matrix(self, name: str) -> tuple[QuantisedLinear, int, torch.Tensor | None]:
        """The matrix, the rows of one expert, and the biases `[experts, rows]`."""
        matrix: Any = self._modules[name]
        return matrix, matrix.out_features // self.num_experts, self._parameters[f"{name}_bias"]

    def _act(self, x: torch.Tensor) -> torch.Tensor:
        (library,) = self._library
        acted: torch.Tensor = library._apply_gate(x) if library.has_gate else library.act_fn(x)
        return acted

    def _is_quick(self, hidden: torch.Tensor) -> bool:
        if not hidden.is_cuda or hidden.dtype not in HALVES or not has_triton():
            return False
        from parkd_engine.kernels import codes
        from parkd_engine.kernels.few_tokens import MOST_TOKENS

        known = all(codes.is_known(self._matrix(name)[0]) for name in (self._first, self._down))
        return known and len(hidden) <= MOST_TOKENS

    def _apart(self, name: str, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """`[pairs, rows]` of `[pairs / k, columns]`: each with the expert that it chose, through the kernel."""
        from parkd_engine.kernels import codes

        matrix, rows, bias = self._matrix(name)
        out = x.new_empty((len(chosen), rows))
        with torch.cuda.device(x.device):
            codes.apart(x.contiguous(), matrix, out, chosen=chosen, bias=bias)
        return out

    def _grouped(self, name: str, x: torch.Tensor, chosen: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """`[pairs, rows]` of `[pairs, columns]`, both sorted by the expert that is `chosen`."""
        matrix, rows, bias = self._matrix(name)
        columns = matrix.in_features
        out = x.new_empty((len(x), rows))
        at_once = _experts_at_once(x, rows, columns)
        begin = 0
        for first, end in _groups(counts, at_once):
            stop = begin + sum(counts[first:end])
            part = x[begin:stop]
            if end - first == 1:
                out[begin:stop] = rows_product(part, matrix, first * rows, end * rows)
            else:
                numbers = matrix.numbers(x.dtype, first * rows, end * rows).view(end - first, rows, columns)
                ends = torch.tensor(list(accumulate(counts[first:end])), dtype=torch.int32, device=x.device)
                out[begin:stop] = nn.functional.grouped_mm(part, numbers.transpose(1, 2), offs=ends)
            begin = stop
        return out if bias is None else out.add_(bias[chosen])


def rows_of(experts: Any, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The rows of all experts, `[experts * rows, columns]`, of a tensor of the library's module."""
    rows: torch.Tensor = (tensor.transpose(1, 2) if experts.is_transposed else tensor).reshape(
        -1, matrix_shapes(experts)[name][1]
    )
    return rows


def joined(
    kind: WeightKind, experts: int, rows: int, columns: int, parts: Iterator[tuple[int, dict[str, Any], WeightKind]]
) -> QuantisedLinear:
    """The matrix of all experts, of `rows` rows each, from its parts: the first row of each, its tensors and their
    kind, which may differ from `kind` in whether it has zeros and in the dtype of scales. Raises ValueError if parts
    differ in more."""
    held: QuantisedLinear | None = None
    for first, tensors, its in parts:
        if held is None:
            kind = replace(its, has_zeros=kind.has_zeros)
            held = _empty(kind, experts, rows, columns, "cpu")
        if replace(its, has_zeros=kind.has_zeros) != kind or (its.has_zeros and not kind.has_zeros):
            raise ValueError(f"its experts are stored in several ways, {kind} and {its}")
        for name, (shape, _) in kind.tensors(tensors["codes"].shape[0], columns).items():
            into: Any = getattr(held, name)
            at = first // kind.rows if name in ("scales", "zeros") else first
            # Zeros that are all the middle are not stored.
            value = tensors.get(name, its.middle if name == "zeros" else None)
            if value is None or (isinstance(value, torch.Tensor) and tuple(value.shape) != shape):
                raise ValueError(f"{name} is missing or of another shape than {list(shape)}")
            into[at : at + shape[0]] = value
    assert held is not None, "a layer has experts"
    return held


def _empty(kind: WeightKind, experts: int, rows: int, columns: int, device: str) -> QuantisedLinear:
    shapes = kind.tensors(experts * rows, columns)
    tensors = {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in shapes.items()}
    return QuantisedLinear(kind, columns, experts * rows, tensors)


def _experts_at_once(x: torch.Tensor, rows: int, columns: int) -> int:
    if not x.is_cuda or x.dtype not in HALVES or torch.cuda.get_device_capability(x.device) < GROUPED_CAPABILITY:
        return 1
    return max(1, rows_at_once(columns, x.dtype.itemsize) // rows)


def _groups(counts: Sequence[int], size: int) -> Iterator[tuple[int, int]]:
    """Ranges `[first, end)` of at most `size` experts, from one that was chosen to one that was chosen."""
    chosen = [expert for expert, count in enumerate(counts) if count]
    while chosen:
        first = chosen[0]
        end = max(expert for expert in chosen if expert < first + size) + 1
        yield first, end
        chosen = [expert for expert in chosen if expert >= end]
