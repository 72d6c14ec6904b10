"""Images in a timeline: which positions they take, and the offset of rotary positions after them.

timeline   0 ---- [ image ] ------- [ image ] ---- position
offset     0            | o               | o'                 of rotary positions, in the fixed state
spans             |-----|           |-----|                    no cut inside images with bidirectional attention
"""

from __future__ import annotations

from collections.abc import Sequence

from parkd_engine.arenas.arena import StageArena
from parkd_engine.vision.chunks import ChunkImages, PositionOffset
from parkd_engine.vision.tower import ImageReading, PromptImage, VisionTower, reading_of


class TimelineImages:
    """The images of one session's timeline. For text models it costs nothing and changes nothing."""

    def __init__(self, arena: StageArena, tower: VisionTower | None) -> None:
        """`arena` is the first stage's."""
        self.tower = tower
        self.offset = PositionOffset(arena)
        self._spans: list[tuple[int, int]] = []
        """Ranges of live images with bidirectional attention that were read here, not restored."""

    def reading(self, images: Sequence[PromptImage], start: int, end: int) -> ImageReading | None:
        """The reading of the images that overlap `[start, end)`; None if none does. Raises the errors of
        `reading_of`."""
        return reading_of(images, self.tower, start, end, self.offset)

    def chunk(self, reading: ImageReading | None, start: int, stop: int) -> tuple[ChunkImages, int]:
        """The image data of the tokens `[start, stop)`, and the offset after them."""
        if reading is None:
            return self.offset.plain(start, stop), self.offset.value
        return reading.chunk(start, stop)

    def was_read(self, start: int, chunk: ChunkImages, offset: int) -> None:
        """Records that the chunk at `start` was read; `offset` is the one after it."""
        if offset != self.offset.value:
            self.offset.set(offset)
        self._spans += [(start + first, start + last) for first, last in chunk.spans]

    def check_cut(self, position: int) -> None:
        """Raises ValueError if the timeline cannot be cut at `position`."""
        if any(start < position < stop for start, stop in self._spans):
            raise ValueError(f"cannot truncate to {position}: it is inside an image whose rows are of the whole image")

    def forget_beyond(self, position: int) -> None:
        """Forgets images that end after `position`."""
        self._spans = [span for span in self._spans if span[1] <= position]

    def reset(self) -> None:
        self._spans.clear()
        self.offset.set(0)
