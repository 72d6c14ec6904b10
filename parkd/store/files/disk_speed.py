"""Measures how fast files are read from the disk tier's directory, for the first decisions whether to restore from it.

An extent that is there already is read, or else a file is written, read and removed: at most TRIAL_BYTES, and for at
most TRIAL_S each way and the piece that is under way then. The system's cache of the file is avoided as far as it can
be, since it would be measured in place of the device.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from parkd.store.files.fs import GRAIN_BYTES, FileSystem, aligned_zeros
from parkd.store.files.manifest import EXTENT_SUFFIX

log = logging.getLogger(__name__)

TRIAL_BYTES = 64 * 1024 * 1024
TRIAL_S = 1.0
LEAST_BYTES = 8 * 1024 * 1024
"""Less would measure overhead, not speed."""
PIECE_BYTES = 4 * 1024 * 1024
"""Bytes of a call, as in promotions."""
CALLS_IN_FLIGHT = 4


def read_bytes_per_s(fs: FileSystem, room_bytes: int, monotonic: Callable[[], float] = time.monotonic) -> float | None:
    """Bytes per second at which the directory is read. Writes at most `room_bytes`. None if there is too little to
    read and too little room to write, or if the disk failed."""
    try:
        extents = {name: size for name, size in fs.sizes().items() if name.endswith(EXTENT_SUFFIX)}
        largest = max(extents, key=lambda name: extents[name], default="")
        if extents.get(largest, 0) >= LEAST_BYTES:
            return _read(fs, largest, min(extents[largest], TRIAL_BYTES) // GRAIN_BYTES * GRAIN_BYTES, monotonic)
        if room_bytes < LEAST_BYTES:
            return None
        # Named like an extent: one that a crash leaves is removed at the next start, since no manifest names it.
        name = f"{secrets.randbits(64):016x}{EXTENT_SUFFIX}"
        try:
            written = _write(fs, name, min(room_bytes, TRIAL_BYTES) // PIECE_BYTES * PIECE_BYTES, monotonic)
            return _read(fs, name, written, monotonic)
        finally:
            with contextlib.suppress(FileNotFoundError):
                fs.remove(name)
    except OSError as error:
        log.warning("how fast the disk is could not be measured: %s", error)
        return None


def _write(fs: FileSystem, name: str, size: int, monotonic: Callable[[], float]) -> int:
    """Writes a file until it has `size` bytes or time is up. Returns its size."""
    piece = aligned_zeros(PIECE_BYTES)
    piece[:] = np.frombuffer(secrets.token_bytes(PIECE_BYTES), dtype=np.uint8)  # zeros may take no place on the device
    file, until_s, at = fs.create(name), monotonic() + TRIAL_S, 0
    try:
        while at < size and (at < LEAST_BYTES or monotonic() < until_s):
            file.write(at, [piece])
            file.sync()
            at += PIECE_BYTES
    finally:
        file.close()
    return at


def _read(fs: FileSystem, name: str, size: int, monotonic: Callable[[], float]) -> float:
    """Reads the first `size` bytes of a file, or what can be read in time. Returns bytes per second."""
    file = fs.open(name)
    try:
        file.drop_cached()
        began_s = monotonic()

        def read(at: int) -> int:
            if at and monotonic() > began_s + TRIAL_S:
                return 0
            buffer = aligned_zeros(min(PIECE_BYTES, size - at))
            file.read(at, [buffer])
            return buffer.nbytes

        with ThreadPoolExecutor(CALLS_IN_FLIGHT, "parkd-disk-speed") as pool:
            done = sum(pool.map(read, range(0, size, PIECE_BYTES)))
        return done / max(monotonic() - began_s, 1e-9)
    finally:
        file.close()
