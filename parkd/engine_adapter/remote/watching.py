"""Cuts off requests whose clients have left. A thread that waits for a server cannot look at a flag; this one does.

turn's thread    ---- waits for the server's next event ------------------------x  the connection is closed
watcher's        look ... look ... look: its client has left, so `Hold.cut` ----^
"""

from __future__ import annotations

import threading

from parkd.engine_adapter.base import Cancel
from parkd.engine_adapter.http.wire import Hold

LOOK_S = 0.05
"""How often the flags of turns are looked at."""


class LeaveWatcher:
    """Thread-safe. Its thread runs while a request is followed; a daemon, since it must not keep the process from
    ending."""

    def __init__(self, look_s: float = LOOK_S) -> None:
        self._look_s = look_s
        self._lock = threading.Lock()
        self._followed: dict[Hold, Cancel] = {}
        self._some = threading.Event()
        self._ended = False
        self._thread: threading.Thread | None = None

    def follow(self, hold: Hold, cancel: Cancel) -> None:
        """The request is cut off once `cancel` is set, in place of what was said of it before, until `leave`."""
        with self._lock:
            self._followed[hold] = cancel
            if self._thread is None and not self._ended:
                self._thread = threading.Thread(target=self._run, name="parkd-leaving", daemon=True)
                self._thread.start()
            self._some.set()

    def leave(self, hold: Hold) -> None:
        """The request has ended. May be called again."""
        with self._lock:
            self._followed.pop(hold, None)

    def close(self) -> None:
        with self._lock:
            self._ended = True
            self._some.set()

    def _run(self) -> None:
        pause = threading.Event()
        while not self._ended:
            self._some.wait()
            with self._lock:
                followed = list(self._followed.items())
                if not followed and not self._ended:
                    self._some.clear()
                    continue
            for hold, cancel in followed:
                if cancel.is_set():
                    hold.cut()
            pause.wait(self._look_s)
