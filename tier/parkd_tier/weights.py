"""The digest of a model's weights, by the content of its files."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

from parkd.errors import ConfigError, ModelError
from parkd.model_files.cache import DIGEST_BYTES, ModelCache, Progress

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
"""What engines read weights from, the first kind that is there."""


def weights_digest(model: Path, cache: ModelCache, progress: Progress | None = None) -> str:
    """32 hexadecimal digits over names and contents of the weight files of a folder, or over one file. Raises
    ConfigError if there are none or one cannot be read."""
    files = [model] if model.is_file() else _weight_files(model)
    hasher = blake2b(digest_size=DIGEST_BYTES)
    try:
        for file in files:
            hasher.update(file.name.encode() + b"\0" + cache.file_digest(file, progress))
    except ModelError as error:
        raise ConfigError(error.message) from error
    return hasher.hexdigest()


def _weight_files(folder: Path) -> list[Path]:
    for suffix in WEIGHT_SUFFIXES:
        found = sorted(folder.glob(f"*{suffix}"))
        if found:
            return found
    raise ConfigError(
        f"parkd-tier finds no weights in {folder} and cannot tell which model state belongs to: give the engine a "
        f"folder with *.safetensors files, or leave parkd-tier out"
    )
