"""The live memory of one stage, allocated once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from engine.errors import OutOfMemory
from engine.layer_state import INDEX_KEY, WINDOW_FIELDS
from engine.layout import Field, StageStateLayout
from engine.memory import free_bytes
from engine.streams import DeviceStreams


@dataclass(frozen=True, slots=True)
class WindowRoom:
    """Rows in the live buffer of a sliding layer beyond its window."""

    chunk_tokens: int = 512
    """The longest chunk that is ever written at once."""
    slack_tokens: int = 256
    """How far back the timeline can be cut at any time."""

    @property
    def tokens(self) -> int:
        return self.chunk_tokens + self.slack_tokens


class StageArena:
    """`rows` and `fixed` of one stage.

    rows    row 0 | row 1 | ... | row context_tokens - 1        each `row_bytes` long
            |-- valid: [0, position) --|-- whatever was there --|
    fixed   valid at the session's position only
    windows the live buffers of sliding layers; their part of `fixed` is written when a checkpoint is taken
    index_blocks  what sparse attention derives from rows: computed again when it is missing, never parked
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

        `free` returns the bytes that a device can still give. Raises OutOfMemory, which says how many tokens would fit.
        """
        self.layout = layout
        self.context_tokens = context_tokens
        self.device = torch.device(device)
        self.window_room = window_room
        needed = self.bytes_needed(layout, context_tokens, window_room)
        # The system grants main memory before it has it: without this check the process could be killed later,
        # mid-answer.
        if needed > (room := free(str(self.device))):
            raise self._refusal(needed, room)
        try:
            self.rows = torch.empty((context_tokens, layout.row_bytes), dtype=torch.uint8, device=self.device)
            """uint8 `[context_tokens, row_bytes]`."""
            self.fixed = torch.zeros(layout.fixed_bytes, dtype=torch.uint8, device=self.device)
            """uint8 `[fixed_bytes]`."""
            self.windows = self._windows()
            """Layer -> its keys and values, `[window - 1 + chunk + slack, heads, head_dim]` each."""
            self.index_blocks = self._index_blocks()
            """Layer of sparse attention -> `[context_tokens // block_tokens, dim]`."""
        except (RuntimeError, MemoryError) as error:
            raise self._refusal(needed, free(str(self.device))) from error

    @staticmethod
    def bytes_needed(layout: StageStateLayout, context_tokens: int, window_room: WindowRoom = WindowRoom()) -> int:
        """Rows, fixed state, windows and index blocks."""
        derived = layout.window_bytes(window_room.tokens) + layout.index_bytes(context_tokens)
        return context_tokens * layout.row_bytes + layout.fixed_bytes + derived

    @cached_property
    def streams(self) -> DeviceStreams:
        """The streams that copy these rows. Only for an arena on a card."""
        return DeviceStreams(self.device)

    @property
    def nbytes(self) -> int:
        return self.bytes_needed(self.layout, self.context_tokens, self.window_room)

    def field_view(self, field: Field) -> torch.Tensor:
        """`[context_tokens, *field.shape]` of `field.dtype`, strided by whole rows; writing to it writes the rows."""
        columns = self.rows[:, field.offset : field.offset + field.nbytes]
        return columns.view(field.dtype).view(self.context_tokens, *field.shape)

    def fixed_view(self, field: Field) -> torch.Tensor:
        """`field.shape` of `field.dtype`; writing to it writes the fixed state."""
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
