"""Long work of a turn on the engine's thread, in parts: a generator that says before each part what it is, and returns
the result. Between two parts other turns may compute."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from parkd.engine_adapter.base import Seat

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class NextStep:
    """A step of the answer in a seat."""

    seat: Seat


@dataclass(frozen=True, slots=True)
class NextChunk:
    """A chunk of a prompt of which `left_tokens` are unread. It may be several where nobody waits for the thread."""

    left_tokens: int


Work: TypeAlias = Generator[NextStep | NextChunk, None, T]


def finished(work: Work[T]) -> T:
    """The result of work that nothing comes between."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result
