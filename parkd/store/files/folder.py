"""One directory and the names in it.

Where the system can open names relative to a descriptor, the directory is held by one: it stays the same directory
whatever becomes of its path. Elsewhere (Windows) names are joined to the path.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

from parkd.private_files import AS_BYTES, FILE_MODE, NO_LINK

HAS_DESCRIPTORS = os.open in os.supports_dir_fd and hasattr(os, "O_DIRECTORY")
WITHOUT_WAITING = getattr(os, "O_NONBLOCK", 0)
"""A pipe in place of a file would wait for its other end."""


class Folder:
    """A directory, which must exist. All methods raise OSError. Files are created for this user alone, and links are
    not followed."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if there is no such directory."""
        self._path = path.absolute()
        self._fd: int | None = None
        if HAS_DESCRIPTORS:
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        elif not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))

    def open(self, name: str, flags: int) -> int:
        """The descriptor of a file."""
        return os.open(self._at(name), flags | NO_LINK | AS_BYTES, FILE_MODE, dir_fd=self._fd)

    def names(self) -> set[str]:
        with os.scandir(self._path if self._fd is None else self._fd) as entries:
            return {entry.name for entry in entries}

    def stat(self, name: str) -> os.stat_result:
        return os.stat(self._at(name), dir_fd=self._fd, follow_symlinks=False)

    def plain_files(self) -> Iterator[tuple[str, os.stat_result]]:
        with os.scandir(self._path if self._fd is None else self._fd) as entries:
            for entry in entries:
                if entry.is_file(follow_symlinks=False):
                    yield entry.name, entry.stat()

    def rename(self, old: str, new: str) -> None:
        """Replaces a file of the new name."""
        os.replace(self._at(old), self._at(new), src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def remove(self, name: str) -> None:
        os.unlink(self._at(name), dir_fd=self._fd)

    @property
    def owner(self) -> int | None:
        """The number of the user that it belongs to; None where users have none (Windows)."""
        if not hasattr(os, "geteuid"):
            return None
        return (self._path.stat() if self._fd is None else os.fstat(self._fd)).st_uid

    def set_time(self, name: str, at_s: float) -> None:
        """Sets the modification time, in seconds since the epoch."""
        os.utime(
            self._at(name), (at_s, at_s), dir_fd=self._fd, follow_symlinks=os.utime not in os.supports_follow_symlinks
        )

    def set_mode(self, mode: int) -> None:
        if self._fd is None:
            self._path.chmod(mode)
        else:
            os.fchmod(self._fd, mode)

    def sync(self) -> None:
        """Returns when all changes of names are on the device. Windows has no such call: there, a crash of the machine
        may undo the newest."""
        if self._fd is not None:
            os.fsync(self._fd)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)

    def _at(self, name: str) -> str:
        return name if self._fd is not None else str(self._path / name)
