"""Reads the quantised experts of a layer from the files into matrices of all of them.

    mlp.experts.7.gate_proj. ...                 a linear layer for each, in any published format
    mlp.experts.gate_up_proj_blocks, _scales     gpt-oss: MXFP4, [experts, rows, groups, 16] and [..., groups]

One tensor at a time is in memory beside what is made of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from parkd.errors import ModelError
from parkd_engine.loading.draft_loading import HEAD_PREFIX
from parkd_engine.weights.experts import PARTS, QuantisedExperts, joined, matrix_shapes
from parkd_engine.weights.kinds import WeightKind, packed
from parkd_engine.weights.published import FORMATS, Format, Tensors, halves
from parkd_engine.weights.schemes import Scheme, tail

OTHER_NAMES: Mapping[str, str] = MappingProxyType({"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"})
"""Names of an expert's layers in some files, as in Mixtral's."""
OTHER_PATH = (".mlp.", ".block_sparse_moe.")
"""The library's name of the module around experts, and that in such files."""
BLOCKS, SCALES = "_blocks", "_scales"
Part = tuple[int, dict[str, Any], WeightKind]


class TensorFiles(ExitStack):
    """The tensors of a folder's files, by the name of their module from the layer on. The files are open until the
    context ends."""

    def __init__(self, folder: Path) -> None:
        """Opens the files when the first tensor is asked for."""
        super().__init__()
        self._folder = folder
        self._places: dict[str, dict[str, tuple[Any, str]]] = {}

    def read(self, module: str, names: tuple[str, ...]) -> Tensors:
        """Those of the module's tensors that there are. Raises ModelError."""
        try:
            if not self._places:
                self._open()
            there = self._places.get(module, {})
            return {name: there[name][0].get_tensor(there[name][1]) for name in names if name in there}
        except (OSError, SafetensorError) as error:
            raise ModelError(f"The weights in {self._folder} cannot be read: {error}.") from error

    def _open(self) -> None:
        for file in sorted(self._folder.glob("*.safetensors")):
            opened = self.enter_context(safe_open(str(file), framework="pt"))
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                module, _, tensor = name.rpartition(".")
                if not name.startswith(HEAD_PREFIX):
                    self._places.setdefault(tail(module), {})[tensor] = opened, name


class PublishedExperts(nn.Module):
    """The routed experts of a layer while the model is loaded. Only biases are tensors of it."""

    def __init__(self, scheme: Scheme, kinds: Mapping[str, WeightKind], experts: Any) -> None:
        """`kinds` are those of the matrices of `experts`, the library's module without memory."""
        super().__init__()
        self.scheme, self.kinds = scheme, kinds
        self._library = (experts,)  # In a tuple, so that it is no submodule.
        for name in kinds:
            self.register_parameter(f"{name}_bias", getattr(experts, f"{name}_bias", None))

    def finished(self, files: TensorFiles, name: str) -> QuantisedExperts:
        """The experts over codes, of the module of this name from the layer on. Raises ValueError if tensors are
        missing or do not fit, and ModelError."""
        (experts,) = self._library
        for bias, parameter in self.named_parameters(recurse=False):
            experts.register_parameter(bias, parameter)
        count, made = int(experts.num_experts), {}
        for matrix, (rows, columns) in matrix_shapes(experts).items():
            kind = self.kinds[matrix]
            if self.scheme.only_experts:
                parts = _stacked(files, name, matrix, kind, (count, rows, columns))
            else:
                parts = _each(files, name, matrix, kind, (count, rows, columns), FORMATS[self.scheme.format])
            made[matrix] = joined(kind, count, rows, columns, parts)
        return QuantisedExperts(experts, made)


def _each(
    files: TensorFiles, name: str, matrix: str, kind: WeightKind, shape: tuple[int, int, int], form: Format
) -> Iterator[Part]:
    experts, rows, columns = shape
    each = rows // len(PARTS[matrix])
    for expert in range(experts):
        for place, part in enumerate(PARTS[matrix]):
            found = (files.read(path, form.names) for path in paths_of(name, expert, part))
            tensors = next((read for read in found if read), {})
            if not any(mark in tensors for mark in form.marks):
                raise ValueError(f"{part} of expert {expert} is missing, or has no codes")
            codes, its = form.read(tensors, kind, (each, columns))
            yield expert * rows + place * each, codes, its


def paths_of(module: str, expert: int, part: str) -> tuple[str, str]:
    """What a layer of an expert may be called in files, from the decoder's layer on: as in the library's module, and as
    in Mixtral's files."""
    return f"{module}.{expert}.{part}", f"{module.replace(*OTHER_PATH)}.{expert}.{OTHER_NAMES[part]}"


def _stacked(
    files: TensorFiles, name: str, matrix: str, kind: WeightKind, shape: tuple[int, int, int]
) -> Iterator[Part]:
    experts, rows, columns = shape
    tensors = files.read(name, (matrix + BLOCKS, matrix + SCALES))
    groups = columns // kind.group
    expected = {BLOCKS: (experts, rows, groups, kind.group // 2), SCALES: (experts, rows, groups)}
    for ending, size in expected.items():
        tensor = tensors.get(matrix + ending)
        if tensor is None or tuple(tensor.shape) != size or tensor.dtype is not torch.uint8:
            seen = "missing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
            raise ValueError(f"{matrix}{ending} should be torch.uint8 {list(size)} and is {seen}")
    for expert in range(experts):
        codes = packed(halves(tensors[matrix + BLOCKS][expert].flatten(1)))
        scales = tensors[matrix + SCALES][expert].contiguous().view(kind.scale_dtype)
        yield expert * rows, {"codes": codes, "scales": scales}, kind
