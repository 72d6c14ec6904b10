"""What the disk tier asks of files. In the store, only this package touches real ones.

    FileSystem        one flat directory of files
    ├── DirectoryFs   a directory that stays (--park-dir), locked by one process; `park_directory` opens it
    └── UnlinkedFs    files without a name: they are gone with the process, however it ends

Every failure is an OSError, so that a test's file system can raise what a real one would. What only some systems have
is looked up where it is used: without it, files are slower, not wrong.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from parkd.state import Bytes
from parkd.store.files.folder import Folder

try:
    import fcntl
    import resource
except ImportError:  # Windows
    fcntl, resource = None, None  # type: ignore[assignment]

GRAIN_BYTES = 4096
"""Parts begin at multiples of this in a file, so that direct I/O can move them without an extra copy."""
MOST_VECTORS = 512
"""Most buffers in one call; the system's limit is 1024."""


def allow_most_files() -> None:
    """Raises the limit of open files as far as this process may. The usual 1,024 are too few for the connections of a
    busy server, or for files without a name."""
    if resource is None:
        return  # Windows, where files and connections are counted otherwise
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class File(Protocol):
    """An open file."""

    def write(self, offset: int, buffers: Sequence[Bytes]) -> None:
        """Writes all buffers, one after the other, from `offset` on. Raises OSError."""

    def read(self, offset: int, buffers: Sequence[Bytes]) -> None:
        """Fills all buffers from `offset` on. Raises OSError, with ENODATA if the file ends before."""

    def sync(self) -> None:
        """Returns when the content is on the device. Raises OSError, after which the content on the device is
        unknown."""

    def drop_cached(self) -> None:
        """Drops what the system has cached of the file, so that it is read from the device."""

    def close(self) -> None: ...


class FileSystem(Protocol):
    """One flat directory."""

    def sizes(self) -> dict[str, int]:
        """The size of every file in bytes, by name."""

    def create(self, name: str) -> File:
        """Creates a file for writing. Raises FileExistsError."""

    def open(self, name: str) -> File:
        """Opens a file for reading. Raises FileNotFoundError."""

    def load(self, name: str) -> bytes:
        """The whole content of a small file."""

    def rename(self, old: str, new: str) -> None:
        """Renames a file, and atomically replaces one of the new name."""

    def remove(self, name: str) -> None: ...

    def times(self) -> dict[str, float]:
        """The modification time of every file in seconds since the epoch, by name. `mark` may have set it."""

    def mark(self, name: str, at_s: float) -> None:
        """Sets the modification time, without a sync: after a crash it may be the older one."""

    def sync(self) -> None:
        """Returns when all names that were created, renamed and removed so far are on the device."""

    def close(self) -> None: ...


def _is_aligned(offset: int, buffers: Sequence[Bytes]) -> bool:
    return offset % GRAIN_BYTES == 0 and all(
        buffer.nbytes % GRAIN_BYTES == 0 and buffer.__array_interface__["data"][0] % GRAIN_BYTES == 0
        for buffer in buffers
    )


def _rest(buffers: list[Bytes], done: int) -> list[Bytes]:
    """The buffers without their first `done` bytes."""
    rest = []
    for buffer in buffers:
        if done < buffer.nbytes:
            rest.append(buffer[done:])
        done = max(0, done - buffer.nbytes)
    return rest


class Calls(Protocol):
    """How the system moves bytes between buffers and a place in an open file."""

    def write(self, buffers: Sequence[memoryview], offset: int) -> int:
        """Writes what it can, and returns the number of bytes. Raises OSError."""

    def read(self, buffers: Sequence[memoryview], offset: int) -> int:
        """Reads what it can, and returns the number of bytes, 0 at the end. Raises OSError."""


