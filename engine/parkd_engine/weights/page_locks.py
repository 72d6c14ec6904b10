"""Page-locks memory of the engine's own through the CUDA runtime that torch has loaded."""

from __future__ import annotations

import ctypes
import sys

import torch

PORTABLE = 1
"""For all GPUs, not just the current one (CUDA runtime API, cudaHostRegister)."""
MADV_POPULATE_WRITE = 23
"""Faults pages in without changing their content (Linux 5.14 and later)."""


def populate(address: int, size: int) -> None:
    """Faults the pages in before locking, which would do it more slowly. A kernel that refuses does no harm."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), MADV_POPULATE_WRITE)


def register_with_cuda(address: int, size: int) -> int:
    """Returns 0 or the CUDA error number."""
    return int(torch.cuda.cudart().cudaHostRegister(address, size, PORTABLE))  # type: ignore[no-untyped-call]


def unregister_with_cuda(address: int) -> int:
    """Returns 0 or the CUDA error number."""
    return int(torch.cuda.cudart().cudaHostUnregister(address))  # type: ignore[no-untyped-call]
