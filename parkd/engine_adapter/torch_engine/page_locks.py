"""Hooks that page-lock the store's memory through the CUDA runtime that torch has loaded."""

from __future__ import annotations

from collections.abc import Callable

from parkd_engine.weights.page_locks import register_with_cuda, unregister_with_cuda

from parkd.engine_adapter.pinned import PinnedMemory


def page_locks(progress: Callable[[str, float], None]) -> PinnedMemory:
    return PinnedMemory(register=register_with_cuda, unregister=unregister_with_cuda, progress=progress)
