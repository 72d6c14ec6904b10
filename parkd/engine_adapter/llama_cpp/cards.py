"""What is known of cards without asking llama.cpp, which has no interface for it: how long a copy must be, how many are
made at once, and how host memory is page-locked for its backend."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from parkd.engine_adapter.pinned import HOST_REGISTER_PORTABLE, PinnedMemory
from parkd.state import BLOCK_TOKENS

COPY_BYTES = 2 << 20
"""A block on a card has so many rows that a copy of the keys of one layer moves about this much. The library waits for
each copy, which costs some 10 microseconds beside its bytes."""
MOST_BLOCK_TOKENS = 2048
"""A block is what a turn copies again if it ended inside it, and what conversations share as a whole."""
COPIES_AT_ONCE = 3
"""Blocks of a card. While the library changes cells for one, or waits for the end of a copy, the link moves another."""
MAPS = Path("/proc/self/maps")
RUNTIME = "libcudart.so"
DRIVERS = ("libcuda.so.1", "nvcuda.dll")
"""The CUDA driver's library, by system."""


def block_tokens_for(key_bytes: int, uses_cards: bool) -> int:
    """Rows in a block: a power of two. `key_bytes` is what one row has in one layer."""
    tokens = BLOCK_TOKENS
    while uses_cards and tokens < MOST_BLOCK_TOKENS and tokens * key_bytes < COPY_BYTES:
        tokens *= 2
    return tokens


def copies_at_once(uses_cards: bool, has_fixed_state: bool) -> int:
    """Each needs a sequence, for which the library would reserve windows and recurrent state too."""
    return COPIES_AT_ONCE if uses_cards and not has_fixed_state else 1


def runtime_path(maps: Iterable[str]) -> str | None:
    """The CUDA runtime among the files that this process has mapped (proc(5), `/proc/pid/maps`)."""
    files = (line.split(maxsplit=5)[-1].strip() for line in maps if RUNTIME in line)
    return next((file for file in files if Path(file).name.startswith(RUNTIME)), None)


def cuda_runtime() -> Any | None:
    """The runtime that the library's CUDA backend has loaded; None without one (another backend, another system)."""
    try:
        with MAPS.open() as maps:
            path = runtime_path(maps)
        return None if path is None else ctypes.CDLL(path)
    except OSError:
        return None


def has_nvidia_card(drivers: Sequence[str] = DRIVERS) -> bool:
    """Whether the CUDA driver sees a card. Asking it creates nothing on the card."""
    count = ctypes.c_int()
    for name in drivers:
        with suppress(OSError, AttributeError):
            driver = ctypes.CDLL(name)
            if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0:
                return count.value > 0
    return False


def page_locks(runtime: Any) -> PinnedMemory:
    """Hooks for the store's memory, over the CUDA runtime API."""

    def register(address: int, size: int) -> int:
        asked = ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_uint(HOST_REGISTER_PORTABLE)
        return int(runtime.cudaHostRegister(*asked))

    def unregister(address: int) -> int:
        return int(runtime.cudaHostUnregister(ctypes.c_void_p(address)))

    return PinnedMemory(register=register, unregister=unregister)
