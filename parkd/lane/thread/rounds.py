"""What the engine's thread computes next, where several turns are under way: pure decisions.

steps   steps   steps   [ chunk ]   steps   steps ...        a step is one token of every answer under way
|------- stepping_s ---|- reading_s -|
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

READ_SHARE = 0.5
"""The share of the time that prompts have where answers are under way too."""


@dataclass(frozen=True, slots=True)
class Spent:
    """What was computed since both prompts and answers have been under way."""

    reading_s: float = 0.0
    stepping_s: float = 0.0


def reads_next(spent: Spent, read_share: float = READ_SHARE) -> bool:
    """Whether a chunk of a prompt is due before the next step of the answers: prompts had less than their share."""
    return spent.reading_s * (1 - read_share) < spent.stepping_s * read_share


def next_prompt(left_tokens: Sequence[int], chunks: int) -> int:
    """Which of several prompts reads the next chunk, given in the order in which they began; `chunks` were read before.
    Every other chunk is of the one that has the least to read, the others are of the one that began first: so a
    short one does not wait for a long one's end, nor a long one for ever."""
    if chunks % 2:
        return 0
    return min(range(len(left_tokens)), key=lambda index: left_tokens[index])
