"""Hooks that page-lock the store's memory through the CUDA runtime that torch has loaded."""

from __future__ import annotations

from collections.abc import Callable

import torch

from parkd.engine_adapter.pinned import HOST_REGISTER_PORTABLE, PinnedMemory


def page_locks(progress: Callable[[str, float], None]) -> PinnedMemory:
    return PinnedMemory(register=_register, unregister=_unregister, progress=progress)


def _register(address: int, size: int) -> int:
    return int(torch.cuda.cudart().cudaHostRegister(address, size, HOST_REGISTER_PORTABLE))  # type: ignore[no-untyped-call]


def _unregister(address: int) -> int:
    return int(torch.cuda.cudart().cudaHostUnregister(address))  # type: ignore[no-untyped-call]
