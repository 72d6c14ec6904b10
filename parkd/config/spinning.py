"""How long the threads of a compute library spin while they wait for work, which no library asks of its caller."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

SPINS = {"GOMP_SPINCOUNT": "100000", "KMP_BLOCKTIME": "1"}
"""Per OpenMP runtime: GNU's counts turns of its loop (a few milliseconds here), LLVM's and Intel's milliseconds.
Without a bound, threads spin for as long as 300,000 turns or 200 ms, and on a machine that is busy with something else
each takes the core from the thread that all others wait for. With far fewer turns threads sleep between two products of
one token, and waking them costs more than the product: `benchmarks.spinning` measures both."""
CHOICES = ("OMP_WAIT_POLICY", *SPINS)
"""Variables with which a user may have chosen otherwise."""


def bound_spinning(environment: MutableMapping[str, str] = os.environ) -> None:
    """Bounds the spinning of threads of libraries that are loaded from now on, if the user has chosen nothing.

    A runtime reads the variables once, when it is loaded: call this before torch, numpy's BLAS or llama.cpp is.
    """
    if not any(name in environment for name in CHOICES):
        environment.update(SPINS)
