"""Layouts of one model in several splits."""

from __future__ import annotations

from itertools import pairwise

from parkd.state import StageLayout, StateField, StateLayout, stage_digest

LAYERS = 5
WIDTHS = (16, 32, 16, 48, 16)
"""Bytes of a row of each layer; odd layers have fixed state of as many."""


def layout_of(*starts: int, checksum: str = "xxh3-64") -> StateLayout:
    """A layout whose stages begin at `starts`, with a field that every stage stores once."""
    edges = [0, *starts, LAYERS]
    stages = []
    for first, end in pairwise(edges):
        rows, fixed, at, fixed_at = [], [], 0, 0
        for layer in range(first, end):
            rows.append(StateField("key", layer, "int8", (WIDTHS[layer],), at))
            at += WIDTHS[layer]
            if layer % 2:
                fixed.append(StateField("conv_0", layer, "float32", (WIDTHS[layer] // 4,), fixed_at))
                fixed_at += WIDTHS[layer]
        rows.append(StateField("index_position", first, "int32", (3,), at, is_shared=True))
        digest = stage_digest(first, end, rows, fixed)
        stages.append(StageLayout(first, end, at + 16, fixed_at, digest, tuple(rows), tuple(fixed)))
    return StateLayout(tuple(stages), checksum)
