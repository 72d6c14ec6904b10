"""Remembered answers in a file, so that they outlive the server. Beside the parked conversations; never needed.

    header   magic 8 bytes, version u32
    record   length u32 | checksum 16 bytes, blake2b of the body | body
    body     prefix 16 bytes | count u32 | ids count x i32 | what was said, as JSON

Numbers are little-endian. Records are appended; a torn or damaged one ends what is read, and is cut off. Losing the
file costs some reading, so nothing is synced and an error switches the file off.
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
"""In the park directory."""
MAGIC = b"PARKDANS"
VERSION = 1
FILE_MODE = 0o600
_HEADER = struct.Struct("<8sI")
_RECORD = struct.Struct("<I16s")
_BODY = struct.Struct("<16sI")
GROWTH = 2
"""The file is written anew when it has grown to so many times the memory's bound."""


class AnswerFile:
    """One writer at a time: `open` before the first answer, then the thread behind the replies."""

    def __init__(self, path: Path, limit_bytes: int) -> None:
        self._path = path
        self._limit_bytes = limit_bytes
        self._file: IO[bytes] | None = None
        self._size = 0

    def open(self, memory: OutputMemory) -> int:
        """Reads what is there into `memory` and goes on behind it. Returns the answers read."""
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
        """Writes what is remembered, and nothing else, in the file's place. Raises OSError."""
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
        log.warning("answers are not kept in %s any more: %s", self._path, error)
        self.close()


def _record(answer: RememberedAnswer) -> bytes:
    said = answer.said
    told = orjson.dumps([list(said.runs), said.reasoning, [list(call) for call in said.calls]])
    ids = np.ascontiguousarray(answer.ids, dtype="<i4")
    body = _BODY.pack(answer.prefix, len(ids)) + ids.tobytes() + told
    return _RECORD.pack(len(body), _checksum(body)) + body


def _records(data: bytes) -> Iterator[tuple[RememberedAnswer, int]]:
    """Each good record with the place behind it, up to the first that is not."""
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
