"""Cache layers of sparse attention over arenas: rows as attention's, and the indexer's keys beside them.

    row t    | key | value | ... | index_key |          | index_position |   the latter once a stage
    blocks   | 0 .. t | ... of whole blocks of rows, made from index_key and index_position when they are first needed

The blocks are not state: they follow from the rows, bit for bit, whenever and however many at once they are made. So
they are neither parked nor restored, and a cut of the timeline only forgets them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import DummyLayer

from engine.indexer import MOST_BLOCKS

if TYPE_CHECKING:
    from engine.indexer import MakeBlocks


class IndexPositions:
    """The positions that a stage's tokens were given, `[context_tokens, 3]` (time, height, width) in arena rows."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows
        self.position = 0

    def write(self, position_ids: torch.Tensor) -> None:
        """`[3, 1, q]`, of the tokens behind the position."""
        self.rows[self.position : self.position + position_ids.shape[2]] = position_ids[:, 0].T


class TakesPositions:
    """The library's models hand the positions of new tokens to the first indexed layer of the model, whosever it is.

    They are told that there are none of earlier tokens, and so make rotary tables for the new ones alone.
    """

    positions: IndexPositions | None = None

    @property
    def indexer_position_ids(self) -> None:
        return None

    @indexer_position_ids.setter
    def indexer_position_ids(self, position_ids: torch.Tensor) -> None:
        if self.positions is not None:
            self.positions.write(position_ids)


class OtherStagesLayer(TakesPositions, DummyLayer):  # type: ignore[misc]
    """Stands where another stage's layer is."""


class LayerIndex:
    """The indexer's keys of one layer and the blocks made of them."""

    def __init__(self, keys: torch.Tensor, blocks: torch.Tensor, positions: IndexPositions, block_tokens: int) -> None:
        """`keys` `[context_tokens, dim]` is a view of arena rows, `blocks` `[context_tokens // block_tokens, dim]`."""
        self._keys = keys
        self._blocks = blocks
        self._positions = positions
        self._block_tokens = block_tokens
        self._ready = 0
        """Blocks `[0, ready)` are made."""

    def forget_from(self, position: int) -> None:
        """Rows from `position` on are, or will be, others than those that blocks were made of."""
        self._ready = min(self._ready, position // self._block_tokens)

    def write(self, keys: torch.Tensor, position: int) -> torch.Tensor:
        """Indexer keys `[1, q, dim]` of the tokens at `position`; returns all, `[1, position + q, dim]`."""
        stop = position + keys.shape[1]
        self._keys[position:stop] = keys[0]
        return self._keys[:stop].unsqueeze(0)

    def blocks(self, count: int, make: MakeBlocks) -> torch.Tensor:
        """The first `count` blocks' keys `[count, dim]`, the missing ones made by `make`."""
        size = self._block_tokens
        while self._ready < count:
            first, stop = self._ready, min(count, self._ready + MOST_BLOCKS)
            firsts = self._positions.rows[first * size : stop * size : size].T
            self._blocks[first:stop] = make(self._keys[first * size : stop * size], firsts)
            self._ready = stop
        return self._blocks[:count]
