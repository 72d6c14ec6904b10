"""What reading cost while a trace was recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from parkd.replay.trace import TurnRecord


@dataclass(frozen=True, slots=True)
class MeasuredReading:
    """The line over depth that fits the recorded seconds best, and as many seconds in all."""

    read_s: float
    """Seconds to read one token at the start of a conversation."""
    growth_s: float
    """Additional seconds for each token before it."""
    turns: int
    seconds: float


def measured_reading(turns: Sequence[TurnRecord]) -> MeasuredReading | None:
    """Fits the turns that tell how long they read, except those whose prompt was not read whole. None if there are
    none.

    Least squares over seconds of reading: `n * read_s + n * mean depth * growth_s` for n tokens, neither below 0. Then
    both are scaled so that all turns together take as long as they took.
    """
    told = [
        (turn.prompt_tokens - turn.reused_tokens, (turn.reused_tokens + turn.prompt_tokens - 1) / 2, turn.read_s)
        for turn in turns
        if turn.read_s is not None and turn.read_s > 0 and turn.reused_tokens < turn.prompt_tokens <= turn.live_tokens
    ]
    if not told:
        return None
    tokens, depth, seconds = (np.array(column, dtype=np.float64) for column in zip(*told, strict=True))
    columns = np.stack([tokens, tokens * depth], axis=1)
    read_s, growth_s = _not_negative(columns, seconds)
    scale = float(seconds.sum() / (columns @ [read_s, growth_s]).sum())
    return MeasuredReading(read_s * scale, growth_s * scale, len(told), float(seconds.sum()))


def _not_negative(columns: np.ndarray, wanted: np.ndarray) -> tuple[float, float]:
    """The least-squares factors of two non-negative columns, neither below 0. If one would be, it is 0."""
    (read_s, growth_s), *_ = np.linalg.lstsq(columns, wanted, rcond=None)
    if growth_s < 0:
        return float(columns[:, 0] @ wanted / (columns[:, 0] @ columns[:, 0])), 0.0
    if read_s < 0:
        return 0.0, float(columns[:, 1] @ wanted / (columns[:, 1] @ columns[:, 1]))
    return float(read_s), float(growth_s)
