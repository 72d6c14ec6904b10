"""Files of the disk tier. In the store, only this module touches real files.

    FileSystem        one flat directory of files
    ├── PosixFs       a directory that stays (--park-dir), locked by one process
    └── UnlinkedFs    files without a name: they are gone with the process, however it ends

Every failure is an OSError, so that a test's file system can raise what a real one would.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import resource
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from parkd.errors import ConfigError
from parkd.state import Bytes

GRAIN_BYTES = 4096
"""Parts begin at multiples of this in a file, so that direct I/O can move them without an extra copy."""
FILE_MODE = 0o600
DIRECTORY_MODE = 0o700
LOCK_NAME = "lock"
MARKER_NAME = "parkd-directory"
"""The file by which a park directory is recognised. Those of earlier versions have none."""
MARKER_TEXT = b"This directory belongs to parkd (--park-dir), which removes files in it. See docs/FORMAT.md.\n"
_STATE_NAME = re.compile(r"[0-9a-f]{16}\.extent|[0-9a-f]{32}\.manifest(\.tmp)?")
_OTHER_NAME = re.compile(r"lock|split\.json(\.new)?|answers(\.part)?")
MOST_VECTORS = 512
"""Most buffers in one call; the system's limit is 1024."""


def allow_most_files() -> None:
    """Raises the limit of open files as far as this process may. The usual 1,024 are too few for the connections of a
    busy server, or for files without a name."""
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


class PosixFile:
    """A file descriptor. Uses direct I/O if the file system supports it and the buffers are aligned."""

    def __init__(self, fd: int, *, direct: bool) -> None:
        self._fd = fd
        self._direct = direct and self._set_direct(on=True)

    def write(self, offset: int, buffers: Sequence[Bytes]) -> None:
        rest = [buffer for buffer in buffers if buffer.nbytes]
        self._choose_mode(offset, rest)
        while rest:
            written = os.pwritev(self._fd, [buffer.data for buffer in rest[:MOST_VECTORS]], offset)
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
            count = os.preadv(self._fd, [buffer.data for buffer in rest[:MOST_VECTORS]], offset)
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
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | flag if on else flags & ~flag)
        except OSError:
            return False  # the file system does not support direct I/O
        return bool(flag)


class PosixFs:
    """A directory and its lock. Made by `open_directory`."""

    def __init__(self, directory_fd: int, lock_fd: int, *, direct: bool, is_new: bool = False) -> None:
        self._directory = directory_fd
        self._lock = lock_fd
        self._direct = direct
        self.is_new = is_new
        """The directory was created for this."""

    def sizes(self) -> dict[str, int]:
        with os.scandir(self._directory) as entries:
            return {entry.name: entry.stat().st_size for entry in entries if entry.is_file(follow_symlinks=False)}

    def create(self, name: str) -> PosixFile:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        return PosixFile(os.open(name, flags, FILE_MODE, dir_fd=self._directory), direct=self._direct)

    def open(self, name: str) -> PosixFile:
        return PosixFile(os.open(name, _READ_FLAGS, dir_fd=self._directory), direct=self._direct)

    def load(self, name: str) -> bytes:
        with open(os.open(name, _READ_FLAGS, dir_fd=self._directory), "rb") as file:  # noqa: PTH123 - a descriptor
            return file.read()

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new, src_dir_fd=self._directory, dst_dir_fd=self._directory)

    def remove(self, name: str) -> None:
        os.unlink(name, dir_fd=self._directory)

    def times(self) -> dict[str, float]:
        with os.scandir(self._directory) as entries:
            return {entry.name: entry.stat().st_mtime for entry in entries if entry.is_file(follow_symlinks=False)}

    def mark(self, name: str, at_s: float) -> None:
        os.utime(name, (at_s, at_s), dir_fd=self._directory, follow_symlinks=False)

    def sync(self) -> None:
        os.fsync(self._directory)

    def close(self) -> None:
        os.close(self._directory)
        os.close(self._lock)  # and with it the lock


_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW


