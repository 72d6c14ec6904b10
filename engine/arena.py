"""The live memory of one stage, allocated once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch

from engine.errors import OutOfMemory
from engine.layout import Field, StageStateLayout
from engine.memory import free_bytes
from engine.streams import DeviceStreams


class StageArena:
    """`rows` and `fixed` of one stage.

    rows    row 0 | row 1 | ... | row context_tokens - 1        each `row_bytes` long
            |-- valid: [0, position) --|-- whatever was there --|
    fixed   true at the session's position only
    """

    def __init__(
        self,
        layout: StageStateLayout,
        context_tokens: int,
        device: torch.device | str,
        *,
        free: Callable[[str], int] = free_bytes,
    ) -> None:
        """Allocates `context_tokens * row_bytes + fixed_bytes` bytes on `device`.

        `free` tells what the device could still give. Raises OutOfMemory with the numbers.
        """
        self.layout = layout
        self.context_tokens = context_tokens
        self.device = torch.device(device)
        needed = self.bytes_needed(layout, context_tokens)
        # Main memory is promised before it is there: without this check the process would be killed later, mid-answer.
        if needed > (room := free(str(self.device))):
            raise self._refusal(needed, room)
        try:
            self.rows = torch.empty((context_tokens, layout.row_bytes), dtype=torch.uint8, device=self.device)
            """uint8 `[context_tokens, row_bytes]`."""
            self.fixed = torch.zeros(layout.fixed_bytes, dtype=torch.uint8, device=self.device)
            """uint8 `[fixed_bytes]`."""
        except (RuntimeError, MemoryError) as error:
            raise self._refusal(needed, free(str(self.device))) from error

    @staticmethod
    def bytes_needed(layout: StageStateLayout, context_tokens: int) -> int:
        return context_tokens * layout.row_bytes + layout.fixed_bytes

    @cached_property
    def streams(self) -> DeviceStreams:
        """Those that move these rows; for an arena on a card."""
        return DeviceStreams(self.device)

    @property
    def nbytes(self) -> int:
        return self.bytes_needed(self.layout, self.context_tokens)

    def field_view(self, field: Field) -> torch.Tensor:
        """`[context_tokens, *field.shape]` of `field.dtype`, strided by whole rows; writing to it writes the rows."""
        columns = self.rows[:, field.offset : field.offset + field.nbytes]
        return columns.view(field.dtype).view(self.context_tokens, *field.shape)

    def _refusal(self, needed: int, room: int) -> OutOfMemory:
        fitting = max(0, (room - self.layout.fixed_bytes) // self.layout.row_bytes)
        return OutOfMemory(str(self.device), needed, self.context_tokens, fitting)
