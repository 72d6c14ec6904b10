"""Cache layers of sparse attention over arenas: the rows of attention, with indexer keys in them.

    row t    | key | value | ... | index_key |          | index_position |   the latter once per stage
    blocks   one key per whole block of rows, computed from index_key and index_position when first needed

Block keys are not state. They can be recomputed from the rows, in any order and number at a time, with the same bits.
So they are neither parked nor restored, and are forgotten when the timeline is cut.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import DummyLayer

from parkd_engine.forward.indexer import MOST_BLOCKS

if TYPE_CHECKING:
    from parkd_engine.forward.indexer import MakeBlocks


class IndexPositions:
    """Rotary positions of a stage's tokens, `[row_tokens - base, 3]` (time, height, width), in arena rows."""

    def __init__(self, rows: torch.Tensor) -> None:
        """`rows` are those of all seats."""
        self._all_rows = self.rows = rows
        self.position = 0

    def move_to(self, base: int) -> None:
        """This seat's rows begin at row `base` from now on."""
        self.rows = self._all_rows[base:]

    def write(self, position_ids: torch.Tensor) -> None:
        """Writes `[3, 1, q]` for the tokens from `position` on."""
        self.rows[self.position : self.position + position_ids.shape[2]] = position_ids[:, 0].T


class TakesPositions:
    """Receives the positions of new tokens, which the library's models set on the first indexed layer of the model,
    whichever stage has it.

    Reading the attribute gives None (no earlier tokens), so the model makes rotary tables for the new tokens only.
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
    """Takes the place of a layer that belongs to another stage."""


class LayerIndex:
    """The indexer keys of one layer, and the block keys computed from them."""

    def __init__(self, keys: torch.Tensor, blocks: torch.Tensor, positions: IndexPositions, block_tokens: int) -> None:
        """`keys` `[row_tokens, dim]` is a view of arena rows, `blocks` `[row_tokens // block_tokens, dim]`: both of all
        seats."""
        self._all_keys = self._keys = keys
        self._all_blocks = self._blocks = blocks
        self._positions = positions
        self._block_tokens = block_tokens
        self._ready = 0
        """Blocks `[0, ready)` are computed."""

    def move_to(self, base: int) -> None:
        """This seat's rows begin at row `base` from now on; their blocks are computed anew."""
        self._keys, self._blocks = self._all_keys[base:], self._all_blocks[base // self._block_tokens :]
        self._ready = 0

    def forget_from(self, position: int) -> None:
        """Forgets blocks with rows at or after `position`, since these rows have changed or will change."""
        self._ready = min(self._ready, position // self._block_tokens)

    def write(self, keys: torch.Tensor, position: int) -> torch.Tensor:
        """Writes indexer keys `[1, q, dim]` at `position`; returns all keys so far, `[1, position + q, dim]`."""
        stop = position + keys.shape[1]
        self._keys[position:stop] = keys[0]
        return self._keys[:stop].unsqueeze(0)

    def blocks(self, count: int, make: MakeBlocks) -> torch.Tensor:
        """Keys `[count, dim]` of the first `count` blocks; `make` computes the missing ones."""
        size = self._block_tokens
        while self._ready < count:
            first, stop = self._ready, min(count, self._ready + MOST_BLOCKS)
            firsts = self._positions.rows[first * size : stop * size : size].T
            self._blocks[first:stop] = make(self._keys[first * size : stop * size], firsts)
            self._ready = stop
        return self._blocks[:count]
