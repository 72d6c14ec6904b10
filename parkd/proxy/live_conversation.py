"""The conversation in the arenas: what the engine's rows mean.

    units     [0 .................................. position)
    lineage   [block][block][block][tail]            stored blocks the rows descend from; of an opaque state
    covered   [0 ......................)             one segment, which `covered` may end inside of

The engine owns the rows, this owns their meaning; `advance` is called after everything that may have moved the
engine's position, also after failures, so that the two never part.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from parkd.engine_adapter.base import BLOCK_TOKENS
from parkd.types import ConversationKey, Units


def no_units() -> Units:
    return np.zeros(0, dtype=np.uint64)


@dataclass(frozen=True, eq=False)
class LiveConversation:
    """Immutable: each change is a new value."""

    key: ConversationKey | None = None
    """None: nothing is live."""
    units: Units = field(default_factory=no_units)
    """`[position]`"""
    lineage: tuple[int, ...] = ()
    """Ids of the stored blocks that rows `[0, covered)` were restored from or captured into."""
    covered: int = 0
    parked_id: str | None = None
    """The parked conversation that holds every row; None: some rows are nowhere else."""

    @property
    def position(self) -> int:
        return len(self.units)

    def advance(self, key: ConversationKey, units: Units, position: int) -> LiveConversation:
        """The value after the engine went to `position`, having read from `units` behind what it shares with this one.

        `units` may be longer than `position`, never shorter. Rows up to the shorter of both are the same rows: the
        caller truncated before it read anything else.
        """
        assert position <= len(units)
        if position == 0:
            return LiveConversation()
        if position == self.position and key == self.key:
            return self
        kept = _covered_after(self.covered, min(position, self.position), position)
        return LiveConversation(key, units[:position].copy(), self.lineage[: _blocks(kept)], kept, None)

    def truncate(self, position: int) -> LiveConversation:
        """Only `[0, position)` is left."""
        assert position <= self.position
        return self if self.key is None else self.advance(self.key, self.units, position)

    def captured(self, blocks: tuple[int, ...], covered: int, parked_id: str) -> LiveConversation:
        """Rows `[0, covered)` are now in `blocks`."""
        whole = covered == self.position
        kept = covered if whole else covered // BLOCK_TOKENS * BLOCK_TOKENS
        return LiveConversation(self.key, self.units, blocks[: _blocks(kept)], kept, parked_id if whole else None)

    def shared_rows(self, blocks: tuple[int, ...]) -> int:
        """Rows from the start that are the very rows of `blocks`: a restore may leave them where they are."""
        shared = 0
        for mine, theirs in zip(self.lineage[: self.covered // BLOCK_TOKENS], blocks, strict=False):
            if mine != theirs:
                break
            shared += 1
        return shared * BLOCK_TOKENS


def restored(
    key: ConversationKey,
    units: Units,
    lineage: tuple[int, ...],
    position: int,
    parked_id: str | None,
    *,
    is_opaque: bool = False,
) -> LiveConversation:
    """What is live after rows `[0, position)` came back, which descend from `lineage` as far as that reaches: of an
    opaque state all of it descends from the one segment."""
    covered = position if is_opaque else min(position, len(lineage) * BLOCK_TOKENS)
    return LiveConversation(key, units[:position].copy(), lineage, covered, parked_id)


def _blocks(rows: int) -> int:
    return -(-rows // BLOCK_TOKENS)


def _covered_after(covered: int, same_rows: int, position: int) -> int:
    """A partial tail block stays in the lineage only while the position is exactly its end."""
    if covered == same_rows == position:
        return covered
    return min(covered, same_rows) // BLOCK_TOKENS * BLOCK_TOKENS
