"""Pictures, from a file's bytes to what a vision tower reads. On the CPU and thread-safe: no model is touched.

    bytes -> format and size -> first frame -> upright -> RGB on white, 8 bits -> digest
                                                              `-> the model's own processor -> patches

A phone's picture is turned as its EXIF orientation says. Of an animation the first frame is read. What is transparent
lies on white, and 16-bit greys are scaled to 8. A file that ends too early is refused.
"""

from __future__ import annotations

import io
import json
import threading
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image, ImageOps, UnidentifiedImageError

from engine.errors import UnreadableImage
from engine.multimodal import VisionFamily, family_of

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_IMAGE_BYTES = 20 * 1024 * 1024
"""Of one picture's file."""
MAX_PIXELS = 50_000_000
"""Of one picture, told from its header before anything is unpacked: 150 MB as RGB."""
FACTS_KEPT = 1024
"""Pictures whose facts are remembered: an agent sends its whole history with every turn."""
_SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """What a prompt must know of a picture."""

    digest: bytes
    """SHA-256 of mode, width, height, pixels and how they are preprocessed."""
    tokens: int
    """Positions it takes."""


@dataclass(frozen=True, slots=True, eq=False)
class ImagePixels:
    """One picture as the vision tower reads it."""

    values: torch.Tensor
    """float32 patches `[patches, patch numbers]`, or `[1, channels, height, width]`, as the model has it."""
    grid: torch.Tensor | None
    """int64 `[1, 3]`: patches in time, height and width; None where all pictures are of one size."""
    rows: int = 0
    columns: int = 0
    """Positions in height and width, after patches were merged; 0 without a grid."""


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """How pictures are written in a prompt."""

    placeholder: str
    """What the chat template writes for one picture."""
    wrapped: str
    """What the model wants to read in its place; `token_id` stands in it once."""
    token_id: int
    """To be repeated for every position of the picture."""


class ImageProcessor:
    """One model's way with pictures."""

    def __init__(self, processor: Any, config: Any, tokens: ImageTokens) -> None:
        """`processor` is the library's, `config` the whole model's configuration, of a known family."""
        family = family_of(config)
        assert family is not None, "the model reads no pictures"
        self.family: VisionFamily = family
        self.tokens = tokens
        self._processor = processor
        self._fixed_tokens = 0 if family.by_grid else int(config.mm_tokens_per_image)
        # Crops beside the picture would make its length depend on more than its size.
        self._settings = {} if family.by_grid else {"do_pan_and_scan": False}
        recipe = {"class": type(processor).__name__, **processor.to_dict(), **self._settings}
        self._recipe = json.dumps(recipe, sort_keys=True, default=str).encode()
        self._facts: OrderedDict[bytes, ImageFacts] = OrderedDict()
        self._lock = threading.Lock()

    def facts(self, data: bytes) -> ImageFacts:
        """Digest and length of a picture's file. Unpacks it, unless this very file was seen lately.

        Raises UnreadableImage, whose message says what is wrong.
        """
        file = sha256(data).digest()
        with self._lock:
            known = self._facts.get(file)
            if known is not None:
                self._facts.move_to_end(file)
                return known
        image = decode(data)
        facts = ImageFacts(self._digest(image), self._length(image))
        with self._lock:
            self._facts[file] = facts
            while len(self._facts) > FACTS_KEPT:
                self._facts.popitem(last=False)
        return facts

    def pixels(self, data: bytes) -> ImagePixels:
        """What the vision tower reads of a picture's file. Raises UnreadableImage."""
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

    def _length(self, image: Image.Image) -> int:
        if self._fixed_tokens:
            return self._fixed_tokens
        try:
            patches = self._processor.get_number_of_image_patches(image.height, image.width)
        except ValueError as error:
            raise UnreadableImage(f"the model's processor refuses it: {error}") from error
        return int(patches) // int(self._processor.merge_size) ** 2


def decode(data: bytes) -> Image.Image:
    """The first frame of a picture's file, upright, RGB with 8 bits a channel. Raises UnreadableImage."""
    if len(data) > MAX_IMAGE_BYTES:
        raise UnreadableImage(f"its file has {len(data)} bytes and may have {MAX_IMAGE_BYTES}; send a smaller one")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as file:
            width, height = file.size
            if width * height > MAX_PIXELS:
                raise UnreadableImage(_too_many(width, height))
            file.load()
            return _plain(ImageOps.exif_transpose(file))
    except UnreadableImage:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise UnreadableImage(f"it has more than {MAX_PIXELS} pixels; send a smaller one") from error
    except UnidentifiedImageError as error:
        raise UnreadableImage(f"it is none of {', '.join(FORMATS)}, or its head is damaged") from error
    except MemoryError as error:
        raise UnreadableImage("there is no memory to unpack it; send a smaller one") from error
    except Exception as error:
        # Decoders fail in many ways, all of which lie in the file.
        raise UnreadableImage(f"its file is damaged or incomplete ({error})") from error


def _too_many(width: int, height: int) -> str:
    return f"it has {width} x {height} pixels, which is more than {MAX_PIXELS}; send a smaller one"


def _plain(image: Image.Image) -> Image.Image:
    """RGB, what is transparent on white."""
    if image.mode in _SIXTEEN_BITS:
        # The library's conversion cuts everything above 255 off.
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        shown = image.convert("RGBA")
        white = Image.new("RGBA", shown.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, shown).convert("RGB")
    return image.convert("RGB")


def processor_class(config: Any) -> Any:
    """The library's class of processor for a model of a known family."""
    family = family_of(config)
    assert family is not None, "the model reads no pictures"
    return getattr(transformers, family.processor)


def image_tokens(config: Any, tokenizer: Any) -> ImageTokens:
    """How pictures stand in this model's prompts; `tokenizer` is the library's.

    As the library's own processors write them: Qwen's template has the picture's token itself, Gemma's has the begin
    of a picture, which becomes begin, picture and end between empty lines.
    """
    image = tokenizer.convert_ids_to_tokens(config.image_token_id)
    begin = getattr(config, "boi_token_index", None)
    if begin is None:
        return ImageTokens(image, image, config.image_token_id)
    first, last = tokenizer.convert_ids_to_tokens([begin, config.eoi_token_index])
    return ImageTokens(first, f"\n\n{first}{image}{last}\n\n", config.image_token_id)
