"""Opens park directories: recognises them, so that no other directory is harmed, and locks them.

Also opens the files of a disk tier that ends with the process (`open_temporary`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import tempfile
from pathlib import Path
from typing import IO

import portalocker

from parkd.errors import ConfigError
from parkd.store.files.folder import WITHOUT_WAITING, Folder
from parkd.store.files.fs import OPEN_FILES, DirectoryFs, FileSystem, UnlinkedFs

DIRECTORY_MODE = 0o700
LOCK_NAME = "lock"
MARKER_NAME = "parkd-directory"
"""The file by which a park directory is recognised. Those of earlier versions have none."""
MARKER_TEXT = b"This directory belongs to parkd (--park-dir), which removes files in it. See docs/FORMAT.md.\n"
_STATE_NAME = re.compile(r"[0-9a-f]{16}\.extent|[0-9a-f]{32}\.manifest(\.tmp)?")
_OTHER_NAME = re.compile(r"lock|split\.json(\.new)?|answers(\.part)?|[0-9a-f]{32}\.layout(\.new)?")


def open_directory(path: Path, *, direct: bool = True, creates: bool = True) -> DirectoryFs:
    """Opens and locks a park directory: one that has parkd's marker, one of an earlier version, or an empty one.

    `creates`: makes a directory that is missing, and takes one that is empty. Changes nothing in a directory before it
    is recognised and locked. Raises ConfigError if it cannot be used.
    """
    try:
        is_new = creates and _make(path)
        folder = Folder(path)
    except OSError as error:
        raise _unusable(path, error) from error
    with contextlib.ExitStack() as undo:
        undo.callback(folder.close)
        try:
            _check_owner(folder.owner, path)
            _check_ours(folder, path, may_be_empty=creates)
            lock = _opened(folder, LOCK_NAME)
            undo.callback(lock.close)
            _check_plain(os.fstat(lock.fileno()), LOCK_NAME, path)
            _take_lock(lock, path)
            _mark_ours(folder, path)
            folder.set_mode(DIRECTORY_MODE)
        except OSError as error:
            raise _unusable(path, error) from error
        undo.pop_all()
    return DirectoryFs(folder, lock, direct=direct, is_new=is_new)


def open_temporary() -> FileSystem:
    """Files that end with the process. Where the system has none without a name (Windows, macOS), they are in a new
    temporary directory, which closing removes: a process that is killed leaves it behind."""
    if OPEN_FILES.is_dir():
        return UnlinkedFs()
    holder = tempfile.TemporaryDirectory(prefix="parkd-", ignore_cleanup_errors=True)
    files = open_directory(Path(holder.name))
    files.on_close = holder.cleanup
    return files


def _make(path: Path) -> bool:
    """Makes a directory, and those above it. False if it is there already. Raises OSError, and ConfigError where a link
    leads to nothing: what it was meant to lead to may come back, such as a disk that is not mounted."""
    for each in (*reversed(path.parents), path):
        if each.is_symlink() and not each.exists():
            raise ConfigError(
                f"--park-dir {path}: {each} is a link to {each.readlink()}, where nothing is. Create that directory, "
                f"or name another"
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(mode=DIRECTORY_MODE)
    except FileExistsError:
        return False
    return True


def _opened(folder: Folder, name: str) -> IO[bytes]:
    """Opens a file to read and write, and creates it. Raises OSError."""
    return os.fdopen(folder.open(name, os.O_RDWR | os.O_CREAT | WITHOUT_WAITING), "r+b", buffering=0)


def _check_ours(folder: Folder, path: Path, *, may_be_empty: bool) -> None:
    """Raises ConfigError unless the directory is a park directory, or may become one. Only looks."""
    names = folder.names()
    for name in names & {LOCK_NAME, MARKER_NAME}:
        _check_plain(folder.stat(name), name, path)
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


def _unusable(path: Path, error: OSError) -> ConfigError:
    hint = ""
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        hint = ". This user must own it, or its parent if it is to be created, and be able to write there"
    return ConfigError(f"--park-dir {path} cannot be used: {error.strerror}{hint}")


def _check_owner(owner: int | None, path: Path) -> None:
    """Raises ConfigError for a directory of another user: who owns it reads and changes what is parked, whatever mode
    the files have. The superuser may use any."""
    if owner is not None and os.geteuid() not in (0, owner):
        raise ConfigError(
            f"--park-dir {path} belongs to another user ({owner}, this one is {os.geteuid()}), who could change what "
            f"is parked there: name a directory of this user's own"
        )


def _check_plain(seen: os.stat_result, name: str, path: Path) -> None:
    """Raises ConfigError unless it is a plain file of one name, so that nothing elsewhere is written through it."""
    if not stat.S_ISREG(seen.st_mode) or seen.st_nlink != 1:
        raise ConfigError(
            f"--park-dir {path}: {name} in it is a link or no plain file, so it is not parkd's: name another directory"
        )


def _mark_ours(folder: Folder, path: Path) -> None:
    with _opened(folder, MARKER_NAME) as marker:
        seen = os.fstat(marker.fileno())
        _check_plain(seen, MARKER_NAME, path)
        if not seen.st_size:
            marker.write(MARKER_TEXT)


def _take_lock(lock: IO[bytes], path: Path) -> None:
    """Raises ConfigError, which names the process that holds the lock."""
    try:
        portalocker.lock(lock, portalocker.LOCK_EX | portalocker.LOCK_NB)
    except portalocker.AlreadyLocked:
        raise ConfigError(
            f"--park-dir {path} is in use by another parkd (process {_holder(lock)}): stop that one or name another "
            f"directory"
        ) from None
    except portalocker.LockException as error:
        raise ConfigError(f"--park-dir {path} cannot be locked: {error}") from error
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n".encode())


def _holder(lock: IO[bytes]) -> str:
    """The number of the process that holds the lock. Windows lets nobody read it."""
    try:
        return lock.read(32).decode(errors="replace").strip() or "unknown"
    except OSError:
        return "unknown"
