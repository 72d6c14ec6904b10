"""The file system of a disk tier without a park directory: files without names, which end with the process."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from parkd.store.fs import PosixFile, allow_most_files


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