def open_directory(path: Path, *, direct: bool = True, creates: bool = True) -> PosixFs:
    """Opens and locks a park directory: one that has parkd's marker, one of an earlier version, or an empty one.

    `creates`: makes a directory that is missing, and takes one that is empty. Changes nothing in a directory before it
    is recognised and locked. Raises ConfigError if it cannot be used.
    """
    try:
        is_new = creates and _make(path)
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"--park-dir {path} cannot be used: {error.strerror}") from error
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, directory)
        try:
            _check_ours(directory, path, may_be_empty=creates)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            lock = os.open(LOCK_NAME, flags, FILE_MODE, dir_fd=directory)
            undo.callback(os.close, lock)
            _check_plain(os.fstat(lock), LOCK_NAME, path)
            _take_lock(lock, path)
            _mark_ours(directory, path)
            os.fchmod(directory, DIRECTORY_MODE)
        except OSError as error:
            raise ConfigError(f"--park-dir {path} cannot be used: {error.strerror}") from error
        undo.pop_all()
    return PosixFs(directory, lock, direct=direct, is_new=is_new)


def _make(path: Path) -> bool:
    """Makes a directory, and those above it. False if it is there already. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(mode=DIRECTORY_MODE)
    except FileExistsError:
        return False
    return True


def _check_ours(directory: int, path: Path, *, may_be_empty: bool) -> None:
    """Raises ConfigError unless the directory is a park directory, or may become one. Only looks."""
    names = set(os.listdir(directory))
    for name in names & {LOCK_NAME, MARKER_NAME}:
        _check_plain(os.stat(name, dir_fd=directory, follow_symlinks=False), name, path)
    if MARKER_NAME in names or (not names and may_be_empty):
        return
    # Earlier versions left no marker: known by their lock, and state beside it, or by nothing that is not theirs.
    has_state = any(_STATE_NAME.fullmatch(name) for name in names)
    if LOCK_NAME in names and (has_state or all(_OTHER_NAME.fullmatch(name) for name in names)):
        return
    if not names:
        raise ConfigError(f"--park-dir {path} is empty: nothing was parked there")
    raise ConfigError(
        f"--park-dir {path} holds files that are not parkd's, and no file {MARKER_NAME}: name an empty or a new "
        f"directory. If it is a park directory that lost that file, create an empty one of that name in it"
    )


def _check_plain(seen: os.stat_result, name: str, path: Path) -> None:
    """Raises ConfigError unless it is a plain file of one name, so that nothing elsewhere is written through it."""
    if not stat.S_ISREG(seen.st_mode) or seen.st_nlink != 1:
        raise ConfigError(
            f"--park-dir {path}: {name} in it is a link or no plain file, so it is not parkd's: name another directory"
        )


def _mark_ours(directory: int, path: Path) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    marker = os.open(MARKER_NAME, flags, FILE_MODE, dir_fd=directory)
    try:
        seen = os.fstat(marker)
        _check_plain(seen, MARKER_NAME, path)
        if not seen.st_size:
            os.pwrite(marker, MARKER_TEXT, 0)
    finally:
        os.close(marker)


def _take_lock(lock: int, path: Path) -> None:
    """Raises ConfigError, which names the process that holds the lock."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
        raise ConfigError(
            f"--park-dir {path} is in use by another parkd (process {holder}): stop that one or name another directory"
        ) from None
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)


def aligned_zeros(size: int) -> Bytes:
    """`[size]` zero bytes, aligned to a page."""
    return np.frombuffer(mmap.mmap(-1, max(size, 1)), dtype=np.uint8)[:size]


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

    def create(self, name: str) -> PosixFile:
        if name in self._files:
            raise FileExistsError(errno.EEXIST, "there is such a file", name)
        fd, path = tempfile.mkstemp(prefix="parkd-", dir=self._folder)
        Path(path).unlink()
        self._files[name] = fd
        # opened anew through the descriptor: modes are of an open file, and each user of this one chooses its own
        return _Volatile(_reopen(fd, os.O_WRONLY), direct=self._direct)

    def open(self, name: str) -> PosixFile:
        return PosixFile(_reopen(self._fd(name), os.O_RDONLY), direct=self._direct)

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


class _Volatile(PosixFile):
    def sync(self) -> None:
        """Nothing to do."""


def _reopen(fd: int, flags: int) -> int:
    return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)
