"""What becomes of the store's memory if a copy into it has not ended when the server does.

Nobody waits for such a copy any more: its turn was cancelled, and the call that never returned may be one to a driver.
So what it writes to is neither released nor freed before the process has ended.
"""

from __future__ import annotations

import ctypes
import logging

from parkd.store.store import ConversationStore

log = logging.getLogger(__name__)


def outlive_copies(store: ConversationStore | None) -> None:
    """Keeps the store and its memory until the process has ended, if a capture is still in flight. Called at the
    server's end, when no other can begin."""
    if store is None or not store.stats().captures_in_flight:
        return
    log.warning("a conversation was still being copied when the server ended; it is not parked")
    # One reference that nobody gives back: neither the reference count nor the collector frees the store then, nor does
    # the interpreter at its own end, which the threads that copy may outlive.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))