class PlacedCalls:
    """Many buffers at a place, in one call."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(self._fd, buffers, offset)

    def read(self, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(self._fd, buffers, offset)


class SeekingCalls:
    """One buffer where the file stands (Windows). Calls from several threads wait for each other."""

    def __init__(self, fd: int) -> None:
        self._file: Any = os.fdopen(fd, "r+b", buffering=0, closefd=False)
        self._lock = threading.Lock()

    def write(self, buffers: Sequence[memoryview], offset: int) -> int:
        with self._lock:
            self._file.seek(offset)
            return int(self._file.write(buffers[0]))

    def read(self, buffers: Sequence[memoryview], offset: int) -> int:
        with self._lock:
            self._file.seek(offset)
            return int(self._file.readinto(buffers[0]))


def calls_of(fd: int) -> Calls:
    return PlacedCalls(fd) if hasattr(os, "pwritev") and hasattr(os, "preadv") else SeekingCalls(fd)


READING = os.O_RDONLY if fcntl is not None else os.O_RDWR
"""Windows syncs only files that may be written."""


class OpenFile:
    """A file descriptor. Uses direct I/O if the file system supports it and the buffers are aligned."""

    def __init__(self, fd: int, *, direct: bool) -> None:
        self._fd = fd
        self._calls = calls_of(fd)
        self._direct = direct and self._set_direct(on=True)

    def write(self, offset: int, buffers: Sequence[Bytes]) -> None:
        rest = [buffer for buffer in buffers if buffer.nbytes]
        self._choose_mode(offset, rest)
        while rest:
            written = self._calls.write([buffer.data for buffer in rest[:MOST_VECTORS]], offset)
            if written == 0:
                raise OSError(errno.EIO, "nothing was written")
            offset += written
            rest = _rest(rest, written)
            if rest:
                self._choose_mode(offset, rest)

    def read(self, offset: int, buffers: Sequence[Bytes]) -> None:
        rest = [buffer for buffer in buffers if buffer.nbytes]
        self._choose_mode(offset, rest)
        while rest:
            count = self._calls.read([buffer.data for buffer in rest[:MOST_VECTORS]], offset)
            if count == 0:
                raise OSError(errno.ENODATA, "the file ends too early")
            offset += count
            rest = _rest(rest, count)
            if rest:
                self._choose_mode(offset, rest)

    def sync(self) -> None:
        os.fsync(self._fd)

    def drop_cached(self) -> None:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        os.close(self._fd)

    def _choose_mode(self, offset: int, buffers: Sequence[Bytes]) -> None:
        if self._direct and not _is_aligned(offset, buffers):
            # Once off it stays off: mixing direct and buffered I/O in one file is slower than either.
            self._set_direct(on=False)
            self._direct = False

    def _set_direct(self, *, on: bool) -> bool:
        flag = getattr(os, "O_DIRECT", 0)
        if not flag:
            return False
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | flag if on else flags & ~flag)
        except OSError:
            return False  # the file system does not support direct I/O
        return True


class DirectoryFs:
    """A directory and its lock. Made by `open_directory`."""

    def __init__(self, folder: Folder, lock: IO[bytes], *, direct: bool, is_new: bool = False) -> None:
        self._folder = folder
        self._lock = lock
        self._direct = direct
        self.is_new = is_new
        """The directory was created for this."""
        self.on_close: Callable[[], None] | None = None

    def sizes(self) -> dict[str, int]:
        return {name: seen.st_size for name, seen in self._folder.plain_files()}

    def create(self, name: str) -> OpenFile:
        return OpenFile(self._folder.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL), direct=self._direct)

    def open(self, name: str) -> OpenFile:
        return OpenFile(self._folder.open(name, READING), direct=self._direct)

    def load(self, name: str) -> bytes:
        with open(self._folder.open(name, READING), "rb") as file:  # noqa: PTH123 - a descriptor
            return file.read()

    def rename(self, old: str, new: str) -> None:
        self._folder.rename(old, new)

    def remove(self, name: str) -> None:
        self._folder.remove(name)

    def times(self) -> dict[str, float]:
        return {name: seen.st_mtime for name, seen in self._folder.plain_files()}

    def mark(self, name: str, at_s: float) -> None:
        self._folder.set_time(name, at_s)

    def sync(self) -> None:
        self._folder.sync()

    def close(self) -> None:
        self._folder.close()
        self._lock.close()  # and with it the lock
        if self.on_close is not None:
            self.on_close()


def aligned_zeros(size: int) -> Bytes:
    """`[size]` zero bytes, aligned to a page."""
    return np.frombuffer(mmap.mmap(-1, max(size, 1)), dtype=np.uint8)[:size]


OPEN_FILES = Path("/proc/self/fd")
"""Where Linux lets a process open its own files anew, names or not."""


class UnlinkedFs:
    """Unlinked files, whose names exist in this process only. Syncs do nothing, since no file survives the process."""

    def __init__(self, folder: Path | None = None, *, direct: bool = True) -> None:
        """Raises the limit of open files, since each file stays open."""
        allow_most_files()
        self._folder = folder
        self._direct = direct
        self._files: dict[str, int] = {}

    def sizes(self) -> dict[str, int]:
        return {name: os.fstat(fd).st_size for name, fd in self._files.items()}

    def create(self, name: str) -> OpenFile:
        if name in self._files:
            raise FileExistsError(errno.EEXIST, "there is such a file", name)
        fd, path = tempfile.mkstemp(prefix="parkd-", dir=self._folder)
        Path(path).unlink()
        self._files[name] = fd
        # opened anew through the descriptor: modes are of an open file, and each user of this one chooses its own
        return _Volatile(_reopen(fd, os.O_WRONLY), direct=self._direct)

    def open(self, name: str) -> OpenFile:
        return OpenFile(_reopen(self._fd(name), os.O_RDONLY), direct=self._direct)

    def load(self, name: str) -> bytes:
        fd = self._fd(name)
        return os.pread(fd, os.fstat(fd).st_size, 0)

    def rename(self, old: str, new: str) -> None:
        fd = self._fd(old)
        if new in self._files:
            self.remove(new)
        del self._files[old]
        self._files[new] = fd

    def remove(self, name: str) -> None:
        os.close(self._fd(name))
        del self._files[name]

    def times(self) -> dict[str, float]:
        return {}

    def mark(self, name: str, at_s: float) -> None:
        """Nothing to do: nobody opens these again."""

    def sync(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()

    def _fd(self, name: str) -> int:
        try:
            return self._files[name]
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, "there is no such file", name) from None


class _Volatile(OpenFile):
    def sync(self) -> None:
        """Nothing to do."""


def _reopen(fd: int, flags: int) -> int:
    return os.open(f"{OPEN_FILES}/{fd}", flags)
