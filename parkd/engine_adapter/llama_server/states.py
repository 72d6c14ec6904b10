"""Moves slot files between the server's directory and the store's. The server only takes names in its own directory.

save       DIR/parkd-x.slot  --check-->  a size, for which the store makes room  --rename-->  the store's path
restore    the store's path  --hard link, check-->  DIR/parkd-y.slot  --restore, remove
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from parkd.engine_adapter.llama_server.client import UpstreamClient, UpstreamRefused
from parkd.engine_adapter.llama_server.probe import new_file_name
from parkd.engine_adapter.llama_server.slot_file import Ids, file_checksum, file_tokens
from parkd.engine_adapter.llama_server.slots import Slot
from parkd.errors import EngineFailure, RestoreFailed
from parkd.private_files import FILE_MODE


@dataclass(frozen=True, slots=True)
class SavedFile:
    """A checked slot file in the server's directory that nobody has taken yet."""

    path: Path
    bytes: int
    checksum: int

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)


class SlotFiles:
    """Stateless; runs on the engine's thread."""

    def __init__(self, client: UpstreamClient, slot_dir: Path) -> None:
        self._client = client
        self._slot_dir = slot_dir

    def save(self, slot: Slot, *, whole: bool) -> SavedFile:
        """Saves the slot's state to a file in the server's directory, and checks it. The caller moves or removes it.

        With `whole`, refuses a state with unknown tokens at its end, which is useless if it cannot be cut. Raises
        EngineFailure, after which there is no file.
        """
        path = self._slot_dir / new_file_name()
        try:
            with _moves():
                answer = self._client.save(slot.id, path.name)
                size = path.stat().st_size
                if answer.bytes != size or not size:
                    raise EngineFailure("The llama-server's slot file is incomplete. Is its disk full?")
                self._compare(slot, path, whole=whole)
                checksum = file_checksum(path)
                path.chmod(FILE_MODE)
        except BaseException:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            raise
        return SavedFile(path, size, checksum)

    def move(self, saved: SavedFile, target: Path) -> None:
        """Moves a saved file to the store's path. Raises EngineFailure, after which there is nothing at `target`."""
        with _moves():
            saved.path.rename(target)

    def restore(self, slot: Slot, source: Path, checksum: int, tokens: int) -> Ids:
        """Restores a file of at least `tokens` tokens into the slot. Returns all of its ids. The file is not changed.

        The file is checked before the server reads it. Raises RestoreFailed, UpstreamFailed and OSError, after which
        the slot's content is unknown.
        """
        with self._on_the_way() as path:
            os.link(source, path)
            if file_checksum(path) != checksum:
                raise RestoreFailed("The parked state's checksum does not match its bytes.")
            ids = file_tokens(path)
            if ids is None or len(ids) < tokens:
                raise RestoreFailed(f"The slot file does not hold the {tokens} tokens that were parked.")
            answer = self._client.restore(slot.id, path.name)
            if answer.tokens != len(ids) or answer.bytes != source.stat().st_size:
                raise RestoreFailed(f"The llama-server restored {answer.tokens} tokens of {len(ids)}.")
        return ids

    def ids(self, slot: Slot) -> Ids | None:
        """The ids of all tokens in the slot, read from a temporary slot file; None if the file has an unknown format.
        Raises OSError, UpstreamFailed."""
        with self._on_the_way() as path:
            self._client.save(slot.id, path.name)
            return file_tokens(path)

    def _compare(self, slot: Slot, path: Path, *, whole: bool) -> None:
        """Raises EngineFailure unless the file has the slot's ids."""
        ids = file_tokens(path)
        if ids is None or not np.array_equal(ids[: slot.position], slot.ids):
            slot.forget()
            raise EngineFailure(
                "The llama-server's slot holds other tokens than were read: parkd must be its only client."
            )
        slot.is_exact = len(ids) == slot.position
        if whole and not slot.is_exact:
            raise EngineFailure(
                "The llama-server generated tokens that parkd does not know, so its state cannot be resumed."
            )

    @contextmanager
    def _on_the_way(self) -> Iterator[Path]:
        """A temporary path in the server's directory; its file is removed at the end."""
        path = self._slot_dir / new_file_name()
        try:
            yield path
        finally:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


@contextmanager
def _moves() -> Iterator[None]:
    """Translates what saving or moving a slot file raises to EngineFailure."""
    try:
        yield
    except UpstreamRefused as refused:
        raise EngineFailure(f"The llama-server could not save its slot: {refused.text} Is its disk full?") from refused
    except OSError as error:
        raise EngineFailure(
            f"The llama-server's slot file could not be moved to its place: {error.strerror}. Its --slot-save-path "
            f"and --park-dir must be on one file system."
        ) from error
