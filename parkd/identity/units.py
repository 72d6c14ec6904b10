"""Token ids and images to units: the elements by which two prompts are compared.

    token_ids  [ 12  7 | img img img | 99 ]
    units      [ 12  7 | h0  h1  h2  | 99 ]     h_k: top bit set, from the image's digest and k

The placeholder ids of an image say nothing about its content, so the units at its positions come from the content
alone. The top bit keeps the two kinds apart: no token id has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from parkd.types import ImageSpan, TokenIds, Units

IMAGE_BIT = np.uint64(1 << 63)

_FIRST_UNITS = 64
"""Units compared first: most conversations that are compared are others, and differ soon."""
_COMPARE_UNITS = 8192
"""Most units compared at a time."""

_UNITS_A_HASH = 8
"""Units from one 64-byte blake2b."""


def image_units(digest: bytes, count: int) -> Units:
    """`[count]` units of one image: 63 bits each of blake2b over the digest and a counter, top bit set."""
    stream = bytearray()
    for counter in range(-(-count // _UNITS_A_HASH)):
        stream += blake2b(digest + counter.to_bytes(8, "little"), digest_size=64, person=b"parkd-image").digest()
    return np.frombuffer(bytes(stream), dtype="<u8")[:count] | IMAGE_BIT


def units_of(token_ids: TokenIds, images: Sequence[ImageSpan] = ()) -> Units:
    """The units of `token_ids`, `[n]`, read-only. Without images they are a view of the ids, which must not change
    then.

    Raises ValueError if a span is outside the prompt or overlaps another, or if an id is negative.
    """
    if token_ids.size and int(token_ids.min()) < 0:
        raise ValueError("a token id is negative")
    units = token_ids.view(np.uint64)
    if images:
        units = units.copy()
    read_to = 0
    for image in sorted(images, key=lambda span: span.start):
        if not read_to <= image.start < image.stop <= len(units):
            raise ValueError(f"image span [{image.start}, {image.stop}) overlaps another or leaves the prompt")
        units[image.start : image.stop] = image_units(image.digest, image.stop - image.start)
        read_to = image.stop
    view = units.view()
    view.flags.writeable = False
    return view


def common_prefix(a: Units, b: Units) -> int:
    """How many leading units are equal."""
    stop = min(len(a), len(b))
    start, size = 0, _FIRST_UNITS
    while start < stop:
        end = min(start + size, stop)
        differs = a[start:end] != b[start:end]
        if differs.any():
            return start + int(differs.argmax())
        start, size = end, _COMPARE_UNITS
    return stop
