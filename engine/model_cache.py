"""The folder that keeps converted models and digests of weight files between starts.

CACHE/models/KEY/          a complete conversion: renamed to this name once everything in it is on disk
CACHE/models/KEY.part/     a conversion in progress, or left by a killed process and removed by the next conversion
CACHE/models/KEY.lock      locked during a conversion, so that two processes do not write the same folder
CACHE/digests/NAME.json    digest of one weight file, with the file's path, size, mtime and inode at that time
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path

from engine.errors import ModelLoadError

DIGEST_BYTES = 16
READ_BYTES = 4 << 20
MANIFEST = "conversion.json"
Progress = Callable[[str, float], None]
"""Called with (current activity, fraction done from 0 to 1)."""


class ModelCache:
    """Converted models and digests in one folder. Methods raise ModelLoadError if the folder cannot be used."""

    def __init__(self, folder: Path) -> None:
        self._models = folder / "models"
        self._digests = folder / "digests"
        try:
            for made in (self._models, self._digests):
                made.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ModelLoadError(f"The cache folder {folder} cannot be made: {error}.") from error

    def converted(self, key: str, convert: Callable[[Path], None]) -> Path:
        """The folder for `key`. If there is none yet, calls `convert` with an empty folder to fill. Blocks while
        another process converts the same key."""
        target = self._models / key
        if _is_whole(target):
            return target
        part = self._models / f"{key}.part"
        try:
            with _locked(self._models / f"{key}.lock"):
                if _is_whole(target):
                    return target
                for torn in (target, part):
                    if torn.exists():
                        shutil.rmtree(torn)
                part.mkdir()
                try:
                    convert(part)
                    _seal(part)
                    part.rename(target)
                    _sync(self._models)
                except BaseException:
                    shutil.rmtree(part, ignore_errors=True)
                    raise
        except OSError as error:
            raise ModelLoadError(f"The converted model cannot be kept in {self._models}: {error}.") from error
        return target

    def file_digest(self, path: Path, progress: Progress | None = None) -> bytes:
        """16 bytes of blake2b over the file's content, cached by path, size, mtime and inode.

        Raises ModelLoadError if the file cannot be read.
        """
        path = path.resolve()
        try:
            seen = path.stat()
            look: list[str | int] = [str(path), seen.st_size, seen.st_mtime_ns, seen.st_ino]
            note = self._digests / f"{blake2b(str(path).encode(), digest_size=DIGEST_BYTES).hexdigest()}.json"
            known = _noted_digest(note, look)
            if known is not None:
                return known
            digest = _content_digest(path, seen.st_size, progress)
        except OSError as error:
            raise ModelLoadError(f"{path} cannot be read: {error}.") from error
        draft = note.with_suffix(f".{os.getpid()}.part")
        with suppress(OSError):  # If it cannot be cached, the next start takes longer.
            draft.write_text(json.dumps({"look": look, "digest": digest.hex()}))
            draft.replace(note)
        return digest


def _noted_digest(note: Path, look: list[str | int]) -> bytes | None:
    try:
        noted = json.loads(note.read_text())
        digest = bytes.fromhex(noted["digest"])
        return digest if noted["look"] == look and len(digest) == DIGEST_BYTES else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # Missing or damaged: the digest is computed again.


def _content_digest(path: Path, size: int, progress: Progress | None) -> bytes:
    hasher = blake2b(digest_size=DIGEST_BYTES)
    done = 0
    with path.open("rb") as file:
        while chunk := file.read(READ_BYTES):
            hasher.update(chunk)
            done += len(chunk)
            if progress is not None:
                progress(f"Checking {path.name}", min(1.0, done / max(size, 1)))
    return hasher.digest()


def _seal(folder: Path) -> None:
    """Writes the sizes of all files to the manifest, by which a complete folder is recognised, and syncs everything."""
    sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
    (folder / MANIFEST).write_text(json.dumps({"sizes": sizes}, sort_keys=True))
    for file in folder.iterdir():
        _sync(file)
    _sync(folder)


def _is_whole(folder: Path) -> bool:
    try:
        sizes = json.loads((folder / MANIFEST).read_text())["sizes"]
        return bool(sizes) and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _sync(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
