"""Files between a client and the store: a conversation on its way in or out lies in one until it is complete.

    client --as slowly as it likes--> spool file --at the disk's speed--> store

So a slow client keeps nothing of the store: neither room reserved for what may never arrive, nor state that is leased
while it is sent. Spool files have no name and end with the process. Their bytes are counted as they come.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from parkd.errors import ConversationRefused, QueueFull

MOST_AT_ONCE = 8
"""Spool files at once; one of each key, if there are several keys."""
KEPT_FREE_BYTES = 1 << 30
"""Room on their disk that spool files leave free."""
LOOK_STEP_BYTES = 16 << 20
"""How often room is looked at while a file grows: files exceed their limit by less than this each."""
MIB = 1 << 20


class Spools:
    """Lives on the event loop."""

    def __init__(
        self,
        limit_bytes: int,
        retry_after_s: Callable[[], int],
        *,
        owners: int = 1,
        directory: Path | None = None,
        free_bytes: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free,
    ) -> None:
        """All files together have at most `limit_bytes`, and those of one of several `owners` half of it, but never
        less than one file needs that is alone. They are made in `directory`; None: where the system keeps temporary
        files."""
        self._limit_bytes = limit_bytes
        self._share_bytes = limit_bytes if owners <= 1 else limit_bytes // 2
        self._most_of_one = MOST_AT_ONCE if owners <= 1 else 1
        self._retry_after_s = retry_after_s
        self._directory = directory
        self._free_bytes = free_bytes
        self._open: Counter[str] = Counter()
        self._held: Counter[str] = Counter()

    @property
    def held_bytes(self) -> int:
        return self._held.total()

    def open(self, owner: str) -> Spool:
        """An empty file. Raises QueueFull if there are too many, and ConversationRefused if it cannot be made."""
        if self._open[owner] >= self._most_of_one or self._open.total() >= MOST_AT_ONCE:
            raise QueueFull(
                "Another conversation is being exported or imported. Try again when it is done.",
                retry_after_s=self._retry_after_s(),
            )
        try:
            file = tempfile.TemporaryFile(prefix="parkd-", dir=self._directory)  # noqa: SIM115 - the spool closes it
        except OSError as error:
            raise ConversationRefused(f"There is no place for a temporary file: {error.strerror}.") from error
        self._open[owner] += 1
        return Spool(self, owner, file)

    def check(self, owner: str, held: int, total: int) -> None:
        """Raises QueueFull or ConversationRefused if there is no room for a file that has `held` bytes and is to have
        `total`. Counts nothing."""
        others, own = self.held_bytes - held, self._held[owner] - held
        if (others and others + total > self._limit_bytes) or (own and own + total > self._share_bytes):
            raise QueueFull(
                f"Conversations that are being exported or imported take {self.held_bytes / MIB:.0f} MiB. Try again "
                "when they are done.",
                retry_after_s=self._retry_after_s(),
            )
        free = self._free_bytes(self._directory or Path(tempfile.gettempdir()))
        if free - (total - held) < KEPT_FREE_BYTES:
            raise ConversationRefused(
                f"It needs {total / MIB:.0f} MiB for a temporary file, and {free / MIB:.0f} MiB are free, of which "
                f"{KEPT_FREE_BYTES // MIB} stay free. Make room, or start parkd with another --park-dir or TMPDIR."
            )

    def grow(self, owner: str, held: int, total: int) -> None:
        """Counts for a file that had `held` bytes and is to have `total`. Raises as `check` does."""
        if held // LOOK_STEP_BYTES != total // LOOK_STEP_BYTES or not held:
            self.check(owner, held, total)
        self._held[owner] += total - held

    def shut(self, owner: str, held: int) -> None:
        self._open[owner] -= 1
        self._held[owner] -= held
        if not self._open[owner]:
            del self._open[owner], self._held[owner]


class Spool:
    """One file. A context manager that closes it, unless it is kept for whoever sends it."""

    def __init__(self, spools: Spools, owner: str, file: BinaryIO) -> None:
        self.file = file
        self._spools = spools
        self._owner = owner
        self._bytes = 0
        self._is_open = True
        self._is_kept = False

    @property
    def bytes(self) -> int:
        return self._bytes

    def reach(self, total: int) -> None:
        """Before the file gets so many bytes. Raises QueueFull, ConversationRefused."""
        if total > self._bytes:
            self._spools.grow(self._owner, self._bytes, total)
            self._bytes = total

    def check(self, total: int) -> None:
        """Whether so many bytes would find room now. Counts nothing. Raises QueueFull, ConversationRefused."""
        self._spools.check(self._owner, self._bytes, total)

    def keep(self) -> Self:
        """Whoever has it now closes it."""
        self._is_kept = True
        return self

    def close(self) -> None:
        """May be called again."""
        if self._is_open:
            self._is_open = False
            with contextlib.suppress(OSError):
                self.file.close()
            self._spools.shut(self._owner, self._bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_kept or error is not None:
            self.close()
