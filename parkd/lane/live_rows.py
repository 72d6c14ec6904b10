"""What the rows in the arenas mean: whose they are, and which stored blocks they descend from.

    units     [0 .................................. position)
    lineage   [block][block][block][tail]            stored blocks that the rows descend from
    covered   [0 ......................)

An opaque state descends from one segment, and `covered` may end inside it. The engine owns the rows, this value their
meaning. `advance` is called after everything that may have moved the engine's position, also after failures, so that
the two always agree.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from parkd.state import BLOCK_TOKENS
from parkd.types import ConversationKey, Units


def no_units() -> Units:
    return np.zeros(0, dtype=np.uint64)


@dataclass(frozen=True, eq=False)
class LiveRows:
    """Immutable: each change is a new value."""

    key: ConversationKey | None = None
    """None: nothing is live."""
    units: Units = field(default_factory=no_units)
    """`[position]`"""
    lineage: tuple[int, ...] = ()
    """Ids of the stored blocks that rows `[0, covered)` were restored from or captured into."""
    covered: int = 0
    parked_id: str | None = None
    """The parked conversation that holds every live row; None if some rows are only in the arenas."""
    block_tokens: int = BLOCK_TOKENS

    @property
    def position(self) -> int:
        return len(self.units)

    def advance(self, key: ConversationKey, units: Units, position: int) -> LiveRows:
        """The rows after the engine moved to `position`, which are those of `units[:position]`.

        `units` may be longer than `position`, never shorter. Rows that both positions have are unchanged: the caller
        calls `truncate` before it reads anything else.
        """
        assert position <= len(units)
        if position == 0:
            return LiveRows(block_tokens=self.block_tokens)
        if position == self.position and key == self.key:
            return self
        size = self.block_tokens
        kept = _covered_after(self.covered, min(position, self.position), position, size)
        return LiveRows(key, units[:position].copy(), self.lineage[: -(-kept // size)], kept, None, size)

    def truncate(self, position: int) -> LiveRows:
        """The rows cut to `[0, position)`."""
        assert position <= self.position
        return self if self.key is None else self.advance(self.key, self.units, position)

    def captured(self, blocks: tuple[int, ...], covered: int, parked_id: str) -> LiveRows:
        """The same rows after `[0, covered)` were captured into `blocks`."""
        whole = covered == self.position
        size = self.block_tokens
        kept = covered if whole else covered // size * size
        return LiveRows(self.key, self.units, blocks[: -(-kept // size)], kept, parked_id if whole else None, size)

    def shared_rows(self, blocks: tuple[int, ...]) -> int:
        """How many rows from the start descend from the same `blocks`. A restore can leave these in the arenas."""
        shared = 0
        for mine, theirs in zip(self.lineage[: self.covered // self.block_tokens], blocks, strict=False):
            if mine != theirs:
                break
            shared += 1
        return shared * self.block_tokens


def restored(
    key: ConversationKey,
    units: Units,
    lineage: tuple[int, ...],
    position: int,
    parked_id: str | None,
    *,
    is_opaque: bool = False,
    block_tokens: int = BLOCK_TOKENS,
) -> LiveRows:
    """The rows `[0, position)` after they were restored. They descend from `lineage` as far as that
    reaches; an opaque state descends wholly from its one segment."""
    covered = position if is_opaque else min(position, len(lineage) * block_tokens)
    return LiveRows(key, units[:position].copy(), lineage, covered, parked_id, block_tokens)


def _covered_after(covered: int, same_rows: int, position: int, block_tokens: int) -> int:
    """How many rows still descend from the lineage. A partial last block counts only while the position is its end."""
    if covered == same_rows == position:
        return covered
    return min(covered, same_rows) // block_tokens * block_tokens
