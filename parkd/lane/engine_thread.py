"""The engine's own thread: every engine call runs here, one at a time, while the event loop goes on."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

Job = tuple[Callable[[], Any], asyncio.Future[Any], asyncio.AbstractEventLoop]


class EngineThread:
    """Runs functions one after the other. An exception is raised in the caller; the thread continues.

    The thread is a daemon: a native call that never returns must not keep the process from ending. It needs no bound
    on its queue, because its only caller, the lane, awaits each call.
    """

    def __init__(self, name: str = "parkd-engine") -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Ends the thread after the queued calls. False if it is still busy after `timeout_s`."""
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls `function` on the thread. Returns what it returns and raises what it raises."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._jobs.put((lambda: function(*args, **kwargs), future, loop))
        return await future

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            call, future, loop = job
            try:
                outcome, error = call(), None
            except BaseException as raised:  # the caller decides what it means; this thread must live on
                outcome, error = None, raised
            try:
                loop.call_soon_threadsafe(_settle, future, outcome, error)
            except RuntimeError:  # the loop has closed: nobody waits for this any more
                return
            del call, future, outcome, error, job  # a snapshot's buffers must not live on in this frame


def _settle(future: asyncio.Future[Any], outcome: object, error: BaseException | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(outcome)
    elif isinstance(error, StopIteration):  # a future cannot carry one
        future.set_exception(RuntimeError("StopIteration on the engine's thread"))
    else:
        future.set_exception(error)
