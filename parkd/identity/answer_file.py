"""Keeps remembered answers in a file in the park directory, so that they survive a restart. Optional.

    header   magic 8 bytes, version u32
    record   length u32 | checksum 16 bytes, blake2b of the body | body
    body     prefix 16 bytes | count u32 | ids count x i32 | what was said, as JSON

Numbers are little-endian. Records are appended. Reading stops at the first torn or damaged record, and the file is cut
there. If the file is lost, some prompts are only read again, so nothing is synced and an error disables the file.
"""

from __future__ import annotations

import contextlib
import logging
import struct
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import IO

import numpy as np
import orjson

from parkd.identity.output_memory import OutputMemory, RememberedAnswer, Said
from parkd.types import HASH_BYTES

log = logging.getLogger(__name__)

NAME = "answers"
"""The file's name in the park directory."""
MAGIC = b"PARKDANS"
VERSION = 1
FILE_MODE = 0o600
_HEADER = struct.Struct("<8sI")
_RECORD = struct.Struct("<I16s")
_BODY = struct.Struct("<16sI")
GROWTH = 2
"""The file is rewritten once it is this many times as large as the memory's limit."""


class AnswerFile:
    """The file and its writer. Not thread-safe: `open` is called before the first answer, everything else from the
    background thread."""

    def __init__(self, path: Path, limit_bytes: int) -> None:
        self._path = path
        self._limit_bytes = limit_bytes
        self._file: IO[bytes] | None = None
        self._size = 0

    def open(self, memory: OutputMemory) -> int:
        """Reads the file into `memory`, and opens it for appending. Returns the number of answers read."""
        count, good = 0, 0
        try:
            data = self._path.read_bytes() if self._path.exists() else b""
            for answer, end in _records(data):
                memory.keep(answer)
                count, good = count + 1, end
            if good and good <= GROWTH * self._limit_bytes:
                self._append_to(good)
            else:
                self.rewrite(memory)
        except OSError as error:
            self._give_up(error)
        return count

    def append(self, answer: RememberedAnswer, memory: OutputMemory) -> None:
        """Appends an answer. Rewrites the file from `memory` if it is too large."""
        if self._file is None:
            return
        try:
            record = _record(answer)
            self._file.write(record)
            self._file.flush()
            self._size += len(record)
            if self._size > GROWTH * self._limit_bytes:
                self.rewrite(memory)
        except OSError as error:
            self._give_up(error)

    def rewrite(self, memory: OutputMemory) -> None:
        """Replaces the file by one with the answers in `memory` alone. Raises OSError."""
        self.close()
        part = self._path.with_suffix(".part")
        part.unlink(missing_ok=True)
        part.touch(FILE_MODE, exist_ok=False)
        with part.open("wb") as file:
            file.write(_HEADER.pack(MAGIC, VERSION))
            for answer in memory.all():
                file.write(_record(answer))
        part.replace(self._path)
        self._append_to(self._path.stat().st_size)

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        self._file = None

    def _append_to(self, size: int) -> None:
        self._file = self._path.open("r+b")
        self._file.truncate(size)
        self._file.seek(size)
        self._size = size

    def _give_up(self, error: OSError) -> None:
        log.warning("answers are no longer saved to %s: %s", self._path, error)
        self.close()


def _record(answer: RememberedAnswer) -> bytes:
    said = answer.said
    told = orjson.dumps([list(said.runs), said.reasoning, [list(call) for call in said.calls]])
    ids = np.ascontiguousarray(answer.ids, dtype="<i4")
    body = _BODY.pack(answer.prefix, len(ids)) + ids.tobytes() + told
    return _RECORD.pack(len(body), _checksum(body)) + body


def _records(data: bytes) -> Iterator[tuple[RememberedAnswer, int]]:
    """Yields each valid record and the offset of its end, up to the first invalid one."""
    if len(data) < _HEADER.size or _HEADER.unpack_from(data) != (MAGIC, VERSION):
        return
    place = _HEADER.size
    while place + _RECORD.size <= len(data):
        length, checksum = _RECORD.unpack_from(data, place)
        body = data[place + _RECORD.size : place + _RECORD.size + length]
        if len(body) < length or length < _BODY.size or _checksum(body) != checksum:
            return
        place += _RECORD.size + length
        prefix, count = _BODY.unpack_from(body)
        ids = np.frombuffer(body, "<i4", count, _BODY.size).astype(np.int32)
        runs, reasoning, calls = orjson.loads(body[_BODY.size + 4 * count :])
        said = Said(tuple(runs), reasoning, tuple((name, arguments) for name, arguments in calls))
        yield RememberedAnswer(prefix, ids, said), place


def _checksum(body: bytes) -> bytes:
    return blake2b(body, digest_size=HASH_BYTES, person=b"parkd-answers").digest()
