"""The two conversations of a canary: tokens drawn with a fixed seed, and an image if the model reads them causally."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

import numpy as np

from parkd.engine_adapter.base import Engine
from parkd.identity.units import units_of
from parkd.types import ImageSpan, TokenIds, Units

SIDE_PIXELS = 64
"""Of the image."""


@dataclass(frozen=True, slots=True, eq=False)
class Talk:
    """A prompt. `[0, cut)` and `[cut, end)` are read in one call each; the answer begins with the token at `end`."""

    ids: TokenIds
    """`[end + 1]`."""
    cut: int
    end: int
    images: tuple[ImageSpan, ...] = ()

    @property
    def units(self) -> Units:
        return units_of(self.ids, self.images)


def talks_of(engine: Engine, tokens: int) -> tuple[Talk, Talk]:
    """Two conversations of about `tokens` tokens; the second is a little longer, so that it overwrites the first. The
    first begins with an image if the model reads images whose positions do not attend to each other."""
    vocabulary = engine.info.vocab_size
    first, second = (np.random.default_rng(seed).integers(0, vocabulary, tokens + 5) for seed in (1, 2))
    images: tuple[ImageSpan, ...] = ()
    if engine.images is not None and not engine.images.sees_itself:
        data = _png(SIDE_PIXELS)
        facts = engine.images.facts(data)
        image_id = engine.images.tokens.token_id
        first, second = (np.where(ids == image_id, (image_id + 1) % vocabulary, ids) for ids in (first, second))
        images = (ImageSpan(2, 2 + facts.tokens, facts.digest, data),)
        shown = np.full(facts.tokens, image_id, dtype=first.dtype)
        first = np.concatenate([first[:2], shown, first[2:]])
        second = np.concatenate([second, second[: facts.tokens]])
    return _talk(first[:-4], images), _talk(second)


def _talk(ids: TokenIds, images: tuple[ImageSpan, ...] = ()) -> Talk:
    end = len(ids) - 1
    after = images[-1].stop if images else 0
    return Talk(ids, after + max(1, (end - after) * 2 // 3), end, images)


def _png(side: int) -> bytes:
    """A square image in which no two rows are alike."""
    pixels = np.random.default_rng(3).integers(0, 256, (side, side, 3), dtype=np.uint8)
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_png_chunk(name, body) for name, body in parts)


def _png_chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
