"""Pictures for the fake engine: files that begin with `PIC`, of one position a byte, which see themselves."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import numpy as np

from parkd.errors import InvalidRequest
from parkd.state import ImageFacts, ImageSize, ImageTokens
from parkd.types import ImageSpan, TokenIds

IMAGE_TOKEN = "<|image|>"


class FakeImages:
    """An `ImageReader`."""

    sees_itself = True

    def __init__(self, token_id: int) -> None:
        self.tokens = ImageTokens(IMAGE_TOKEN, IMAGE_TOKEN, token_id)

    def size(self, data: bytes) -> ImageSize:
        self._check(data)
        return ImageSize(len(data), len(data))

    def facts(self, data: bytes) -> ImageFacts:
        self._check(data)
        return ImageFacts(sha256(data).digest(), len(data))

    def _check(self, data: bytes) -> None:
        if not data.startswith(b"PIC"):
            raise InvalidRequest("The image cannot be read: it is no picture.")


def shown(content: Any) -> str:
    """The text of a message's content, with the fake's word for a picture."""
    if isinstance(content, str):
        return content
    return "".join(IMAGE_TOKEN if part["type"] == "image" else part["text"] for part in content)


def whole_end(start: int, end: int, images: Sequence[ImageSpan]) -> int:
    """The end of a chunk that begins at `start`, moved out of a picture."""
    cut = next((image for image in images if image.start < end < image.stop), None)
    return end if cut is None else cut.start if cut.start > start else cut.stop


def with_images(ids: TokenIds, start: int, images: Sequence[ImageSpan]) -> tuple[TokenIds, list[bytes]]:
    """What is read for `ids` at `[start, start + n)`: at a picture's positions numbers made of its digest; and the
    digests of the pictures that begin there."""
    mixed, read = ids.copy(), []
    for image in images:
        if start <= image.start < start + len(ids):
            read.append(image.digest)
            seed = int.from_bytes(image.digest[:4], "little")
            mixed[image.start - start : image.stop - start] = seed + np.arange(image.stop - image.start)
    return mixed, read
