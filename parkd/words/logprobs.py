"""Logarithms of probabilities of tokens, from the model's logits.

They are of the logits as the model gives them: before penalties, bias, mask, temperature and filters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Row = npt.NDArray[np.float32]
"""Logits in main memory, `[vocab]`."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token of an answer, and what else could have stood in its place."""

    token_id: int
    logprob: float
    """Natural logarithm; -inf for a token that the model excludes."""
    top: tuple[tuple[int, float], ...]
    """The most probable tokens with their logprobs, most probable first, the lowest id first among equals."""


def logprobs_of(logits: Row, token_id: int, top: int) -> TokenLogprobs:
    """The log-softmax of `logits`, in float32 with the sum in float64, at the token and at the `top` highest."""
    best = logits.max()
    shifted = logits - best
    whole = np.float32(math.log(np.exp(shifted).sum(dtype=np.float64)))

    def at(place: int) -> float:
        return float(shifted[place] - whole)

    return TokenLogprobs(token_id, at(token_id), tuple((place, at(place)) for place in _highest(shifted, top)))


def _highest(values: Row, count: int) -> list[int]:
    """Places of the `count` highest values, highest first, the lowest place first among equals."""
    count = min(count, len(values))
    if not count:
        return []
    least = np.partition(values, len(values) - count)[len(values) - count]
    places = np.flatnonzero(values >= least)
    chosen: list[int] = places[np.argsort(-values[places], kind="stable")][:count].tolist()
    return chosen
