"""Turns image files into the input of a vision tower. Runs on the CPU without a model; thread-safe.

    bytes -> format and size -> first frame -> upright -> RGB on white, 8 bits -> digest
                                                              `-> the model's own processor -> patches

The EXIF orientation is applied. Only the first frame of an animation is read. Transparent images are put on white, and
16-bit greys are scaled to 8 bits. Truncated files are refused.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image, ImageOps, UnidentifiedImageError

from parkd.errors import UnreadableImage
from parkd.state import ImageFacts, ImageSize, ImageTokens
from parkd_engine.families.family import VisionFamily
from parkd_engine.families.records import vision_of

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_IMAGE_BYTES = 20 * 1024 * 1024
"""Size of one image file."""
MAX_PIXELS = 50_000_000
"""Pixels of one image, read from its header before it is decoded: 150 MB as RGB."""
MAX_SCANS = 64
"""Scans of a JPEG. A progressive one has about ten, each of which is a pass over all pixels: a file can hold a quarter
of a million of them, which would take hours."""
MAX_READS = 65_536
"""Pieces in which the header and the chunks of one file are read: one of 20 MiB in chunks of 1 KiB has 61,440. The
library goes through them in Python; a file of empty chunks or filling bytes would have millions, and take minutes."""
_SCAN = b"\xff\xda"
"""The marker of a scan. In coded pixels, 255 is followed by 0."""
_SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")


@dataclass(frozen=True, slots=True, eq=False)
class ImagePixels:
    """One image as the input of the vision tower."""

    values: torch.Tensor
    """float32 `[patches, numbers per patch]` or `[1, channels, height, width]`, depending on the model."""
    grid: torch.Tensor | None
    """int64 `[1, 3]`: patches in time, height and width; None if the model has one size for all images."""
    rows: int = 0
    columns: int = 0
    """Positions in height and width, after merging patches; 0 without a grid."""


class _CountedReads(io.BytesIO):
    """An image file that ends the reading of one that is all headers. Raises UnreadableImage."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        self._reads += 1
        if self._reads > MAX_READS:
            raise UnreadableImage(f"its header is in more than {MAX_READS} pieces; save it again")
        return super().read(size)


