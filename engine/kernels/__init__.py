"""Small Triton kernels for cards: one token's forward, attention over arena rows in place, checksums of blocks.

They are used where Triton is installed (CUDA builds of torch bring it) and the tensors are on a card; everything has a
path without them.
"""

from __future__ import annotations

import importlib.util


def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
