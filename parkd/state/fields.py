"""The fields that make up a stage's bytes: one tensor of one layer, inside a row or inside the fixed state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import prod
from types import MappingProxyType

DIGEST_BYTES = 16
ITEM_BYTES = MappingProxyType(
    {
        "bool": 1,
        "uint8": 1,
        "int8": 1,
        "float8_e4m3fn": 1,
        "float8_e5m2": 1,
        "int16": 2,
        "float16": 2,
        "bfloat16": 2,
        "int32": 4,
        "float32": 4,
        "int64": 8,
        "float64": 8,
    }
)
"""Bytes of one number, by the name of its dtype."""
PLAIN_DTYPES = frozenset({"int8", "float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64"})
"""Dtypes of which any bytes are only numbers to calculate with. Wider integers may be places in memory."""


@dataclass(frozen=True, slots=True)
class StateField:
    """One tensor of one layer inside a row, or inside the fixed state."""

    name: str
    """`key`, `value`, `index_key`; in the fixed state `conv_0`, `recurrent_0`, `window_key`, `window_value`, ..."""
    layer: int
    """Index in the whole model; the draft head's layer has the index after the last."""
    dtype_name: str
    """One of ITEM_BYTES."""
    shape: tuple[int, ...]
    """In a row, for one token: `(heads, head_dim)` for keys and values. Windows: `(window - 1, heads, head_dim)`."""
    offset: int
    """Bytes from the start of the row, or of the fixed state."""
    is_shared: bool = False
    """It has equal values in all layers that have it: each stage stores it once, with the first of them."""

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype_name]


def stage_digest(first: int, end: int, row_fields: Sequence[StateField], fixed_fields: Sequence[StateField]) -> bytes:
    """16 bytes over a stage's layers `[first, end)` and name, layer, dtype, shape and offset of every field."""
    hasher = blake2b(digest_size=DIGEST_BYTES, person=b"parkd-stage")
    hasher.update(f"{first} {end}\n".encode())
    for part, fields in (("row", row_fields), ("fixed", fixed_fields)):
        for field in fields:
            line = f"{part} {field.name} {field.layer} torch.{field.dtype_name} {field.shape} {field.offset}\n"
            hasher.update(line.encode())
    return hasher.digest()
