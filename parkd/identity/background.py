"""A thread for small optional work that nothing waits for: writing the file of answers, tokenising texts ahead.

Work runs in order from a bounded queue. It is dropped while the queue is full.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

QUEUE_LIMIT = 256
CLOSE_DEADLINE_S = 5.0

Work = Callable[[], None]


class BackgroundWork:
    """The thread and its queue. `submit` never waits, and may be called from any thread. Errors of work are logged."""

    def __init__(self, limit: int = QUEUE_LIMIT) -> None:
        self._queue: queue.Queue[Work | None] = queue.Queue(limit)
        self._thread = threading.Thread(target=self._run, name="behind", daemon=True)
        self._started = False
        self._lock = threading.Lock()
        self.left_out = 0
        """How often work was dropped because the queue was full."""

    def submit(self, work: Work) -> bool:
        """Queues `work`. False if the queue is full."""
        with self._lock:
            if not self._started:
                self._started = True
                self._thread.start()
        try:
            self._queue.put_nowait(work)
        except queue.Full:
            self.left_out += 1
            return False
        return True

    def close(self, deadline_s: float = CLOSE_DEADLINE_S) -> None:
        """Ends the thread after the queued work. Does not wait for it beyond the deadline."""
        if not self._started:
            return
        try:
            self._queue.put(None, timeout=deadline_s)
        except queue.Full:
            return  # It is a daemon thread, so it ends with the process.
        self._thread.join(deadline_s)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except Exception:
                log.exception("background work failed")