class ImageProcessor:
    """Reads images for one model."""

    def __init__(self, processor: Any, config: Any, tokens: ImageTokens) -> None:
        """`processor` is the library's, `config` the whole model's configuration, of a known family."""
        family = vision_of(config)
        assert family is not None, "the model reads no pictures"
        self.family: VisionFamily = family
        self.sees_itself = family.sees_itself
        self.tokens = tokens
        self._processor = processor
        self._fixed_tokens = 0 if family.by_grid else int(config.mm_tokens_per_image)
        # With additional crops, the number of positions would depend on more than the image's size.
        self._settings = {} if family.by_grid else {"do_pan_and_scan": False}
        recipe = {"class": type(processor).__name__, **processor.to_dict(), **self._settings}
        self._recipe = json.dumps(recipe, sort_keys=True, default=str).encode()

    def size(self, data: bytes) -> ImageSize:
        """What the file's header promises. Raises UnreadableImage."""
        width, height = size_of(data)
        # Which side is up is not known without decoding some files.
        return ImageSize(width * height, min(self._length(width, height), self._length(height, width)))

    def facts(self, data: bytes) -> ImageFacts:
        """Digest and length of an image file, which is decoded.

        Raises UnreadableImage, whose message says what is wrong.
        """
        image = decode(data)
        return ImageFacts(self._digest(image), self._length(image.width, image.height))

    def pixels(self, data: bytes) -> ImagePixels:
        """The vision tower's input for an image file. Raises UnreadableImage."""
        image = decode(data)
        try:
            made = self._processor(images=[image], return_tensors="pt", **self._settings)
        except ValueError as error:
            raise UnreadableImage(f"the model's processor refuses it: {error}") from error
        grid = made.get("image_grid_thw")
        if grid is None:
            return ImagePixels(made["pixel_values"], None)
        _, height, width = (int(number) for number in grid[0])
        merge = self._processor.merge_size
        return ImagePixels(made["pixel_values"], grid, height // merge, width // merge)

    def _digest(self, image: Image.Image) -> bytes:
        width, height = image.size
        hasher = sha256()
        for part in (image.mode.encode(), f"{width} {height}".encode(), self._recipe, image.tobytes()):
            hasher.update(len(part).to_bytes(8, "little"))
            hasher.update(part)
        return hasher.digest()

    def _length(self, width: int, height: int) -> int:
        if self._fixed_tokens:
            return self._fixed_tokens
        try:
            patches = self._processor.get_number_of_image_patches(height, width)
        except ValueError as error:
            raise UnreadableImage(f"the model's processor refuses it: {error}") from error
        return int(patches) // int(self._processor.merge_size) ** 2


def size_of(data: bytes) -> tuple[int, int]:
    """Width and height by the header of an image file. Raises UnreadableImage."""
    with _opened(data) as file:
        return file.size


def decode(data: bytes) -> Image.Image:
    """The first frame of an image file, upright, RGB with 8 bits per channel. Raises UnreadableImage."""
    with _opened(data) as file:
        file.load()
        return _plain(ImageOps.exif_transpose(file))


@contextmanager
def _opened(data: bytes) -> Iterator[Image.Image]:
    """An image file of a size that may be decoded. What fails in the context is the file's fault: UnreadableImage."""
    if len(data) > MAX_IMAGE_BYTES:
        raise UnreadableImage(f"its file has {len(data)} bytes and may have {MAX_IMAGE_BYTES}; send a smaller one")
    try:
        with Image.open(_CountedReads(data), formats=FORMATS) as file:
            width, height = file.size
            if width * height > MAX_PIXELS:
                raise UnreadableImage(_too_many(width, height))
            if file.format == "JPEG" and (scans := data.count(_SCAN)) > MAX_SCANS:
                raise UnreadableImage(f"it is stored in {scans} scans and may have {MAX_SCANS}; save it again")
            yield file
    except UnreadableImage:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise UnreadableImage(f"it has more than {MAX_PIXELS} pixels; send a smaller one") from error
    except UnidentifiedImageError as error:
        raise UnreadableImage(f"it is none of {', '.join(FORMATS)}, or its header is damaged") from error
    except MemoryError as error:
        raise UnreadableImage("there is not enough memory to decode it; send a smaller one") from error
    except Exception as error:
        # Decoders fail in many ways; the file is always the cause.
        raise UnreadableImage(f"its file is damaged or incomplete ({error})") from error


def _too_many(width: int, height: int) -> str:
    return f"it has {width} x {height} pixels, which is more than {MAX_PIXELS}; send a smaller one"


def _plain(image: Image.Image) -> Image.Image:
    """Converts to RGB, with transparent images on white."""
    if image.mode in _SIXTEEN_BITS:
        # Pillow's own conversion would clip everything above 255.
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        shown = image.convert("RGBA")
        white = Image.new("RGBA", shown.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, shown).convert("RGB")
    return image.convert("RGB")


def processor_class(config: Any) -> Any:
    """The library's image processor class for a model of a known family."""
    family = vision_of(config)
    assert family is not None, "the model reads no pictures"
    return getattr(transformers, family.processor)


def image_tokens(config: Any, tokenizer: Any) -> ImageTokens:
    """How images are written in this model's prompts; `tokenizer` is the library's.

    Does what the library's processors do.
    """
    family = vision_of(config)
    assert family is not None, "the model reads no pictures"
    image = tokenizer.convert_ids_to_tokens(config.image_token_id)
    if not family.begins_only:
        return ImageTokens(image, image, config.image_token_id)
    first, last = tokenizer.convert_ids_to_tokens([config.boi_token_index, config.eoi_token_index])
    return ImageTokens(first, f"\n\n{first}{image}{last}\n\n", config.image_token_id)
