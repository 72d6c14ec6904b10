"""The checksums of parts, by their names in a layout, over bytes in host memory.

    xxh3-64          XXH3, 64 bits, seed 0
    weighted-sum-64  sum over the little-endian 64-bit words w_i of w_i * (2 i + 1), modulo 2**64

Engines compute the same while they copy, on whichever device holds the bytes (`parkd_engine.moves.checksum`).
"""

from __future__ import annotations

import numpy as np
import xxhash

from parkd.state.moves import Bytes

XXH3 = "xxh3-64"
WEIGHTED = "weighted-sum-64"
WORD_BYTES = 8
PIECE_WORDS = 1 << 17
"""Summed at a time, so that products and weights stay small."""


def part_sum(name: str, part: Bytes) -> int:
    """The checksum of that name over a part, uint8 `[n]`. Raises ValueError for an unknown name, and for a part of
    which it cannot be computed."""
    if name == XXH3:
        return int(xxhash.xxh3_64_intdigest(part.data))
    if name != WEIGHTED:
        raise ValueError(f"there is no checksum {name[:40]!r}")
    if part.nbytes % WORD_BYTES:
        raise ValueError(f"a weighted sum is over words of {WORD_BYTES} bytes, and the part has {part.nbytes}")
    words, total = part.view("<u8"), 0
    for start in range(0, len(words), PIECE_WORDS):
        piece = words[start : start + PIECE_WORDS]
        weights = np.arange(2 * start + 1, 2 * (start + len(piece)) + 1, 2, dtype=np.uint64)
        total += int((piece * weights).sum(dtype=np.uint64))
    return total % (1 << 64)
