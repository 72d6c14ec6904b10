"""Keeps the store's memory alive if a copy into it is still running when the server ends.

Nothing waits for such a copy: its turn was cancelled, and its call may never return, for example from a driver. So the
memory that it writes to must not be freed before the process ends.
"""

from __future__ import annotations

import ctypes
import logging

from parkd.store.store import ConversationStore

log = logging.getLogger(__name__)


def outlive_copies(store: ConversationStore | None) -> None:
    """Keeps the store and its memory until the process ends, if a capture is still in flight. Called when the server
    has ended and no new capture can begin."""
    if store is None or not store.stats().captures_in_flight:
        return
    log.warning("a conversation was still being copied when the server ended; it is not parked")
    # A reference that is never released: the store is then freed neither by its reference count nor by the garbage
    # collector, nor when the interpreter shuts down, which the copying threads may outlive.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))
