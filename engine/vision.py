"""Pictures in a timeline: the vision tower, where its output stands, and the positions that tokens get from it.

    chunk    [ text | image ......... | text ]
    rows      embed   tower's output    embed
    position  t + o   by row, column    t + o'        o' = o + longer side - image length        (M-RoPE)

The offset `o` of a position is conversation state: it is in the fixed state of the first stage, so that it is kept,
captured and restored with everything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from engine.arena import StageArena
from engine.errors import EngineError, StageFailed
from engine.images import ImagePixels, ImageProcessor
from engine.layout import OFFSET_FIELD
from engine.stages import moved_twin


@dataclass(frozen=True, slots=True, eq=False)
class PromptImage:
    """A picture at the positions `[start, stop)` of a timeline."""

    start: int
    stop: int
    data: bytes
    """Its file."""


@dataclass(frozen=True, slots=True, eq=False)
class ChunkImages:
    """What a chunk of `q` tokens has beside their ids."""

    position_ids: torch.Tensor | None = None
    """int64 `[3, 1, q]`; None: as many as there are tokens before."""
    spans: tuple[tuple[int, int], ...] = ()
    """Ranges of the chunk's own tokens in which each sees all others."""
    rows: tuple[tuple[int, torch.Tensor], ...] = ()
    """(token of the chunk, embeddings `[n, hidden]`) that stand there instead of the ids'."""


NO_IMAGES = ChunkImages()


class PositionOffset:
    """By how much positions run ahead of, or behind, the tokens counted. Always 0 without M-RoPE."""

    def __init__(self, arena: StageArena) -> None:
        """`arena` is the first stage's."""
        fields = [field for field in arena.layout.fixed_fields if field.name == OFFSET_FIELD]
        self._live = arena.fixed_view(fields[0]) if fields else None
        self.value = 0
        """Of the next token; within a picture that is half read, of its start."""

    def set(self, value: int) -> None:
        self.value = value
        if self._live is not None:
            self._live.fill_(value)

    def reload(self) -> None:
        """After the fixed state was replaced."""
        if self._live is not None:
            self.value = int(self._live.item())

    def plain(self, start: int, stop: int) -> ChunkImages:
        """A chunk of text at `[start, stop)`."""
        if self._live is None:
            return NO_IMAGES
        return ChunkImages(torch.arange(start + self.value, stop + self.value).expand(3, 1, -1))


class VisionTower:
    """The part of a model that reads pictures, on one device."""

    def __init__(self, model: Any, processor: ImageProcessor, device: torch.device) -> None:
        """`model` is the library's whole model; its weights are shared where they are on `device` already."""
        self.processor = processor
        self.device = device
        self.encoded = 0
        """Pictures read over its life."""
        outer = model.base_model
        decoder = outer._modules["language_model"]
        try:
            outer._modules["language_model"] = None  # it has stages of its own
            self.module: nn.Module = moved_twin(outer, device)
        finally:
            outer._modules["language_model"] = decoder

    def read(self, image: PromptImage) -> tuple[ImagePixels, torch.Tensor]:
        """The picture and its embeddings `[stop - start, hidden]`. Raises UnreadableImage, EngineError, StageFailed."""
        pixels = self.processor.pixels(image.data)
        try:
            with torch.inference_mode():
                arguments = {} if pixels.grid is None else {"image_grid_thw": pixels.grid.to(self.device)}
                dtype = next(self.module.parameters()).dtype
                values = pixels.values.to(self.device, dtype)
                output: Any = self.module.get_image_features(values, **arguments).pooler_output  # type: ignore[operator]
        except Exception as error:
            raise StageFailed(0, "reading an image", error) from error
        rows = output[0]
        if len(rows) != image.stop - image.start:
            raise EngineError(f"an image takes {len(rows)} positions, and the prompt leaves {image.stop - image.start}")
        self.encoded += 1
        return pixels, rows


