"""The live memory of one stage, allocated once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from parkd.errors import OutOfMemory
from parkd_engine.arenas.layout import Field, StageStateLayout
from parkd_engine.arenas.streams import DeviceStreams
from parkd_engine.families.layer_state import INDEX_KEY, WINDOW_FIELDS
from parkd_engine.memory import free_bytes

MOVED_BYTES = 64 << 20
"""Copied at a time when a seat's rows move inside the arena."""


@dataclass(frozen=True, slots=True)
class WindowRoom:
    """The room in a sliding layer's live buffer beyond its window."""

    chunk_tokens: int = 512
    """The longest chunk that is written at once."""
    slack_tokens: int = 256
    """How far back the timeline can always be cut without a checkpoint."""

    @property
    def tokens(self) -> int:
        return self.chunk_tokens + self.slack_tokens


class StageArena:
    """One stage's rows, fixed state, and buffers derived from them.

    rows    row 0 | row 1 | ... | row context_tokens - 1        each `row_bytes` long
            |-- valid: [0, position) --|-- undefined -----------|
    fixed   valid at the session's position only
    windows the live buffers of sliding layers; packed into `fixed` for a checkpoint or a capture
    index_blocks  block keys that sparse attention derives from rows: recomputed when missing, never parked

    Where an engine has several seats, each has an arena with fixed state and windows of its own. Their rows, and what
    is derived from rows, lie in one memory, and begin there at `base` (`parkd_engine.arenas.row_space`):

    all_rows   ...... | rows of this seat | ...... | rows of another | ......
                    base
    """

    def __init__(
        self,
        layout: StageStateLayout,
        context_tokens: int,
        device: torch.device | str,
        *,
        window_room: WindowRoom = WindowRoom(),
        free: Callable[[str], int] = free_bytes,
        row_tokens: int | None = None,
        beside: StageArena | None = None,
    ) -> None:
        """Allocates `bytes_needed` on `device`.

        `row_tokens` is how many rows all seats have together; None: there is one seat, which has `context_tokens`. With
        the arena of another seat `beside` it, the rows lie in that one's memory. `free` returns the bytes still free on
        a device. Raises OutOfMemory, which says how many tokens would fit.
        """
        self.layout = layout
        self.context_tokens = context_tokens
        self.row_tokens = row_tokens or context_tokens
        self.device = torch.device(device)
        self.window_room = window_room
        self.has_neighbours = row_tokens is not None
        """Whether there are seats beside this one, so that its rows may come to begin elsewhere."""
        self.base = 0
        """The row of `all_rows` at which this seat's begin; a multiple of the rows of an index block."""
        self._owns_rows = beside is None
        needed = self.nbytes
        # The operating system overcommits main memory: without this check the process could be killed later, during
        # an answer.
        if needed > (room := free(str(self.device))):
            raise self._refusal(needed, room)
        try:
            shape = (self.row_tokens, layout.row_bytes)
            made = torch.empty(shape, dtype=torch.uint8, device=self.device) if beside is None else beside.all_rows
            self.all_rows: torch.Tensor = made
            """uint8 `[row_tokens, row_bytes]`, of all seats."""
            self.rows = self.all_rows
            """uint8 `[row_tokens - base, row_bytes]`: from this seat's first row on."""
            self.fixed = torch.zeros(layout.fixed_bytes, dtype=torch.uint8, device=self.device)
            """uint8 `[fixed_bytes]`."""
            self.windows = self._windows()
            """Layer -> keys and values, `[window - 1 + chunk_tokens + slack_tokens, heads, head_dim]` each."""
            blocks = self._index_blocks() if beside is None else beside.all_index_blocks
            self.all_index_blocks: dict[int, torch.Tensor] = blocks
            self.index_blocks = self.all_index_blocks
            """Layer of sparse attention -> block keys, `[(row_tokens - base) // index_block_tokens, dim]`."""
        except (RuntimeError, MemoryError) as error:
            raise self._refusal(needed, free(str(self.device))) from error

    @staticmethod
    def bytes_needed(layout: StageStateLayout, context_tokens: int, window_room: WindowRoom = WindowRoom()) -> int:
        """Bytes of rows, fixed state, windows and index blocks."""
        derived = layout.window_bytes(window_room.tokens) + layout.index_bytes(context_tokens)
        return context_tokens * layout.row_bytes + layout.fixed_bytes + derived

    @cached_property
    def streams(self) -> DeviceStreams:
        """The streams that copy to and from this arena. Only for an arena on a GPU."""
        return DeviceStreams(self.device)

    @property
    def nbytes(self) -> int:
        """Bytes that this arena allocates."""
        return self.bytes_needed(self.layout, self.row_tokens if self._owns_rows else 0, self.window_room)

    def move_to(self, base: int) -> None:
        """From now on this seat's rows begin at row `base` of `all_rows`. Copies nothing. Views of rows that were made
        before stay where they are."""
        size = self.layout.index_block_tokens or 1
        assert base % size == 0, "blocks of the index begin there too"
        self.base = base
        self.rows = self.all_rows[base:]
        self.index_blocks = {layer: blocks[base // size :] for layer, blocks in self.all_index_blocks.items()}

    def copy_rows(self, count: int, base: int) -> None:
        """Copies this seat's first `count` rows to row `base` of `all_rows` and on; both ranges may overlap. Takes up
        to `MOVED_BYTES` of memory for a while, before anything is written."""
        if not count or base == self.base:
            return
        piece = max(1, min(count, MOVED_BYTES // self.layout.row_bytes))
        between = torch.empty((piece, self.layout.row_bytes), dtype=torch.uint8, device=self.device)
        starts = range(0, count, piece)
        # In the direction of the move, so that no row is overwritten before it was copied.
        for start in starts if base < self.base else reversed(starts):
            rows = min(piece, count - start)
            between[:rows] = self.rows[start : start + rows]
            self.all_rows[base + start : base + start + rows] = between[:rows]

    def field_view(self, field: Field) -> torch.Tensor:
        """A view `[row_tokens - base, *field.shape]` of `field.dtype`, strided by whole rows; writes go to the rows."""
        columns = self.rows[:, field.offset : field.offset + field.nbytes]
        return columns.view(field.dtype).view(len(self.rows), *field.shape)

    def fixed_view(self, field: Field) -> torch.Tensor:
        """A view `field.shape` of `field.dtype`; writes go to the fixed state."""
        return self.fixed[field.offset : field.offset + field.nbytes].view(field.dtype).view(field.shape)

    def _windows(self) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        buffers: dict[tuple[int, str], torch.Tensor] = {}
        for field in self.layout.window_fields:
            shape = (field.shape[0] + self.window_room.tokens, *field.shape[1:])
            buffers[field.layer, field.name] = torch.empty(shape, dtype=field.dtype, device=self.device)
        key, value = WINDOW_FIELDS
        return {layer: (buffers[layer, key], buffers[layer, value]) for layer, name in buffers if name == key}

    def _index_blocks(self) -> dict[int, torch.Tensor]:
        size = self.layout.index_block_tokens
        return {
            field.layer: torch.empty((self.row_tokens // size, *field.shape), dtype=field.dtype, device=self.device)
            for field in self.layout.row_fields
            if field.name == INDEX_KEY
        }

    def _refusal(self, needed: int, room: int) -> OutOfMemory:
        once = self.bytes_needed(self.layout, 0, self.window_room)
        fitting = max(0, int((room - once) // (self.layout.row_bytes + self.layout.index_bytes_a_token)))
        return OutOfMemory(str(self.device), needed, self.row_tokens, fitting)
