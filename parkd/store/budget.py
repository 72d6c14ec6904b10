"""Accounting of every byte the store holds, and what a conversation costs besides its rows.

    limit  |------ slabs ------|-- checkpoints --|- metadata -|······ free ······|
                rows in use <= slabs

Two sums are kept under the limit. *Allocated* is what the store takes from the machine: whole slabs, used or not,
checkpoint buffers, and an estimate of the Python objects that describe it all. *In use* counts only the slots that hold
something, so it is never more than allocated. Room is charged before it is taken and credited after it is given back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

UNIT_BYTES = 8
HASH_BYTES = 128
"""A prefix hash, its place in the conversation's path, and in that of the index: 71 to 75 bytes were measured. Charges
are not below what `tests/unit/store/test_store_metadata.py` measures; they leave room for another interpreter."""
BLOCK_BYTES = 512
"""A block's record, its checksums, and its entries in the tables: 215 to 275 bytes were measured, by stages."""
CONVERSATION_BYTES = 3072
"""A conversation's record without its units, hashes and blocks, and an explanation once it is gone."""

MIB = 1 << 20


class Kind(IntEnum):
    SLABS = 0
    SEGMENTS = 1
    """Whole states that nobody can cut in blocks."""
    CHECKPOINTS = 2
    METADATA = 3


@dataclass(frozen=True, slots=True)
class Need:
    """What a capture takes: free slots, and bytes outside the slabs."""

    slots: int
    side_bytes: int


@dataclass(frozen=True, slots=True)
class Room:
    """What there is: free slots in slabs that must stay, and bytes for new slabs or anything else."""

    open_slots: int
    free_bytes: int


def conversation_metadata_bytes(position: int, block_tokens: int) -> int:
    """Metadata that each conversation pays for itself, also when all its blocks are shared."""
    return CONVERSATION_BYTES + position * UNIT_BYTES + position // block_tokens * HASH_BYTES


def mib(size: int) -> str:
    """`18.2 MiB`, for people."""
    return f"{size / MIB:.1f} MiB"


class Budget:
    """A limit in bytes and what is charged against it. `observer` is told after each change."""

    def __init__(self, limit_bytes: int, observer: Callable[[], None] | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.peak_bytes = self.allocated_bytes = 0
        self._observer = observer
        self._charged = [0] * len(Kind)

    def __getitem__(self, kind: Kind) -> int:
        return self._charged[kind]

    @property
    def side_bytes(self) -> int:
        """All that is not in slabs."""
        return self.allocated_bytes - self._charged[Kind.SLABS]

    @property
    def free_bytes(self) -> int:
        return self.limit_bytes - self.allocated_bytes

    def charge(self, kind: Kind, size: int) -> None:
        """Takes `size` bytes. Asking for more than is free is a mistake of the store's own."""
        assert 0 <= size <= self.free_bytes, f"{kind.name}: {size} bytes asked, {self.free_bytes} free"
        self._charged[kind] += size
        self.allocated_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        self._changed()

    def credit(self, kind: Kind, size: int) -> None:
        charged = self._charged[kind]
        assert 0 <= size <= charged, f"{kind.name}: {size} bytes given back, {charged} charged"
        self._charged[kind] = charged - size
        self.allocated_bytes -= size
        self._changed()

    def _changed(self) -> None:
        if self._observer is not None:
            self._observer()
