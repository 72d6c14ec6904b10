"""Accounts for every byte that the store holds, and for what a conversation takes besides its rows.

    limit  |------ slabs ------|-- checkpoints --|-- idle --|- metadata -|···· free ····|
                rows in use <= slabs

Two sums stay under the limit. *Allocated* is what the store takes from the machine: whole slabs, used or not,
checkpoint buffers, used or idle, and an estimate of the Python objects that describe them. *In use* counts only used
slots and no idle buffers, so it is never more than allocated. Room is charged before it is taken, and credited after it
is freed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

UNIT_BYTES = 8
HASH_BYTES = 128
"""For a prefix hash, its place in the conversation's path and in the index: 71 to 75 bytes were measured. These charges
are at least what `tests/unit/store/test_store_metadata.py` measures, with room for another interpreter."""
BLOCK_BYTES = 512
"""For a block's record, checksums and table entries: 215 to 275 bytes were measured, depending on the stages."""
CONVERSATION_BYTES = 3072
"""For a conversation's record without units, hashes and blocks, and for its explanation once it is gone."""

MIB = 1 << 20


class Kind(IntEnum):
    SLABS = 0
    SEGMENTS = 1
    """Opaque states."""
    CHECKPOINTS = 2
    IDLE = 3
    """Checkpoint buffers that are kept for the next checkpoints."""
    METADATA = 4


@dataclass(frozen=True, slots=True)
class Need:
    """What a capture needs: free slots, and bytes outside the slabs."""

    slots: int
    side_bytes: int


@dataclass(frozen=True, slots=True)
class Room:
    """What is free: slots in slabs that must stay, and bytes for new slabs or anything else."""

    open_slots: int
    free_bytes: int


def conversation_metadata_bytes(position: int, block_tokens: int) -> int:
    """Bytes of metadata of one conversation, even if all its blocks are shared."""
    return CONVERSATION_BYTES + position * UNIT_BYTES + position // block_tokens * HASH_BYTES


def mib(size: int) -> str:
    """`18.2 MiB`, for people."""
    return f"{size / MIB:.1f} MiB"


class Budget:
    """A limit in bytes, and what is charged to it. `observer` is called after each change."""

    def __init__(self, limit_bytes: int, observer: Callable[[], None] | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.peak_bytes = self.allocated_bytes = 0
        self._observer = observer
        self._charged = [0] * len(Kind)

    def __getitem__(self, kind: Kind) -> int:
        return self._charged[kind]

    @property
    def side_bytes(self) -> int:
        """What no freeing of empty slabs and idle buffers gives back."""
        return self.allocated_bytes - self._charged[Kind.SLABS] - self._charged[Kind.IDLE]

    @property
    def free_bytes(self) -> int:
        return self.limit_bytes - self.allocated_bytes

    def charge(self, kind: Kind, size: int) -> None:
        """Takes `size` bytes. To ask for more than is free is an error in the store itself."""
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
