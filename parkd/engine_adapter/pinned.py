"""Page-locks host memory in the background, so that GPUs copy to and from it at the speed of the link.

    added -> waiting -> locking -> locked          copies work in every state, and are fast once `locked`
                 |-- refused: stays pageable, with one warning

Nothing waits for locking, except `removed` of memory that is being locked.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

log = logging.getLogger("parkd.engine")

HOST_REGISTER_PORTABLE = 1
"""For all GPUs, not just the current one (CUDA runtime API, cudaHostRegister)."""
MADV_POPULATE_WRITE = 23
"""Faults pages in without changing their content (Linux 5.14 and later)."""

Bytes = npt.NDArray[np.uint8]


def populate(address: int, size: int) -> None:
    """Faults the pages in before locking, which would do it more slowly. A kernel that refuses does no harm."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), MADV_POPULATE_WRITE)


class PinnedMemory:
    """Hooks for a pool of host memory. Memory is page-locked when added and unlocked when removed.

    The pool's owner calls `added` and `removed`, from one thread at a time.
    """

    def __init__(
        self,
        *,
        register: Callable[[int, int], int],
        unregister: Callable[[int], int],
        prepare: Callable[[int, int], None] = populate,
        progress: Callable[[str, float], None] = lambda _what, _share: None,
    ) -> None:
        """`register` takes an address and a number of bytes; it and `unregister` return 0 or the CUDA error number.
        `progress` is told, on the thread that locks, what share of what was added is locked."""
        self._register, self._unregister, self._prepare = register, unregister, prepare
        self._progress = progress
        self._changed = threading.Condition()
        self._waiting: deque[tuple[int, int]] = deque()
        self._locking: int | None = None
        self._locked: dict[int, int] = {}
        self._refused = False
        self._thread: threading.Thread | None = None

    @property
    def locked_bytes(self) -> int:
        with self._changed:
            return sum(self._locked.values())

    def added(self, memory: Bytes) -> None:
        if memory.nbytes == 0:
            return
        with self._changed:
            self._waiting.append((memory.ctypes.data, memory.nbytes))
            if self._thread is None:
                # A daemon thread: a hanging driver call must not keep the process from exiting.
                self._thread = threading.Thread(target=self._serve, name="parkd-pin", daemon=True)
                self._thread.start()

    def removed(self, memory: Bytes) -> None:
        address = memory.ctypes.data
        with self._changed:
            self._waiting = deque(each for each in self._waiting if each[0] != address)
            self._changed.wait_for(lambda: self._locking != address)
            if self._locked.pop(address, None) is not None:
                self._unregister(address)

    def settle(self, timeout_s: float) -> bool:
        """Waits until nothing is left to lock. Returns False after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and self._locking is None, timeout_s)

    def _serve(self) -> None:
        """Locks waiting memory; ends when there is none left."""
        while True:
            with self._changed:
                self._locking = None
                self._changed.notify_all()
                if not self._waiting or self._refused:
                    self._waiting.clear()
                    self._thread = None
                    return
                address, size = self._waiting.popleft()
                self._locking = address
            self._prepare(address, size)
            error = self._register(address, size)
            with self._changed:
                if error == 0:
                    self._locked[address] = size
                    locked = sum(self._locked.values())
                    share = locked / (locked + sum(waiting for _, waiting in self._waiting))
                else:
                    self._refused = True
            if error == 0:
                self._progress("Page-locking memory for parked conversations", share)
                continue
            log.warning(
                "host memory cannot be page-locked (CUDA error %d, %d MiB locked so far): copies are slower. "
                "The limit is that of `ulimit -l`, or the machine's memory.",
                error,
                self.locked_bytes >> 20,
            )