class ImageReading:
    """The pictures of one `extend`. Each is read when its first position is, and forgotten behind its last."""

    def __init__(
        self, tower: VisionTower, images: Sequence[PromptImage], start: int, end: int, offset: PositionOffset
    ) -> None:
        """Of `images` those count that reach into `[start, end)`. Raises ValueError if they overlap, or if a picture
        that sees itself is not wholly inside."""
        self._tower = tower
        self._offset = offset
        self._whole = tower.processor.family.sees_itself
        self._by_grid = tower.processor.family.by_grid
        self._images = sorted((i for i in images if start < i.stop and i.start < end), key=lambda i: i.start)
        self._read: dict[int, tuple[ImagePixels, torch.Tensor]] = {}
        reached = 0
        for image in self._images:
            if not reached <= image.start < image.stop:
                raise ValueError(f"the image at [{image.start}, {image.stop}) overlaps another or is empty")
            if self._whole and not start <= image.start < image.stop <= end:
                raise ValueError(f"the image at [{image.start}, {image.stop}) cannot be read in parts")
            reached = image.stop

    def cuts(self, position: int) -> bool:
        """Whether no chunk may end there, nor anything go on from there."""
        return self._whole and any(image.start < position < image.stop for image in self._images)

    def stop_for(self, start: int, stop: int) -> int:
        """The end of the chunk that begins at `start` and would end at `stop`."""
        cut = next((image for image in self._images if image.start < stop < image.stop), None)
        if not self._whole or cut is None:
            return stop
        return cut.start if cut.start > start else cut.stop

    def chunk(self, start: int, stop: int) -> tuple[ChunkImages, int]:
        """What `[start, stop)` has of pictures, and the offset behind it. Raises as `VisionTower.read`."""
        here = [image for image in self._images if image.start < stop and start < image.stop]
        rows = []
        for image in here:
            if image.start not in self._read:
                self._read[image.start] = self._tower.read(image)
            first, last = max(start, image.start), min(stop, image.stop)
            rows.append((first - start, self._read[image.start][1][first - image.start : last - image.start]))
        spans = tuple((image.start - start, image.stop - start) for image in here) if self._whole else ()
        positions, offset = self._positions(here, start, stop) if self._by_grid else (None, 0)
        for image in here:
            if image.stop <= stop:
                del self._read[image.start]
        return ChunkImages(positions, spans, tuple(rows)), offset

    def _positions(self, here: Sequence[PromptImage], start: int, stop: int) -> tuple[torch.Tensor, int]:
        """Three coordinates of every token of a chunk: time, height and width, `[3, 1, q]`, and the offset behind it.
        Formula: `get_rope_index` of the library's Qwen3.5."""
        offset = self._offset.value
        parts: list[npt.NDArray[np.int64]] = []
        at = start
        for image in here:
            pixels = self._read[image.start][0]
            first, last = max(start, image.start), min(stop, image.stop)
            parts.append(_text(at + offset, first + offset))
            inside = np.arange(first - image.start, last - image.start)
            base = image.start + offset
            parts.append(base + np.stack([inside * 0, inside // pixels.columns, inside % pixels.columns]))
            at = last
            if last == image.stop:
                offset += max(pixels.rows, pixels.columns) - (image.stop - image.start)
        parts.append(_text(at + offset, stop + offset))
        return torch.from_numpy(np.concatenate(parts, axis=1)).unsqueeze(1), offset


def reading_of(
    images: Sequence[PromptImage], tower: VisionTower | None, start: int, end: int, offset: PositionOffset
) -> ImageReading | None:
    """Of the pictures that reach into `[start, end)`; None if none does. Raises ValueError without a tower to read
    them, and as `ImageReading`."""
    ahead = [image for image in images if image.stop > start and image.start < end]
    if not ahead:
        return None
    if tower is None:
        raise ValueError("there are images and no vision tower to read them")
    return ImageReading(tower, ahead, start, end, offset)


def _text(first: int, last: int) -> npt.NDArray[np.int64]:
    return np.broadcast_to(np.arange(first, last), (3, max(0, last - first)))
