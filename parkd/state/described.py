"""A layout as text, and back: what a file says of its own bytes. docs/FORMAT.md describes it.

JSON in one form only: what is read must be what would be written again, so that nothing in it goes unread. Nothing of
it is believed: sizes follow from fields, and digests are computed anew.
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from parkd.state.fields import DIGEST_BYTES, ITEM_BYTES, StateField, stage_digest
from parkd.state.layout import BLOCK_TOKENS, Grain, StageLayout, StateLayout

LAYOUT_LIMIT_BYTES = 1 << 20
"""A description is no longer. 200 layers of three fields take about 60 KB."""
STAGES_LIMIT = 256
DIMENSIONS_LIMIT = 8
NUMBER_LIMIT = 1 << 40
"""No count, size or offset is as large."""
ROW_GRAIN_BYTES = 8
"""Rows, and fixed state, are whole words of this size."""


class DamagedLayout(ValueError):
    """These bytes do not describe a layout."""


def describe(layout: StateLayout) -> bytes:
    """Raises ValueError if it would be longer than `LAYOUT_LIMIT_BYTES`."""
    document = {
        "checksum": layout.checksum,
        "grain": layout.grain.value,
        **({} if layout.block_tokens == BLOCK_TOKENS else {"block_tokens": layout.block_tokens}),
        "stages": [
            {
                "layers": [stage.first_layer, stage.end_layer],
                "row_bytes": stage.row_bytes,
                "fixed_bytes": stage.fixed_bytes,
                "digest": stage.digest.hex(),
                "row": [_described(field) for field in stage.row_fields],
                "fixed": [_described(field) for field in stage.fixed_fields],
                **({"head_bytes": stage.head_bytes} if stage.head_bytes else {}),
            }
            for stage in layout.stages
        ],
    }
    text = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    if len(text) > LAYOUT_LIMIT_BYTES:
        raise ValueError(f"a layout of {len(text)} bytes is longer than {LAYOUT_LIMIT_BYTES}")
    return text


def _described(field: StateField) -> list[Any]:
    return [field.name, field.layer, field.dtype_name, list(field.shape), field.offset, field.is_shared]


def layout_from(text: bytes) -> StateLayout:
    """Raises DamagedLayout for anything that `describe` would not write."""
    if len(text) > LAYOUT_LIMIT_BYTES:
        raise DamagedLayout(f"longer than {LAYOUT_LIMIT_BYTES} bytes")
    try:
        document = json.loads(text)
        stages = tuple(_stage(each) for each in document["stages"])
        block_tokens = _number(document.get("block_tokens", BLOCK_TOKENS))
        layout = StateLayout(stages, _text(document["checksum"]), Grain(document["grain"]), block_tokens)
    except (ValueError, KeyError, TypeError, AssertionError, RecursionError) as error:
        raise DamagedLayout(f"no description of a layout: {error}"[:200]) from None
    if not block_tokens:
        raise DamagedLayout("blocks without rows")
    if not 0 < len(stages) <= STAGES_LIMIT:
        raise DamagedLayout(f"{len(stages)} stages")
    for earlier, later in pairwise(stages):
        if earlier.end_layer != later.first_layer:
            raise DamagedLayout("the stages do not follow each other")
    if describe(layout) != text:
        raise DamagedLayout("not in the form in which parkd writes it")
    return layout


def _stage(document: Any) -> StageLayout:
    first, end = (_number(value) for value in document["layers"])
    row_bytes, fixed_bytes = _number(document["row_bytes"]), _number(document["fixed_bytes"])
    row_fields = _fields(document["row"], first, end, row_bytes)
    fixed_fields = _fields(document["fixed"], first, end, fixed_bytes)
    digest = bytes.fromhex(_text(document["digest"]))
    if first >= end or not row_bytes:
        raise ValueError("a stage without layers or rows")
    if row_fields or fixed_fields:
        if row_bytes % ROW_GRAIN_BYTES or fixed_bytes % ROW_GRAIN_BYTES:
            raise ValueError("a stage of broken words")
        if digest != stage_digest(first, end, row_fields, fixed_fields):
            raise ValueError("a digest is not that of its fields")
    if len(digest) > DIGEST_BYTES * 2:
        raise ValueError("a long digest")
    head_bytes = _number(document.get("head_bytes", 0))
    return StageLayout(first, end, row_bytes, fixed_bytes, digest, row_fields, fixed_fields, head_bytes=head_bytes)


def _fields(documents: Any, first: int, end: int, size: int) -> tuple[StateField, ...]:
    """Fields of the layers `[first, end]` (`end` is the draft head's) that follow each other within `size` bytes."""
    fields: list[StateField] = []
    reached = 0
    for name, layer, dtype_name, shape, offset, is_shared in documents:
        if dtype_name not in ITEM_BYTES or not isinstance(is_shared, bool) or len(shape) > DIMENSIONS_LIMIT:
            raise ValueError("a field of an unknown kind")
        dimensions = tuple(_number(value) for value in shape)
        field = StateField(_text(name), _number(layer), dtype_name, dimensions, _number(offset), is_shared)
        if not first <= field.layer <= end or field.offset < reached or field.nbytes > size - field.offset:
            raise ValueError("a field outside of its place")
        reached = field.offset + field.nbytes
        fields.append(field)
    return tuple(fields)


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < NUMBER_LIMIT:
        raise ValueError("a number out of bounds")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("a text was expected")
    return value
