"""Reads the container of GGUF files, versions 2 and 3, little-endian.

    magic | version | tensor count | entry count | entries (key, type, value) | tensor infos | padding | tensor data

Source of the format: ggml's `docs/gguf.md`. Only the container is read here; what the entries mean for a model is in
`gguf_convert.py`. The tensors stay memory-mapped until they are asked for.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from engine.load_errors import ModelLoadError

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
MAX_COUNT = 1 << 28
"""No honest file holds more entries, tensors, array elements or string bytes; a larger number is damage."""

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies in the file."""

    name: str
    shape: tuple[int, ...]
    """Row-major, as in torch: the file lists the dimensions the other way round."""
    kind: GGMLQuantizationType
    offset: int
    """From the start of the file."""
    nbytes: int


class GgufFile:
    """A GGUF file, open for reading. Raises ModelLoadError for what is damaged or not supported."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        with path.open("rb") as file:
            try:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError:
                raise ModelLoadError(f"{path} is empty.") from None
        self._at = 0
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError, OverflowError) as error:
            self.close()
            raise ModelLoadError(f"{path} is cut short or damaged: {error}.") from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._map.close()

    def dequantized(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor's numbers in float32, in a new array of the tensor's shape."""
        tensor = self.tensors[name]
        # A copy of the packed bytes, so that no array keeps the map from being closed.
        packed = np.frombuffer(self._map[tensor.offset : tensor.offset + tensor.nbytes], dtype=np.uint8)
        if tensor.kind == GGMLQuantizationType.F32:
            return packed.view(np.float32).reshape(tensor.shape).copy()
        if tensor.kind == GGMLQuantizationType.F16:
            return packed.view(np.float16).astype(np.float32).reshape(tensor.shape)
        block, block_bytes = GGML_QUANT_SIZES[tensor.kind]
        rows = packed.reshape(*tensor.shape[:-1], tensor.shape[-1] // block * block_bytes)
        try:
            values = dequantize(rows, tensor.kind)
        except NotImplementedError:
            raise ModelLoadError(
                f"{self.path} stores {name} as {tensor.kind.name}, which cannot be read. Use another quantisation."
            ) from None
        return np.ascontiguousarray(values, dtype=np.float32).reshape(tensor.shape)

    def _read_header(self) -> None:
        if self._map[:4] != MAGIC:
            raise ModelLoadError(f"{self.path} is not a GGUF file.")
        self._at = 4
        version = self._scalar("I")
        if version not in (2, 3):
            raise ModelLoadError(f"{self.path} is GGUF version {version}; versions 2 and 3 can be read.")
        tensor_count, entry_count = self._count(), self._count()
        for _ in range(entry_count):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"))
        infos = [self._tensor_info() for _ in range(tensor_count)]
        alignment = int(self.metadata.get("general.alignment", DEFAULT_ALIGNMENT))
        if alignment <= 0:
            raise ModelLoadError(f"{self.path} is damaged: its alignment is {alignment}.")
        data = -(-self._at // alignment) * alignment
        for name, shape, number, offset in infos:
            self.tensors[name] = self._placed(name, shape, number, data + offset)

    def _placed(self, name: str, shape: tuple[int, ...], number: int, offset: int) -> GgufTensor:
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise ModelLoadError(f"{self.path} stores {name} in an unknown format ({number}).") from None
        block, block_bytes = GGML_QUANT_SIZES[kind]
        elements = int(np.prod(shape, dtype=np.int64))
        if not shape or shape[-1] % block:
            raise ModelLoadError(f"{self.path} is damaged: {name} has the shape {shape}.")
        nbytes = elements // block * block_bytes
        if offset + nbytes > len(self._map):
            raise ModelLoadError(f"{self.path} is cut short: {name} ends behind the end of the file.")
        return GgufTensor(name, shape, kind, offset, nbytes)

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dimensions = [self._count() for _ in range(self._scalar("I"))]
        return name, tuple(reversed(dimensions)), self._scalar("I"), self._scalar("Q")

    def _scalar(self, code: str) -> Any:
        layout = struct.Struct("<" + code)
        (value,) = layout.unpack_from(self._map, self._at)
        self._at += layout.size
        return value

    def _count(self) -> int:
        count: int = self._scalar("Q")
        if count > MAX_COUNT:
            raise ModelLoadError(f"{self.path} is damaged: it claims {count} elements.")
        return count

    def _string(self) -> str:
        length = self._count()
        if self._at + length > len(self._map):
            raise ModelLoadError(f"{self.path} is cut short.")
        text = self._map[self._at : self._at + length].decode("utf-8")
        self._at += length
        return text

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise ModelLoadError(f"{self.path} is damaged: it holds a value of kind {kind}.")
        return self._scalar(_SCALARS[kind])

    def _array(self) -> list[Any]:
        kind, count = self._scalar("I"), self._count()
        if kind in _SCALARS:
            layout = struct.Struct(f"<{count}{_SCALARS[kind]}")
            values = list(layout.unpack_from(self._map, self._at))
            self._at += layout.size
            return values
        return [self._value(kind) for _ in range(count)]
