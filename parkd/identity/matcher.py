"""What can be reused, and where prompts differ: pure decisions over plain values.

prompt   |======== common ========|-------- new --------|
parked   |======== common ========|........
                    ^ resumable position: exact state exists here, and at least one token is left to read
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from parkd.engine_adapter.base import Tokenizer
from parkd.identity.units import IMAGE_BIT, common_prefix
from parkd.state import last_exact
from parkd.types import Divergence, ImageSpan, PromptIdentity, Unit, Units

__all__ = [
    "common_prefix",
    "divergence_of",
    "image_at",
    "outside_images",
    "resumable_position",
]

AN_IMAGE = "an image"
AN_END = "an end"
"""Instead of the mark behind a part of a chat, which is no character, where prompts are characters."""
_SHOWN_TOKENS = 3
"""Tokens that are quoted where two prompts differ."""


def outside_images(position: int, images: Sequence[ImageSpan]) -> int:
    """`position`, or the start of the image around it, if state inside that image depends on the whole image."""
    return next((i.start for i in images if i.sees_itself and i.start < position < i.stop), position)


def resumable_position(
    common: int, prompt_len: int, floor: int | None, checkpoints: Sequence[int], images: Sequence[ImageSpan] = ()
) -> int:
    """The last position at which there is exact state from which a prompt of `prompt_len` tokens can continue.

    At most `common`, and at most `prompt_len - 1`, since the last token always runs for its logits. The state can be
    cut anywhere from `floor` on (None: nowhere); else it resumes at one of `checkpoints` (in any order), or at 0.
    Nothing resumes inside an image that sees itself.
    """
    return last_exact(outside_images(max(0, min(common, prompt_len - 1)), images), checkpoints, floor)


def divergence_of(
    identity: PromptIdentity, other_units: Units, tokenizer: Tokenizer, unit: Unit = Unit.TOKEN
) -> Divergence | None:
    """Where a prompt first differs from another one; None if one is the head of the other.

    The result quotes a few tokens of both prompts, so it is for their owner, never for a log.
    """
    common = common_prefix(identity.units, other_units)
    if common == min(len(identity.units), len(other_units)):
        return None
    label = next((span.label for span in identity.segments if span.start <= common < span.stop), "")
    image, known = image_at(identity, common), _shown(other_units, common, tokenizer, unit)
    if image and known == AN_IMAGE:
        known = "another image"
    return Divergence(common, label, image or _shown(identity.units, common, tokenizer, unit), known, unit)


def image_at(identity: PromptIdentity, position: int) -> str:
    """The name of the image at a position, counted from 1 as the client does; empty if there is none."""
    places = enumerate(identity.images, 1)
    return next((f"image {number}" for number, image in places if image.start <= position < image.stop), "")


def _shown(units: Units, start: int, tokenizer: Tokenizer, unit: Unit) -> str:
    """The text of a few units from `start`, quoted. Of characters, those before the next mark."""
    if units[start] & IMAGE_BIT:
        return AN_IMAGE
    stop = start
    while stop < min(len(units), start + _SHOWN_TOKENS) and not units[stop] & IMAGE_BIT:
        if unit is Unit.CHARACTER and units[stop] > sys.maxunicode:
            break
        stop += 1
    if stop == start:
        return AN_END
    return repr(tokenizer.decode([int(unit) for unit in units[start:stop].astype(np.int64)]))
