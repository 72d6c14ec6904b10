"""What pictures do to a timeline: which of its positions they hold, and how far positions run ahead behind them.

timeline   0 ---- [ image ] ------- [ image ] ---- position
offset     0            | o               | o'                 of rotary positions, in the fixed state
spans      |-- of pictures that see themselves: no cut inside --|
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.arena import StageArena
from engine.vision import ChunkImages, ImageReading, PositionOffset, PromptImage, VisionTower, reading_of


class TimelineImages:
    """Of one session. For models of text it costs nothing and changes nothing."""

    def __init__(self, arena: StageArena, tower: VisionTower | None) -> None:
        """`arena` is the first stage's."""
        self.tower = tower
        self.offset = PositionOffset(arena)
        self._spans: list[tuple[int, int]] = []
        """Pictures that see themselves, of those that were read here and are live."""

    def reading(self, images: Sequence[PromptImage], start: int, end: int) -> ImageReading | None:
        """Of the pictures that reach into `[start, end)`; None if none does. Raises as `reading_of`."""
        return reading_of(images, self.tower, start, end, self.offset)

    def chunk(self, reading: ImageReading | None, start: int, stop: int) -> tuple[ChunkImages, int]:
        """What the tokens `[start, stop)` have beside their ids, and the offset behind them."""
        if reading is None:
            return self.offset.plain(start, stop), self.offset.value
        return reading.chunk(start, stop)

    def was_read(self, start: int, chunk: ChunkImages, offset: int) -> None:
        """The chunk at `start` is part of the timeline, and `offset` that behind it."""
        if offset != self.offset.value:
            self.offset.set(offset)
        self._spans += [(start + first, start + last) for first, last in chunk.spans]

    def check_cut(self, position: int) -> None:
        """Raises ValueError if the timeline cannot end there."""
        if any(start < position < stop for start, stop in self._spans):
            raise ValueError(f"cannot truncate to {position}: it is inside an image whose rows are of the whole image")

    def forget_beyond(self, position: int) -> None:
        """Those that end there or before stay."""
        self._spans = [span for span in self._spans if span[1] <= position]

    def reset(self) -> None:
        self._spans.clear()
        self.offset.set(0)
