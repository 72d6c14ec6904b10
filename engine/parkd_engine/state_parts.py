"""The live state of a session part by part: what a comparison of two moments needs to say where they differ.

Reads the arenas, the buffers of windows and the position offset themselves, not what captures make of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from typing import TYPE_CHECKING

import torch

from parkd_engine.arenas.layout import OFFSET_FIELD
from parkd_engine.families.layer_state import WINDOW_FIELDS

if TYPE_CHECKING:
    from parkd_engine.session import Session

DIGEST_BYTES = 16


def state_parts(session: Session) -> dict[str, bytes]:
    """Name of a part -> digest of its bytes at the session's position. Names are like `layer 3 key`."""
    return {name: _digest(part) for name, part in _parts(session)}


def _parts(session: Session) -> Iterator[tuple[str, torch.Tensor]]:
    layers = session.stages[0].num_layers
    for arena, cache in zip(session.arenas, session.caches, strict=True):
        for field in arena.layout.row_fields:
            yield _name(field.layer, field.name, layers), arena.field_view(field)[: session.position]
        for field in arena.layout.fixed_fields:
            if field.name not in (*WINDOW_FIELDS, OFFSET_FIELD):
                yield _name(field.layer, field.name, layers), arena.fixed_view(field)
        for layer, windows in cache.live_windows(session.position):
            for name, live in zip(WINDOW_FIELDS, windows, strict=True):
                yield _name(layer, name, layers), live
        if any(field.name == OFFSET_FIELD for field in arena.layout.fixed_fields):
            yield "position offset of images", torch.tensor(session.position_offset)


def _name(layer: int, field: str, layers: int) -> str:
    return f"{'draft head' if layer == layers else f'layer {layer}'} {field}"


def _digest(part: torch.Tensor) -> bytes:
    held = part.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    return blake2b(held.numpy().data, digest_size=DIGEST_BYTES).digest()
