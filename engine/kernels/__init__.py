"""Small Triton kernels for cards: one token's forward, attention over arena rows in place, checksums of blocks.

They are used where Triton is installed (CUDA builds of torch bring it) and the tensors are on a card; everything has a
path without them.
"""

from __future__ import annotations

import importlib.util


def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def keep_tuning() -> None:
    """What kernels found out by trying (those of `flash-linear-attention` try for a minute) is kept in Triton's cache,
    so that only the first start takes that long."""
    from triton import knobs

    knobs.autotuning.cache = True
