"""Equality of values that came as JSON. Python's own takes `true`, `1` and `1.0` for one another, which in a prompt or
a setting are three things."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


def identical(one: Any, other: Any) -> bool:
    """Whether both values have the same types and contents throughout, and the same order of keys: it shows in a
    rendered prompt. A list and a tuple of the same items count as different."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, str):  # nearly all there is in a prompt, and asking for the others takes longer
        return bool(one == other)
    if isinstance(one, Mapping):
        return len(one) == len(other) and all(
            mine == theirs and identical(one[mine], other[theirs]) for mine, theirs in zip(one, other, strict=True)
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(identical, one, other))
    if dataclasses.is_dataclass(one):
        names = [field.name for field in dataclasses.fields(one) if field.compare]
        return all(identical(getattr(one, name), getattr(other, name)) for name in names)
    return bool(one == other)
