"""Cuts off requests whose clients have left. A thread that waits for a server cannot look at a flag; this one does.

turn's thread    ---- waits for the server's next event ------------------------x  the connection is closed
watcher's        look ... look ... look: its client has left, so `Hold.cut` ----^
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from parkd.engine_adapter.base import Cancel
from parkd.engine_adapter.http.wire import Hold

LOOK_S = 0.05
"""How often the flags of waiting turns are looked at."""


class LeaveWatcher:
    """Thread-safe. Its thread runs while a turn waits; a daemon, since it must not keep the process from ending."""

    def __init__(self, look_s: float = LOOK_S) -> None:
        self._look_s = look_s
        self._lock = threading.Lock()
        self._waiting: dict[Hold, Cancel] = {}
        self._some = threading.Event()
        self._ended = False
        self._thread: threading.Thread | None = None

    @contextmanager
    def watching(self, hold: Hold, cancel: Cancel | None) -> Iterator[None]:
        """A context in which the request is cut off once `cancel` is set."""
        if cancel is None:
            yield
            return
        with self._lock:
            self._waiting[hold] = cancel
            if self._thread is None and not self._ended:
                self._thread = threading.Thread(target=self._run, name="parkd-leaving", daemon=True)
                self._thread.start()
            self._some.set()
        try:
            yield
        finally:
            with self._lock:
                del self._waiting[hold]

    def close(self) -> None:
        with self._lock:
            self._ended = True
            self._some.set()

    def _run(self) -> None:
        pause = threading.Event()
        while not self._ended:
            self._some.wait()
            with self._lock:
                waiting = list(self._waiting.items())
                if not waiting and not self._ended:
                    self._some.clear()
                    continue
            for hold, cancel in waiting:
                if cancel.is_set():
                    hold.cut()
            pause.wait(self._look_s)
