"""Checksums of whole states in the store's shape, `[parts, 1]`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

from parkd.errors import RestoreFailed
from parkd.state import Bytes, Sums


def sums_of(states: Sequence[Bytes]) -> Sums:
    """`[states, 1]`"""
    sums = [xxhash.xxh3_64_intdigest(state.data) for state in states]
    return np.array(sums, dtype=np.uint64).reshape(len(sums), 1)


def compare_sums(states: Sequence[Bytes], expected: Sums | None) -> None:
    """Raises RestoreFailed."""
    if expected is None or expected.shape != (len(states), 1):
        raise RestoreFailed("The parked state has no checksums.")
    if not np.array_equal(sums_of(states), expected):
        raise RestoreFailed("A checksum of the parked state does not match its bytes.")
