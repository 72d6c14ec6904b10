"""The entries and tensor names of a GGUF file, through the library's own reader; no tensor is touched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.integrations.gguf import GgufHeader, load_gguf_state_dict, read_gguf_metadata

from engine.errors import EngineError, ModelLoadError

_STRING_LISTS = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges")


@dataclass(frozen=True, slots=True)
class GgufMetadata:
    """What a GGUF file says of itself."""

    path: Path
    entries: Mapping[str, Any]
    """As named in the file. Of lists of strings only the tokens and merges are kept; of others, their length."""
    tensor_names: tuple[str, ...]

    @property
    def kind(self) -> str:
        """The architecture, in llama.cpp's words."""
        return str(self.entries["general.architecture"])

    def of_kind(self, name: str, default: Any = None) -> Any:
        """An entry of the architecture, named without its prefix."""
        return self.entries.get(f"{self.kind}.{name}", default)

    def tensor(self, name: str) -> Any:
        """An unquantised tensor's values."""
        with named_damage(self.path):
            return load_gguf_state_dict(GgufHeader.from_file(str(self.path)))[name][...]


def read_metadata(path: Path) -> GgufMetadata:
    """Raises ModelLoadError for a file that is damaged, cut short or no GGUF file."""
    with named_damage(path):
        entries, names = read_gguf_metadata(str(path), _STRING_LISTS)
    return GgufMetadata(path, entries, names)


@contextmanager
def named_damage(path: Path) -> Iterator[None]:
    """Turns what the library trips over inside `path` into ModelLoadError."""
    try:
        yield
    except EngineError:
        raise
    except Exception as error:
        # The library does not check what it reads: damage surfaces as any kind of error.
        raise ModelLoadError(f"{path} is damaged, cut short or no GGUF file that can be read: {error}") from error
