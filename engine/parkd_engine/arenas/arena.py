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
    """

    def __init__(
        self,
        layout: StageStateLayout,
        context_tokens: int,
        device: torch.device | str,
        *,
        window_room: WindowRoom = WindowRoom(),
        free: Callable[[str], int] = free_bytes,
    ) -> None:
        """Allocates `bytes_needed` on `device`.

        `free` returns the bytes still free on a device. Raises OutOfMemory, which says how many tokens would fit.
        """
        self.layout = layout
        self.context_tokens = context_tokens
        self.device = torch.device(device)
        self.window_room = window_room
        needed = self.bytes_needed(layout, context_tokens, window_room)
        # The operating system overcommits main memory: without this check the process could be killed later, during
        # an answer.
        if needed > (room := free(str(self.device))):
            raise self._refusal(needed, room)
        try:
            self.rows = torch.empty((context_tokens, layout.row_bytes), dtype=torch.uint8, device=self.device)
            """uint8 `[context_tokens, row_bytes]`."""
            self.fixed = torch.zeros(layout.fixed_bytes, dtype=torch.uint8, device=self.device)
            """uint8 `[fixed_bytes]`."""
            self.windows = self._windows()
            """Layer -> keys and values, `[window - 1 + chunk_tokens + slack_tokens, heads, head_dim]` each."""
            self.index_blocks = self._index_blocks()
            """Layer of sparse attention -> block keys, `[context_tokens // index_block_tokens, dim]`."""
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
        return self.bytes_needed(self.layout, self.context_tokens, self.window_room)

    def field_view(self, field: Field) -> torch.Tensor:
        """A view `[context_tokens, *field.shape]` of `field.dtype`, strided by whole rows; writes go to the rows."""
        columns = self.rows[:, field.offset : field.offset + field.nbytes]
        return columns.view(field.dtype).view(self.context_tokens, *field.shape)

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
            field.layer: torch.empty((self.context_tokens // size, *field.shape), dtype=field.dtype, device=self.device)
            for field in self.layout.row_fields
            if field.name == INDEX_KEY
        }

    def _refusal(self, needed: int, room: int) -> OutOfMemory:
        once = self.bytes_needed(self.layout, 0, self.window_room)
        fitting = max(0, int((room - once) // (self.layout.row_bytes + self.layout.index_bytes_a_token)))
        return OutOfMemory(str(self.device), needed, self.context_tokens, fitting)
