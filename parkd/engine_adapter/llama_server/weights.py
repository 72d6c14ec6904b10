"""Identifies the server's model by its file, if parkd can read it, and finds out what kinds of state it has.

Format: ggml, `docs/gguf.md`.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

DIGESTS_NAME = "llama-server-digests.json"
_PART_BYTES = 16 * 1024 * 1024
_SHARD = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")
_ARCHITECTURE = "general.architecture"
_FIXED_KEYS = (".ssm.", ".wkv.", ".shortconv.", ".attention.sliding_window", ".kda.", ".token_shift_count")
"""Substrings of metadata keys that only models with recurrent or windowed state have."""
_MOST_KEYS = 65536
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_UNSIGNED = {0: "<B", 2: "<H", 4: "<I", 10: "<Q", 5: "<i", 11: "<q"}
_STRING, _ARRAY = 8, 9

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts from a GGUF file's metadata."""

    architecture: str
    has_fixed_state: bool
    """Some of the state is valid at one position only: windows, recurrent or convolution state."""


def model_facts(path: Path) -> ModelFacts | None:
    """The facts; None if the file cannot be read or is not a GGUF file."""
    architecture, fixed = "", False
    try:
        with path.open("rb") as file:
            for name, value in _metadata(file):
                if name == _ARCHITECTURE:
                    architecture = str(value)
                elif any(part in name for part in _FIXED_KEYS) and value != 0:
                    fixed = True
    except (OSError, struct.error, ValueError, KeyError):
        return None
    return ModelFacts(architecture, fixed)


def weights_digest(path: Path, cache_dir: Path, progress: Progress | None = None) -> bytes | None:
    """16 bytes over the file, or over all files of a split model; None if one cannot be read.

    Each file is read once; digests are cached in `cache_dir` by path, size, mtime and inode.
    """
    try:
        files = _shards(path)
        known = _load(cache_dir / DIGESTS_NAME)
        whole = xxhash.xxh3_128()
        for file in files:
            status = file.stat()
            key = f"{file.resolve()}|{status.st_size}|{status.st_mtime_ns}|{status.st_ino}"
            if key not in known:
                known[key] = _digest(file, status.st_size, progress)
                _store(cache_dir, known)
            whole.update(bytes.fromhex(known[key]))
    except (OSError, ValueError):
        return None
    return whole.digest()


def _shards(path: Path) -> list[Path]:
    match = _SHARD.search(path.name)
    if match is None:
        return [path]
    head = path.name[: match.start()]
    return [path.with_name(f"{head}-{i + 1:05d}-of-{match[1]}.gguf") for i in range(int(match[1]))]


def _digest(path: Path, size: int, progress: Progress | None) -> str:
    hasher, done = xxhash.xxh3_128(), 0
    with path.open("rb", buffering=0) as file:
        while part := file.read(_PART_BYTES):
            hasher.update(part)
            done += len(part)
            if progress is not None:
                progress("Computing the digest of the weights", done / max(size, 1))
    return hasher.hexdigest()


def _load(path: Path) -> dict[str, str]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {key: value for key, value in document.items() if isinstance(value, str)}


def _store(cache_dir: Path, known: dict[str, str]) -> None:
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        part = cache_dir / f"{DIGESTS_NAME}.part"
        part.unlink(missing_ok=True)  # what is left of it, or a link to something else
        with part.open("x", encoding="utf-8") as file:
            file.write(json.dumps(known))
        part.replace(cache_dir / DIGESTS_NAME)
    except OSError:
        pass  # The next start reads the file again.


def _metadata(file: BinaryIO) -> Iterator[tuple[str, Any]]:
    """Keys and values of the header. Only integers and strings are read; any other value, such as an array, is skipped
    and yields 1. Raises ValueError, struct.error or KeyError for a damaged file."""
    if file.read(4) != b"GGUF":
        raise ValueError("no GGUF file")
    file.read(4)
    _tensors, count = struct.unpack("<QQ", file.read(16))
    if count > _MOST_KEYS:
        raise ValueError("too many keys")
    for _ in range(count):
        name = _text(file)
        yield name, _value(file, _number(file, "<I"))


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _text(file)
    if kind == _ARRAY:
        inner, count = struct.unpack("<IQ", file.read(12))
        if inner == _STRING:
            for _ in range(count):
                file.seek(_number(file, "<Q"), 1)
        else:
            file.seek(_SIZES[inner] * count, 1)
        return 1
    if kind in _UNSIGNED:
        return _number(file, _UNSIGNED[kind])
    file.seek(_SIZES[kind], 1)
    return 1


def _number(file: BinaryIO, form: str) -> int:
    return int(struct.unpack(form, file.read(struct.calcsize(form)))[0])


def _text(file: BinaryIO) -> str:
    return file.read(_number(file, "<Q")).decode("utf-8", "replace")
