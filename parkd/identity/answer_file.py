"""Keeps remembered answers in a file in the park directory, so that they survive a restart. Optional.

    header   magic 8 bytes, version u32
    record   length u32 | checksum 16 bytes, blake2b of the body | body
    body     prefix 16 bytes | count u32 | ids count x i32 | what was said and the key's namespace, as JSON

Numbers are little-endian. Records are appended. Reading stops at the first torn or damaged record, and the file is cut
there. If the file is lost, some prompts are only read again, so nothing is synced and an error disables the file.
Version 1 had no namespaces; it is read, and written anew. Links are not followed.
"""

from __future__ import annotations

import contextlib
import logging
import struct
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import IO

import numpy as np
import orjson

from parkd.identity.output_memory import OutputMemory, RememberedAnswer, Said
from parkd.private_files import private_opener
from parkd.types import HASH_BYTES

log = logging.getLogger(__name__)

NAME = "answers"
"""The file's name in the park directory."""
MAGIC = b"PARKDANS"
VERSION = 2
READABLE = (1, 2)
"""Versions that are read."""
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
            data = _content(self._path)
            for answer, end in _records(data):
                memory.keep(answer)
                count, good = count + 1, end
            if good and good <= GROWTH * self._limit_bytes and _version(data) == VERSION:
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

    def renew(self, memory: OutputMemory) -> None:
        """Rewrites the file because answers were forgotten."""
        if self._file is None:
            return
        try:
            self.rewrite(memory)
        except OSError as error:
            self._give_up(error)

    def rewrite(self, memory: OutputMemory) -> None:
        """Replaces the file by one with the answers in `memory` alone. Raises OSError."""
        self.close()
        self._append_to(_write(self._path, memory.all()))

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        self._file = None

    def _append_to(self, size: int) -> None:
        self._file = open(self._path, "r+b", opener=private_opener)  # noqa: SIM115 - closed by `close`
        self._file.truncate(size)
        self._file.seek(size)
        self._size = size

    def _give_up(self, error: OSError) -> None:
        log.warning("answers are no longer saved to %s: %s", self._path, error)
        self.close()


def forget(path: Path, chosen: Callable[[RememberedAnswer], bool]) -> int:
    """Removes the `chosen` answers from a file that no server uses; the file too, if no answer is left. Returns their
    number. Raises OSError."""
    answers = [answer for answer, _ in _records(_content(path))]
    kept = [answer for answer in answers if not chosen(answer)]
    if len(kept) < len(answers):
        _write(path, kept)
    if not kept:
        path.unlink(missing_ok=True)
    return len(answers) - len(kept)


def _write(path: Path, answers: Iterable[RememberedAnswer]) -> int:
    """Replaces the file by one with these answers. Returns its bytes. Raises OSError."""
    part = path.with_suffix(".part")
    part.unlink(missing_ok=True)
    with open(part, "xb", opener=private_opener) as file:
        file.write(_HEADER.pack(MAGIC, VERSION))
        file.writelines(_record(answer) for answer in answers)
        size = file.tell()
    part.replace(path)
    return size


def _content(path: Path) -> bytes:
    """Empty if there is no file, or a link in its place. Raises OSError."""
    if path.is_symlink() or not path.exists():
        return b""
    with open(path, "rb", opener=private_opener) as file:
        return file.read()


def _version(data: bytes) -> int:
    """0 if it is none of our files, or of an unknown version."""
    if len(data) < _HEADER.size:
        return 0
    magic, version = _HEADER.unpack_from(data)
    return version if magic == MAGIC and version in READABLE else 0


def _record(answer: RememberedAnswer) -> bytes:
    said = answer.said
    told = orjson.dumps([list(said.runs), said.reasoning, [list(call) for call in said.calls], answer.namespace])
    ids = np.ascontiguousarray(answer.ids, dtype="<i4")
    body = _BODY.pack(answer.prefix, len(ids)) + ids.tobytes() + told
    return _RECORD.pack(len(body), _checksum(body)) + body


def _records(data: bytes) -> Iterator[tuple[RememberedAnswer, int]]:
    """Yields each valid record and the offset of its end, up to the first invalid one."""
    if not _version(data):
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
        runs, reasoning, calls, *namespace = orjson.loads(body[_BODY.size + 4 * count :])
        said = Said(tuple(runs), reasoning, tuple((name, arguments) for name, arguments in calls))
        yield RememberedAnswer(prefix, ids, said, namespace[0] if namespace else None), place


def _checksum(body: bytes) -> bytes:
    return blake2b(body, digest_size=HASH_BYTES, person=b"parkd-answers").digest()
