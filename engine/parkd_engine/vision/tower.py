"""Reads images into a timeline: the vision tower, its output in place of embeddings, and rotary positions.

    chunk    [ text | image ......... | text ]
    rows      embed   tower's output    embed
    position  t + o   by row, column    t + o'        o' = o + longer side - image length        (M-RoPE)

The position offset `o` is conversation state. It is in the fixed state of the first stage, and is captured and restored
with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from parkd.errors import EngineFailure, UnreadableImage, unfinished
from parkd_engine.failures import stage_failed
from parkd_engine.forward.stages import moved_twin
from parkd_engine.vision.chunks import ChunkImages, PositionOffset
from parkd_engine.vision.images import ImagePixels, ImageProcessor


@dataclass(frozen=True, slots=True, eq=False)
class PromptImage:
    """An image at the positions `[start, stop)` of a timeline."""

    start: int
    stop: int
    data: bytes
    """Content of the image file."""


class VisionTower:
    """The vision tower of a model, on one device."""

    def __init__(self, model: Any, processor: ImageProcessor, device: torch.device) -> None:
        """`model` is the library's whole model. Weights that are on `device` already are shared with it."""
        self.processor = processor
        self.device = device
        self.encoded = 0
        """Number of images read so far."""
        outer = model.base_model
        decoder = outer._modules["language_model"]
        try:
            outer._modules["language_model"] = None  # it is placed in stages
            self.module: nn.Module = moved_twin(outer, device)
        finally:
            outer._modules["language_model"] = decoder

    def read(self, image: PromptImage) -> tuple[ImagePixels, torch.Tensor]:
        """Pixels, and features `[1 + added, stop - start, hidden]`: what takes the place of embeddings, and what is
        added after each of the model's first layers (DeepStack), if the tower makes that. Raises EngineFailure."""
        try:
            pixels = self.processor.pixels(image.data)
        except UnreadableImage as error:  # Its facts could be read, so this is not the request's fault alone.
            raise EngineFailure(unfinished(error.reason)) from error
        try:
            with torch.inference_mode():
                arguments = {} if pixels.grid is None else {"image_grid_thw": pixels.grid.to(self.device)}
                dtype = next(self.module.parameters()).dtype
                values = pixels.values.to(self.device, dtype)
                output: Any = self.module.get_image_features(values, **arguments)  # type: ignore[operator]
                deep = getattr(output, "deepstack_features", None) or ()
                features = torch.stack([output.pooler_output[0], *(each[0] for each in deep)])
        except Exception as error:
            raise stage_failed(0, "reading an image", error) from error
        taken, room = features.shape[1], image.stop - image.start
        if taken != room:
            raise EngineFailure(unfinished(f"an image takes {taken} positions, and the prompt leaves {room}"))
        self.encoded += 1
        return pixels, features


class ImageReading:
    """The images of one `extend`. The tower reads each with the first chunk that needs it; its output is dropped after
    the last one."""

    def __init__(
        self, tower: VisionTower, images: Sequence[PromptImage], start: int, end: int, offset: PositionOffset
    ) -> None:
        """Uses those of `images` that overlap `[start, end)`. Raises ValueError if they overlap each other, or if an
        image with bidirectional attention is not entirely inside."""
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
        """Whether `position` is inside an image that must be read in one chunk. No chunk may end or begin there."""
        return self._whole and any(image.start < position < image.stop for image in self._images)

    def stop_for(self, start: int, stop: int) -> int:
        """The end of the chunk that begins at `start` and should end at `stop`, moved so that it cuts no image."""
        cut = next((image for image in self._images if image.start < stop < image.stop), None)
        if not self._whole or cut is None:
            return stop
        return cut.start if cut.start > start else cut.stop

    def chunk(self, start: int, stop: int) -> ChunkImages:
        """The image data of `[start, stop)`. Raises the errors of `VisionTower.read`."""
        here = [image for image in self._images if image.start < stop and start < image.stop]
        rows, added = [], []
        for image in here:
            if image.start not in self._read:
                self._read[image.start] = self._tower.read(image)
            first, last = max(start, image.start), min(stop, image.stop)
            features = self._read[image.start][1][:, first - image.start : last - image.start]
            rows.append((first - start, features[0]))
            if len(features) > 1:
                added.append((first - start, features[1:]))
        spans = tuple((image.start - start, image.stop - start) for image in here) if self._whole else ()
        positions, offsets = self._positions(here, start, stop) if self._by_grid else (None, ())
        for image in here:
            if image.stop <= stop:
                del self._read[image.start]
        return ChunkImages(positions, spans, tuple(rows), tuple(added), offsets)

    def _positions(
        self, here: Sequence[PromptImage], start: int, stop: int
    ) -> tuple[torch.Tensor, tuple[tuple[int, int], ...]]:
        """Rotary positions of a chunk (time, height, width), `[3, 1, q]`, and the offsets of `ChunkImages`. Formula:
        `get_rope_index` of the library's Qwen3.5 and Qwen3-VL."""
        offset = self._offset.value
        offsets = []
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
                offsets.append((last - start, offset))
        parts.append(_text(at + offset, stop + offset))
        return torch.from_numpy(np.concatenate(parts, axis=1)).unsqueeze(1), tuple(offsets)


def reading_of(
    images: Sequence[PromptImage], tower: VisionTower | None, start: int, end: int, offset: PositionOffset
) -> ImageReading | None:
    """The reading of the images that overlap `[start, end)`; None if none does. Raises ValueError if there is no tower,
    and the errors of `ImageReading`."""
    ahead = [image for image in images if image.stop > start and image.start < end]
    if not ahead:
        return None
    if tower is None:
        raise ValueError("there are images and no vision tower to read them")
    return ImageReading(tower, ahead, start, end, offset)


def _text(first: int, last: int) -> npt.NDArray[np.int64]:
    return np.broadcast_to(np.arange(first, last), (3, max(0, last - first)))
