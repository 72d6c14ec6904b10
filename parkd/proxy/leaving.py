"""Gives up what is done for a client that has left, before its turn waits for the lane.

client      request ......... leaves
waiting     for a thread ....|       ends at once
a thread    image | image ...| image      ends between two pieces, with Cancelled
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio
from starlette.requests import Request

from parkd.errors import Cancelled
from parkd.types import StillWanted

T = TypeVar("T")


async def while_connected(request: Request, work: Callable[[StillWanted], Awaitable[T]]) -> T:
    """The result of `work`, whose threads call what they are given between two pieces. The request's body must have
    been read. Raises what `work` raises, and Cancelled once the client has left."""
    left = threading.Event()
    results: list[T] = []
    errors: list[Exception] = []

    def still_wanted() -> None:
        if left.is_set():
            raise Cancelled("The client left while its prompt was prepared.")

    async with anyio.create_task_group() as tasks:

        async def watch() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            left.set()
            tasks.cancel_scope.cancel()

        tasks.start_soon(watch)
        try:
            results.append(await work(still_wanted))
        except Exception as error:  # raised outside of the group, which would wrap it
            errors.append(error)
        tasks.cancel_scope.cancel()
    if errors:
        raise errors[0]
    still_wanted()
    return results[0]
