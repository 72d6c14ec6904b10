"""Reads the entries and the list of tensors of a GGUF file, and single tensors that are not quantised.

    magic, version | counts | key, type, value ... | name, dimensions, type, offset ... | padding | tensors

The format is that of ggml's `docs/gguf.md`, versions 2 and 3, little-endian. Neither torch nor gguf's own reader, which
takes seconds for a vocabulary, is needed.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from parkd.errors import ModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_NUMBERS = MappingProxyType({0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"})
"""Types of values that have a fixed size, by their number in the file, in the letters of `struct`."""
_STRING_LISTS = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges")
_ALIGNMENT = 32
"""Of tensors, unless the file says otherwise."""
PLAIN = MappingProxyType({0: "F32", 1: "F16", 30: "BF16", 28: "F64"})
"""Types of tensors that are not quantised, by their number in the file."""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor is in its file."""

    shape: tuple[int, ...]
    kind: int
    """The number of its type."""
    offset: int
    """In bytes, from the beginning of the file."""


@dataclass(frozen=True, slots=True)
class GgufMetadata:
    """The metadata of a GGUF file."""

    path: Path
    entries: Mapping[str, Any]
    """By the file's own names. Of string lists only tokens and merges are kept; others are replaced by their length."""
    tensors: Mapping[str, TensorPlace] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The architecture, by llama.cpp's name."""
        return str(self.entries["general.architecture"])

    def of_kind(self, name: str, default: Any = None) -> Any:
        """An entry of the architecture, by its name without the prefix."""
        return self.entries.get(f"{self.kind}.{name}", default)

    def tensor(self, name: str) -> npt.NDArray[np.floating[Any]]:
        """The values of a tensor that is not quantised; bfloat16 as float32. Raises ModelError."""
        with named_damage(self.path):
            place = self.tensors[name]
            if place.kind not in PLAIN:
                raise ModelError(
                    f"{self.path}: {name} is quantised; only {', '.join(PLAIN.values())} can be read here."
                )
            with self.path.open("rb") as file:
                file.seek(place.offset)
                width = {"F64": 8, "F32": 4}.get(PLAIN[place.kind], 2)
                size = int(np.prod(place.shape, dtype=np.int64)) * width
                return plain_numbers(file.read(size), PLAIN[place.kind], place.shape)


def plain_numbers(data: bytes, kind: str, shape: tuple[int, ...]) -> npt.NDArray[np.floating[Any]]:
    """Numbers of a type of `PLAIN` from their bytes, little-endian; bfloat16 as float32, whose upper half it is. Raises
    ValueError."""
    if kind == "BF16":
        halves = np.frombuffer(data, dtype="<u2").astype(np.uint32)
        return (halves << 16).view(np.float32).reshape(shape)
    dtype = {"F64": np.float64, "F32": np.float32, "F16": np.float16}[kind]
    return np.frombuffer(data, dtype=np.dtype(dtype).newbyteorder("<")).astype(dtype).reshape(shape)


def read_metadata(path: Path) -> GgufMetadata:
    """Reads the metadata. Raises ModelError for a file that is damaged, truncated or not GGUF."""
    with named_damage(path), path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        reader = _Reader(content)
        tensor_count, entry_count = reader.head()
        entries = {}
        for _ in range(entry_count):
            key = reader.text()
            entries[key] = reader.value(keeps_texts=key in _STRING_LISTS)
        if "general.architecture" not in entries:
            raise ValueError("it names no architecture")
        places = [reader.tensor() for _ in range(tensor_count)]
        alignment = int(entries.get("general.alignment", _ALIGNMENT))
        begin = -(-reader.at // alignment) * alignment
        tensors = {name: TensorPlace(shape, kind, begin + offset) for name, shape, kind, offset in places}
    return GgufMetadata(path, entries, tensors)


class _Reader:
    """Reads forwards. Raises struct.error beyond the end, and ValueError for what is not known."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self.at = 0

    def head(self) -> tuple[int, int]:
        """How many tensors and entries there are."""
        if self._content[:4] != _MAGIC:
            raise ValueError("it does not begin as a GGUF file")
        self.at = 4
        version, tensors, entries = self._take("IQQ")
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version}")
        return tensors, entries

    def text(self) -> str:
        return self._bytes().decode()

    def value(self, *, keeps_texts: bool) -> Any:
        (kind,) = self._take("I")
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            (value,) = self._take(_letter(kind))
            return value
        kind, count = self._take("IQ")
        if kind != _STRING:
            return list(self._take(f"{count}{_letter(kind)}"))
        if keeps_texts:
            return [self.text() for _ in range(count)]
        for _ in range(count):
            self._bytes()
        return count

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape with the slowest dimension first, type, and offset behind the lists."""
        name = self.text()
        (dimensions,) = self._take("I")
        shape = self._take(f"{dimensions}Q")
        kind, offset = self._take("IQ")
        return name, tuple(reversed(shape)), kind, offset

    def _take(self, letters: str) -> tuple[Any, ...]:
        letters = "<" + letters
        found = struct.unpack_from(letters, self._content, self.at)
        self.at += struct.calcsize(letters)
        return found

    def _bytes(self) -> bytes:
        (size,) = self._take("Q")
        start, self.at = self.at, self.at + size
        if self.at > len(self._content):
            raise ValueError("it ends inside a text")
        return self._content[start : self.at]


def _letter(kind: int) -> str:
    if kind not in _NUMBERS:
        raise ValueError(f"it has a value of the unknown type {kind}")
    return _NUMBERS[kind]


@contextmanager
def named_damage(path: Path) -> Iterator[None]:
    """Turns the errors of readers about `path` into ModelError."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        # A damaged file can raise any kind of error.
        raise ModelError(f"{path} is damaged, truncated or not a GGUF file that can be read: {error}") from error
