"""The folder that keeps converted models and digests of weight files between starts.

CACHE/models/KEY/          a complete conversion: renamed to this name once everything in it is on disk
CACHE/models/KEY.part/     a conversion in progress, or left by a killed process and removed by the next conversion
CACHE/models/KEY.lock      locked during a conversion, so that two processes do not write the same folder
CACHE/digests/NAME.json    digest of one weight file, with the file's path, size, mtime and inode at that time
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path

import portalocker

from parkd.errors import ModelError
from parkd.private_files import private_opener

DIGEST_BYTES = 16
READ_BYTES = 4 << 20
MANIFEST = "conversion.json"
Progress = Callable[[str, float], None]
"""Called with (current activity, fraction done from 0 to 1)."""
Look = list[str | int]
"""Path, size, mtime and inode of a file: while they stay, so does its content."""


class ModelCache:
    """Converted models and digests in one folder. Methods raise ModelError if the folder cannot be used."""

    def __init__(self, folder: Path) -> None:
        self._models = folder / "models"
        self._digests = folder / "digests"
        try:
            for made in (self._models, self._digests):
                made.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ModelError(f"The cache folder {folder} cannot be created: {error}.") from error

    def converted(self, key: str, convert: Callable[[Path], None], progress: Progress | None = None) -> Path:
        """The folder for `key`. If there is none yet, or its files are not those that were written, calls `convert`
        with an empty folder to fill. Blocks while another process converts the same key."""
        target = self._models / key
        if self._is_whole(target, progress):
            return target
        part = self._models / f"{key}.part"
        try:
            with _locked(self._models / f"{key}.lock"):
                if self._is_whole(target, progress):
                    return target
                for torn in (target, part):
                    if torn.exists():
                        shutil.rmtree(torn)
                part.mkdir()
                try:
                    convert(part)
                    digests = _seal(part, progress)
                    part.rename(target)
                    _sync(self._models)
                except BaseException:
                    shutil.rmtree(part, ignore_errors=True)
                    raise
                for name, digest in digests.items():  # so that the next start need not read them again
                    self._note(target / name, digest)
        except OSError as error:
            raise ModelError(f"The converted model cannot be stored in {self._models}: {error}.") from error
        return target

    def file_digest(self, path: Path, progress: Progress | None = None) -> bytes:
        """16 bytes of blake2b over the file's content, cached by path, size, mtime and inode.

        Raises ModelError if the file cannot be read.
        """
        path = path.resolve()
        try:
            look = _look(path)
            known = _noted_digest(self._note_of(path), look)
            if known is not None:
                return known
            digest = _content_digest(path, progress)
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error}.") from error
        self._note(path, digest, look)
        return digest

    def _note_of(self, path: Path) -> Path:
        return self._digests / f"{blake2b(str(path).encode(), digest_size=DIGEST_BYTES).hexdigest()}.json"

    def _note(self, path: Path, digest: bytes, look: Look | None = None) -> None:
        """Caches the digest of a file that looked so when it was read, by default as it looks now."""
        path = path.resolve()
        note = self._note_of(path)
        draft = note.with_suffix(f".{os.getpid()}.part")
        with suppress(OSError):  # If it cannot be cached, the next start takes longer.
            draft.unlink(missing_ok=True)  # what is left of it, or a link to something else
            with draft.open("x") as file:
                file.write(json.dumps({"look": look or _look(path), "digest": digest.hex()}))
            draft.replace(note)

    def _is_whole(self, folder: Path, progress: Progress | None) -> bool:
        """Whether a folder has the files that were written into it, with their contents."""
        try:
            digests = json.loads((folder / MANIFEST).read_text())["digests"]
            return bool(digests) and all(
                self.file_digest(folder / name, progress).hex() == digest for name, digest in digests.items()
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ModelError):
            return False


def _look(path: Path) -> Look:
    seen = path.stat()
    return [str(path), seen.st_size, seen.st_mtime_ns, seen.st_ino]


def _noted_digest(note: Path, look: Look) -> bytes | None:
    try:
        noted = json.loads(note.read_text())
        digest = bytes.fromhex(noted["digest"])
        return digest if noted["look"] == look and len(digest) == DIGEST_BYTES else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # Missing or damaged: the digest is computed again.


def _content_digest(path: Path, progress: Progress | None) -> bytes:
    size = path.stat().st_size
    hasher = blake2b(digest_size=DIGEST_BYTES)
    done = 0
    with path.open("rb") as file:
        while chunk := file.read(READ_BYTES):
            hasher.update(chunk)
            done += len(chunk)
            if progress is not None:
                progress(f"Checking {path.name}", min(1.0, done / max(size, 1)))
    return hasher.digest()


def _seal(folder: Path, progress: Progress | None) -> Mapping[str, bytes]:
    """Writes the digests of all files, by name, to the manifest, by which a complete folder is recognised, and syncs
    everything. Returns them."""
    digests = {file.name: _content_digest(file, progress) for file in folder.iterdir()}
    shown = {name: digest.hex() for name, digest in digests.items()}
    (folder / MANIFEST).write_text(json.dumps({"digests": shown}, sort_keys=True))
    for file in folder.iterdir():
        _sync(file)
    _sync(folder)
    return digests


def _sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the device. Windows has no such call for folders."""
    if path.is_dir() and sys.platform == "win32":
        return
    number = os.open(path, os.O_RDWR if path.is_file() else os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "a", opener=private_opener) as file:
        try:
            portalocker.lock(file, portalocker.LOCK_EX)
        except portalocker.LockException as error:
            raise OSError(f"{path.name} cannot be locked: {error}") from error
        yield
