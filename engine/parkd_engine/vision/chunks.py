"""What a chunk of tokens takes from images: embeddings, rotary positions, and the offset between these and tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from parkd_engine.arenas.arena import StageArena
from parkd_engine.arenas.layout import OFFSET_FIELD


@dataclass(frozen=True, slots=True, eq=False)
class ChunkImages:
    """The image data of a chunk of `q` tokens."""

    position_ids: torch.Tensor | None = None
    """Rotary positions, int64 `[3, 1, q]`; None: equal to the token positions."""
    spans: tuple[tuple[int, int], ...] = ()
    """Ranges within the chunk in which attention is bidirectional."""
    rows: tuple[tuple[int, torch.Tensor], ...] = ()
    """(index of the first token in the chunk, embeddings `[n, hidden]`), in place of the ids' embeddings."""
    added: tuple[tuple[int, torch.Tensor], ...] = ()
    """(index of the first token in the chunk, `[layers, n, hidden]`), added to the hidden states after each of the
    model's first layers. Later tokens see of it what keys and values have taken up, so none of it is state."""
    offsets: tuple[tuple[int, int], ...] = ()
    """(index in the chunk, offset of rotary positions from there on), where images end."""


NO_IMAGES = ChunkImages()


class PositionOffset:
    """Rotary position minus token position. Always 0 without M-RoPE."""

    def __init__(self, arena: StageArena) -> None:
        """`arena` is the first stage's."""
        fields = [field for field in arena.layout.fixed_fields if field.name == OFFSET_FIELD]
        self._live = arena.fixed_view(fields[0]) if fields else None
        self.value = 0
        """The offset of the next token; inside a partly read image, the offset at its start."""

    def set(self, value: int) -> None:
        self.value = value
        if self._live is not None:
            self._live.fill_(value)

    def reload(self) -> None:
        """Reads the value again after the fixed state was replaced."""
        if self._live is not None:
            self.value = int(self._live.item())

    def plain(self, start: int, stop: int) -> ChunkImages:
        """A chunk of text at `[start, stop)`."""
        if self._live is None:
            return NO_IMAGES
        return ChunkImages(torch.arange(start + self.value, stop + self.value).expand(3, 1, -1))
