"""What request bodies may hold of memory together: from their first byte until their answer is out.

A turn that waits keeps its messages, and its pictures twice: as they were sent and unpacked from base64. The count of
turns that may wait says nothing of their size, so bytes are counted as well.

    charge --take piece by piece--> [held] --release--> free

What is made of a body on the way (objects, text, ids) takes many times its size, and the allocator keeps that when it
is freed. So a moment behind large ones it is told to give it back.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

import anyio
import anyio.abc
import anyio.to_thread

from parkd.errors import QueueFull

MIB = 1 << 20
LARGE_BODY_BYTES = MIB
"""A body from this size up is parsed in a worker thread, so that the event loop goes on, and memory is returned behind
it."""
RETURN_DELAY_S = 1.0
"""Between a large body's end and the return: what refers to it is gone by then, and several that end together have one
return."""


class BodyRoom:
    """Bytes of the bodies that are held now. Lives on the event loop."""

    def __init__(
        self, limit_bytes: int, retry_after_s: Callable[[], int], on_large_gone: Callable[[], None] = lambda: None
    ) -> None:
        """`retry_after_s` says when there should be room again; `on_large_gone` is told when a large body is let go."""
        self._limit_bytes = limit_bytes
        self._retry_after_s = retry_after_s
        self._on_large_gone = on_large_gone
        self.held_bytes = 0

    def charge(self) -> Charge:
        """For one more body, of which nothing was read yet."""
        return Charge(self)

    def take(self, count: int, own_bytes: int) -> None:
        """Raises QueueFull where that is too much. A body that is alone is never refused: it has a limit of its own."""
        others_bytes = self.held_bytes - own_bytes
        if others_bytes and self.held_bytes + count > self._limit_bytes:
            raise QueueFull(
                f"The requests that wait hold {others_bytes / MIB:.0f} MiB, and --max-queue-mib allows "
                f"{self._limit_bytes // MIB} with this one. Try again later, or send smaller pictures.",
                retry_after_s=self._retry_after_s(),
            )
        self.held_bytes += count

    def give(self, count: int) -> None:
        self.held_bytes -= count
        if count >= LARGE_BODY_BYTES:
            self._on_large_gone()


class Charge:
    """One body's part of the room. As a context, it is released at the end unless somebody keeps it."""

    def __init__(self, room: BodyRoom) -> None:
        self._room = room
        self._bytes = 0
        self._is_kept = False

    def reach(self, total: int) -> None:
        """The body is at least so long. Raises QueueFull."""
        if total > self._bytes:
            self._room.take(total - self._bytes, self._bytes)
            self._bytes = total

    def keep(self) -> Callable[[], None]:
        """Held beyond the context; whoever keeps it calls what is returned."""
        self._is_kept = True
        return self.release

    def release(self) -> None:
        """May be called again."""
        self._room.give(self._bytes)
        self._bytes = 0

    def __enter__(self) -> Charge:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_kept:
            self.release()


class MemoryReturn:
    """Runs `return_memory` in a worker thread, a moment after it was asked for. Lives on the event loop."""

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
