"""Reads and checks the slot files that a llama-server writes.

    "qsgg" | u32 version | u32 n | n x i32 | state of the KV cache, opaque
                                   +-- ids, or since builds with images: -1, 1, count, ids, 0

The server does not check what it restores: it accepts files with changed bytes or with other tokens. So parkd compares
the checksum and the ids of a file.
Source of the format: llama.cpp, `llama_context::state_seq_save_file` and `server_tokens`.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

MAGIC = b"qsgg"
_HEADER = struct.Struct("<4sII")
_WRAPPED = -1
_WRAPPED_VERSION = 1
_HASHED_BYTES = 4 * 1024 * 1024

Ids = npt.NDArray[np.int64]


def file_tokens(path: Path) -> Ids | None:
    """The ids `[n]` whose state the file holds; None if its format is unknown. Raises OSError."""
    with path.open("rb") as file:
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size:
            return None
        magic, _version, count = _HEADER.unpack(header)
        if magic != MAGIC or count * 4 > path.stat().st_size:
            return None
        raw = file.read(count * 4)
    if len(raw) < count * 4:
        return None
    return _ids(np.frombuffer(raw, dtype="<i4").astype(np.int64))


def _ids(numbers: Ids) -> Ids | None:
    if not len(numbers) or numbers[0] >= 0:
        return numbers if not len(numbers) or int(numbers.min()) >= 0 else None
    if len(numbers) < 4 or numbers[0] != _WRAPPED or numbers[1] != _WRAPPED_VERSION:
        return None
    count = int(numbers[2])
    ids, behind = numbers[3 : 3 + count], numbers[3 + count :]
    # The ids are followed by the number of images. A conversation with images is refused: ids alone do not describe it.
    if len(ids) != count or len(behind) != 1 or behind[0] or (count and int(ids.min()) < 0):
        return None
    return ids


def file_checksum(path: Path) -> int:
    """XXH3-64 of the whole file. Raises OSError."""
    hasher = xxhash.xxh3_64()
    with path.open("rb", buffering=0) as file:
        while part := file.read(_HASHED_BYTES):
            hasher.update(part)
    return int(hasher.intdigest())
