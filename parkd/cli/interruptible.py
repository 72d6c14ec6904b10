"""Work that a signal can end, whatever it is inside of.

Python runs the handler of a signal in the main thread, and only between two of its own instructions: while a library
reads 30 GiB of weights, compiles kernels or waits for a disk, nothing happens; and in a library's callback an exception
is lost. So the work goes to a thread, and the main thread waits where a signal reaches it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

LOOK_S = 1.0
"""Some systems cannot interrupt a wait without an end, so it ends this often."""

T = TypeVar("T")


def interruptible(work: Callable[[], T]) -> T:
    """Returns what `work` returns, or raises what it raises. If a signal's handler raises meanwhile, that is raised at
    once; the thread is then left behind, and whoever ends the process must not wait for it."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="parkd-start", daemon=True).start()
    while not wait([done], LOOK_S).done:
        pass
    return done.result()
