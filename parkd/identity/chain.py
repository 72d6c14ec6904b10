"""Chained hashes over blocks of units. They find candidates; the comparison of units decides.

    hash_-1 = key digest
    hash_i  = blake2b-128(units of block i, little-endian; key = hash_{i-1})

So `hash_i` stands for everything from the start through block i, and conversations under different keys never have the
same hash. Only full blocks are hashed.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from parkd.identity.units import common_prefix
from parkd.types import HASH_BYTES, Units

CHAINS_KEPT = 256
"""Most chains that are remembered in a namespace of keys."""
COMPARED = 8
"""Of those, as many of the newest are compared with a new prompt if it continues none of them."""
TAIL_UNITS = 8
"""Units by which is seen that a prompt may continue a remembered one."""

_BYTES_A_HASH = 56
"""A 16-byte `bytes` object and its slot in a tuple, measured on CPython."""


def extend_hashes(previous: tuple[bytes, ...], units: Units, key_digest: bytes, block_tokens: int) -> tuple[bytes, ...]:
    """The prefix hashes of `units`, given those of its first `len(previous)` blocks.

    The caller guarantees that `previous` are the hashes of exactly those units under that key. Raises ValueError if
    there are more of them than full blocks.
    """
    blocks = len(units) // block_tokens
    if len(previous) > blocks:
        raise ValueError("more hashes than full blocks")
    if len(previous) == blocks:
        return previous
    data = np.ascontiguousarray(units, dtype="<u8").view(np.uint8).data
    step = block_tokens * 8
    parent = previous[-1] if previous else key_digest
    hashes = list(previous)
    for start in range(len(previous) * step, blocks * step, step):
        parent = blake2b(data[start : start + step], key=parent, digest_size=HASH_BYTES).digest()
        hashes.append(parent)
    return tuple(hashes)


def prefix_hashes(units: Units, key_digest: bytes, block_tokens: int) -> tuple[bytes, ...]:
    """One hash per full block; `hashes[i]` covers `units[: (i + 1) * block_tokens]`."""
    return extend_hashes((), units, key_digest, block_tokens)


@dataclass(frozen=True, slots=True)
class _Chain:
    key_digest: bytes
    units: Units
    hashes: tuple[bytes, ...]

    def may_go_on(self, units: Units, block_tokens: int) -> bool:
        """Whether other units are the same at the end of this one's last full block but one: the last may have a
        generation prompt that the next prompt of its conversation has not."""
        end = max(1, len(self.hashes) - 1) * block_tokens if self.hashes else 0
        tail = slice(max(0, end - TAIL_UNITS), end)
        return bool(end) and len(units) >= end and self.units[tail].tobytes() == units[tail].tobytes()

    @property
    def bytes(self) -> int:
        return self.units.nbytes + len(self.hashes) * _BYTES_A_HASH


class ChainMemo:
    """Remembers recent chains, so that a conversation that grows hashes only its new blocks. Thread-safe.

    Units are always compared, never assumed to be equal. Bounded by `limit_bytes` and CHAINS_KEPT.
    """

    def __init__(self, block_tokens: int, limit_bytes: int) -> None:
        self._block_tokens = block_tokens
        self._limit_bytes = limit_bytes
        self._chains: deque[_Chain] = deque()
        self._bytes = 0
        self._lock = threading.Lock()

    @property
    def memo_bytes(self) -> int:
        """Bytes remembered now."""
        return self._bytes

    def hashes(self, units: Units, key_digest: bytes) -> tuple[bytes, ...]:
        """The prefix hashes of `units`. The caller must not change the array afterwards."""
        with self._lock:
            chains = [chain for chain in self._chains if chain.key_digest == key_digest]
        likely = [chain for chain in chains if chain.may_go_on(units, self._block_tokens)]
        chains = likely or chains[-COMPARED:]
        best, best_blocks = None, 0
        for chain in chains:
            blocks = min(common_prefix(chain.units, units) // self._block_tokens, len(chain.hashes))
            if blocks > best_blocks:
                best, best_blocks = chain, blocks
        known = best.hashes[:best_blocks] if best is not None else ()
        hashes = extend_hashes(known, units, key_digest, self._block_tokens)
        grown = best if best is not None and best_blocks == len(best.hashes) else None
        self._keep(_Chain(key_digest, units, hashes), replaces=grown)
        return hashes

    def _keep(self, chain: _Chain, *, replaces: _Chain | None) -> None:
        with self._lock:
            if replaces is not None and any(kept is replaces for kept in self._chains):
                self._chains = deque(kept for kept in self._chains if kept is not replaces)
                self._bytes -= replaces.bytes
            if chain.bytes > self._limit_bytes:
                return
            self._chains.append(chain)
            self._bytes += chain.bytes
            while self._bytes > self._limit_bytes or len(self._chains) > CHAINS_KEPT:
                self._bytes -= self._chains.popleft().bytes
