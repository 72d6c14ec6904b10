"""Reads the entries and tensor names of a GGUF file with the library's reader, without reading tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.integrations.gguf import GgufHeader, load_gguf_state_dict, read_gguf_metadata

from parkd.errors import ModelError

_STRING_LISTS = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges")


@dataclass(frozen=True, slots=True)
class GgufMetadata:
    """The metadata of a GGUF file."""

    path: Path
    entries: Mapping[str, Any]
    """By the file's own names. Of string lists only tokens and merges are kept; others are replaced by their length."""
    tensor_names: tuple[str, ...]

    @property
    def kind(self) -> str:
        """The architecture, by llama.cpp's name."""
        return str(self.entries["general.architecture"])

    def of_kind(self, name: str, default: Any = None) -> Any:
        """An entry of the architecture, by its name without the prefix."""
        return self.entries.get(f"{self.kind}.{name}", default)

    def tensor(self, name: str) -> Any:
        """The values of an unquantised tensor."""
        with named_damage(self.path):
            return load_gguf_state_dict(GgufHeader.from_file(str(self.path)))[name][...]


def read_metadata(path: Path) -> GgufMetadata:
    """Reads the metadata. Raises ModelError for a file that is damaged, truncated or not GGUF."""
    with named_damage(path):
        entries, names = read_gguf_metadata(str(path), _STRING_LISTS)
    return GgufMetadata(path, entries, names)


@contextmanager
def named_damage(path: Path) -> Iterator[None]:
    """Turns the library's errors about `path` into ModelError."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        # The library does not check what it reads, so a damaged file can raise any kind of error.
        raise ModelError(f"{path} is damaged, truncated or not a GGUF file that can be read: {error}") from error
