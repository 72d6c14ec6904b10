"""Small Triton kernels for GPUs: one token's forward, attention over arena rows in place, checksums of blocks.

They are used if Triton is installed (CUDA builds of torch include it) and the tensors are on a GPU. All work has a
fallback without them.
"""

from __future__ import annotations

import importlib.util

EARLY_CAPABILITY = (9, 0)
"""Of GPUs that launch a kernel before the one before it has ended (`overlap`)."""


def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def keep_tuning() -> None:
    """Keeps autotuning results in Triton's cache, so that only the first start tunes. (Kernels of
    `flash-linear-attention` tune for a minute.)"""
    from triton import knobs

    knobs.autotuning.cache = True
