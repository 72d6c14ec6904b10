"""Writes safetensors files one tensor at a time, so that memory holds one tensor and not the model.

    header length (uint64) | header (JSON: name -> dtype, shape, byte range) | tensor bytes

The format is that of the safetensors specification; the library's own writer wants all tensors at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

HEADER_ALIGNMENT = 8
_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor to come."""

    name: str
    shape: tuple[int, ...]


class WeightFileWriter:
    """Writes the planned tensors in their order; `finish` makes the file durable. All have one dtype."""

    def __init__(self, path: Path, tensors: Sequence[PlannedTensor], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._planned = iter(tensors)
        self._file = path.open("xb")
        header = _header(tensors, dtype)
        self._file.write(len(header).to_bytes(8, "little") + header)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def write(self, values: torch.Tensor) -> None:
        """Appends the next planned tensor, cast to the file's dtype."""
        planned = next(self._planned)
        if tuple(values.shape) != planned.shape:
            raise ValueError(f"{planned.name} was planned as {planned.shape}, not {tuple(values.shape)}")
        flat = values.to(self._dtype).contiguous().reshape(-1).view(torch.uint8)
        self._file.write(flat.numpy().data)

    def finish(self) -> None:
        if next(self._planned, None) is not None:
            raise ValueError("a planned tensor was not written")
        self._file.flush()
        os.fsync(self._file.fileno())


def _header(tensors: Sequence[PlannedTensor], dtype: torch.dtype) -> bytes:
    entries: dict[str, Mapping[str, object]] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        nbytes = dtype.itemsize
        for size in tensor.shape:
            nbytes *= size
        entries[tensor.name] = {
            "dtype": _DTYPE_NAMES[dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + nbytes],
        }
        offset += nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % HEADER_ALIGNMENT)
