"""Limits the memory of all request bodies together, each from its first byte until its answer is sent.

A waiting turn keeps its messages, and its images twice: as sent, and decoded from base64. The limit on the number of
waiting turns does not limit their size, so bytes are counted too.

    charge --take piece by piece--> [held] --release--> free

The values made from a body (objects, text, ids) take many times its size, and the allocator keeps that memory after
they are freed. So shortly after a large body, the allocator is asked to return it to the system.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import TracebackType

import anyio
import anyio.abc
import anyio.to_thread

from parkd.errors import QueueFull

MIB = 1 << 20
LARGE_BODY_BYTES = MIB
"""A body of at least this size is parsed in a worker thread, so that the event loop is not blocked, and memory is
returned to the system after it."""
RETURN_DELAY_S = 1.0
"""Time from the release of a large body to the return of memory. References to it are gone by then, and bodies that are
released together need only one return."""


class BodyRoom:
    """Counts the bytes of all bodies that are held now. Lives on the event loop."""

    def __init__(
        self,
        limit_bytes: int,
        retry_after_s: Callable[[], int],
        on_large_gone: Callable[[], None] = lambda: None,
        *,
        owners: int = 1,
    ) -> None:
        """`retry_after_s` estimates when there will be room again. `on_large_gone` is called when a large body is
        released. If there are several `owners`, one of them holds at most half of the limit."""
        self._limit_bytes = limit_bytes
        self._share_bytes = limit_bytes if owners <= 1 else limit_bytes // 2
        self._held_by: Counter[str] = Counter()
        self._retry_after_s = retry_after_s
        self._on_large_gone = on_large_gone
        self.held_bytes = 0

    def charge(self, owner: str = "") -> Charge:
        """A charge for a new body of this owner, of which nothing has been read yet."""
        return Charge(self, owner)

    def check(self, count: int, own_bytes: int, owner: str) -> None:
        """Raises QueueFull if `count` more bytes of a body that already holds `own_bytes` would exceed the limit or the
        owner's share; but never for the only body, of all or of the owner: each body has its own limit."""
        others_bytes, owners_bytes = self.held_bytes - own_bytes, self._held_by[owner] - own_bytes
        if owners_bytes and owners_bytes + own_bytes + count > self._share_bytes:
            raise self._full(f"Waiting requests of this key hold {owners_bytes / MIB:.0f} MiB", self._share_bytes)
        if others_bytes and others_bytes + own_bytes + count > self._limit_bytes:
            raise self._full(f"Waiting requests hold {others_bytes / MIB:.0f} MiB", self._limit_bytes)

    def take(self, count: int, own_bytes: int, owner: str) -> None:
        """Charges `count` more bytes to a body. Raises QueueFull as `check` does."""
        self.check(count, own_bytes, owner)
        self.held_bytes += count
        self._held_by[owner] += count

    def _full(self, what: str, limit_bytes: int) -> QueueFull:
        of = "" if limit_bytes == self._limit_bytes else " for one key"
        return QueueFull(
            f"{what}, and with this one they would exceed --max-queue-mib ({limit_bytes // MIB}{of}). Try again later, "
            "or send smaller images.",
            retry_after_s=self._retry_after_s(),
        )

    def give(self, count: int, owner: str) -> None:
        self.held_bytes -= count
        self._held_by[owner] -= count
        if not self._held_by[owner]:
            del self._held_by[owner]
        if count >= LARGE_BODY_BYTES:
            self._on_large_gone()


class Charge:
    """The bytes charged to one body. As a context manager, releases them at the end unless `keep` was called."""

    def __init__(self, room: BodyRoom, owner: str) -> None:
        self._room = room
        self._owner = owner
        self._bytes = 0
        self._is_kept = False

    def check(self, total: int) -> None:
        """Raises QueueFull if there is no room now for a body of `total` bytes. Charges nothing: what a client declares
        keeps nobody out before it has arrived."""
        if total > self._bytes:
            self._room.check(total - self._bytes, self._bytes, self._owner)

    def reach(self, total: int) -> None:
        """Charges for a body of which at least `total` bytes have arrived. Raises QueueFull."""
        if total > self._bytes:
            self._room.take(total - self._bytes, self._bytes, self._owner)
            self._bytes = total

    def keep(self) -> Callable[[], None]:
        """Keeps the charge beyond the context. Returns the function that releases it."""
        self._is_kept = True
        return self.release

    def release(self) -> None:
        """May be called again."""
        self._room.give(self._bytes, self._owner)
        self._bytes = 0

    def __enter__(self) -> Charge:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_kept:
            self.release()


class MemoryReturn:
    """Runs `return_memory` in a worker thread, `delay_s` after it was requested. Lives on the event loop."""

    def __init__(self, return_memory: Callable[[], None], delay_s: float = RETURN_DELAY_S) -> None:
        self._return_memory = return_memory
        self._delay_s = delay_s
        self._is_due = False

    def ask(self, tasks: anyio.abc.TaskGroup) -> None:
        if not self._is_due:
            self._is_due = True
            tasks.start_soon(self._run)

    async def _run(self) -> None:
        await anyio.sleep(self._delay_s)
        self._is_due = False
        await anyio.to_thread.run_sync(self._return_memory)
