"""Images in a timeline: which positions they take, and the offset of rotary positions after them.

timeline   0 ---- [ image ] ------- [ image ] ---- position
offset     0            | o               | o'                 of rotary positions, in the fixed state
floor                 ^                                        offsets are known from here on
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
        self.floor = 0
        """From this position up to the present one, the offset at each is known. What was restored tells only the
        offset at its end."""
        self._changes: list[tuple[int, int]] = []
        """(position, offset from there on) since the floor, ascending; 0 before the first."""
        self._spans: list[tuple[int, int]] = []
        """Ranges of live images with bidirectional attention that were read here, not restored."""

    def reading(self, images: Sequence[PromptImage], start: int, end: int) -> ImageReading | None:
        """The reading of the images that overlap `[start, end)`; None if none does. Raises the errors of
        `reading_of`."""
        return reading_of(images, self.tower, start, end, self.offset)

    def chunk(self, reading: ImageReading | None, start: int, stop: int) -> ChunkImages:
        """The image data of the tokens `[start, stop)`."""
        return self.offset.plain(start, stop) if reading is None else reading.chunk(start, stop)

    def was_read(self, start: int, chunk: ChunkImages) -> None:
        """Records that the chunk at `start` was read."""
        if chunk.offsets:
            self._changes += [(start + index, offset) for index, offset in chunk.offsets]
            self.offset.set(self._changes[-1][1])
        self._spans += [(start + first, start + last) for first, last in chunk.spans]

    def check_cut(self, position: int) -> None:
        """Raises ValueError if the timeline cannot be cut at `position`."""
        if any(start < position < stop for start, stop in self._spans):
            raise ValueError(f"cannot truncate to {position}: it is inside an image whose rows are of the whole image")

    def cut(self, position: int) -> None:
        """The timeline was cut to `position`, not below the floor."""
        self._forget_beyond(position)
        if self.offset.value != (offset := self._offset_at(position)):
            self.offset.set(offset)

    def was_restored(self, position: int, kept: int) -> None:
        """The fixed state at `position` was written; the rows `[0, kept)` were live before and stay."""
        self._forget_beyond(kept)
        if kept < self.floor:
            self.floor, kept = 0, 0
            self._changes.clear()
        self.offset.reload()
        # An image takes fewer rotary positions than tokens, or as many: offsets only fall. So where two are equal, so
        # are all between, and a conversation without images can be cut anywhere.
        if self.offset.value != self._offset_at(kept):
            self.floor, self._changes = position, [(position, self.offset.value)]

    def reset(self) -> None:
        self._spans.clear()
        self._changes.clear()
        self.floor = 0
        self.offset.set(0)

    def _offset_at(self, position: int) -> int:
        return next((offset for start, offset in reversed(self._changes) if start <= position), 0)

    def _forget_beyond(self, position: int) -> None:
        self._spans = [span for span in self._spans if span[1] <= position]
        self._changes = [change for change in self._changes if change[0] <= position]
