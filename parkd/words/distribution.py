"""Weights of the candidate next tokens, in main memory: selecting the candidates, and drawing one.

Uses NumPy, not tensors, and only cheap operations over the whole vocabulary: this runs for every token, after a forward
pass has emptied the processor's caches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Weights = npt.NDArray[np.floating[Any]]
FLOORS = (1e-2, 1e-4, 1e-6, 0.0)
"""Fractions of the best token's weight. Most top_k and top_p selections lie above the first; the whole vocabulary is
sorted only if no other floor suffices."""
GROUP = 256
"""Weights summed as one group when a token is drawn."""


@dataclass(frozen=True, eq=False)
class Distribution:
    """The distribution of the next token, after everything that shapes it."""

    weights: Weights
    """`[n]`, proportional to probabilities."""
    ids: npt.NDArray[np.int64] | None
    """`[n]`; None means the whole vocabulary, in order."""

    def probability(self, token: int) -> float:
        weight = self.weights[token] if self.ids is None else self.weights[self.ids == token].sum()
        return float(weight / self.weights.sum(dtype=np.float64))

    def minus(self, other: Distribution, vocab_size: int) -> Distribution:
        """The positive part of this minus `other`, in probabilities; this itself if that is zero everywhere."""
        rest = np.maximum(self._whole(vocab_size) - other._whole(vocab_size), 0)
        return Distribution(rest, None) if rest.any() else self

    def _whole(self, vocab_size: int) -> npt.NDArray[np.float64]:
        """Probabilities `[vocab]`."""
        whole = np.zeros(vocab_size)
        whole[slice(len(self.weights)) if self.ids is None else self.ids] = self.weights
        whole /= self.weights.sum(dtype=np.float64)
        return whole


def heaviest(weights: Weights, count: int) -> npt.NDArray[np.int64]:
    """Indices of the `count` largest weights, largest first; ties in order of index."""
    return _head_of(weights, lambda heavy: len(heavy) >= count)[:count]


def nucleus(weights: Weights, top_p: float) -> npt.NDArray[np.int64]:
    """Indices of the fewest weights that sum to at least `top_p` of the total, largest first."""
    wanted = top_p * weights.sum(dtype=np.float64)
    places = _head_of(weights, lambda heavy: bool(heavy.sum(dtype=np.float64) >= wanted))
    heavy = weights[places]
    # A token is kept if the sum of those before it does not reach the share.
    return places[: max(1, int(np.count_nonzero(heavy.cumsum(dtype=np.float64) - heavy < wanted)))]


def _head_of(weights: Weights, is_enough: Callable[[Weights], bool]) -> npt.NDArray[np.int64]:
    """Indices of all weights at or above the first floor that gives enough, largest first, ties in order of index. The
    largest of `weights` must be 1."""
    for floor in FLOORS:
        places = np.flatnonzero(weights >= floor)
        if is_enough(weights[places]):
            break
    return places[np.argsort(-weights[places], kind="stable")]


def place_of(weights: Weights, share: float) -> int:
    """The index at which the running sum of the weights exceeds `share`, in `[0, 1)`, of the total."""
    # Sums of groups first: a running sum over a whole vocabulary takes longer than everything else here.
    sums = np.add.reduceat(weights, np.arange(0, len(weights), GROUP), dtype=np.float64).cumsum()
    point = share * sums[-1]
    group = int(sums.searchsorted(point, side="right"))
    if group == len(sums):  # The product was rounded up to the total.
        group = int(sums.searchsorted(sums[-1]))
    inside = weights[group * GROUP : (group + 1) * GROUP].cumsum(dtype=np.float64)
    place = int(inside.searchsorted(point - (sums[group - 1] if group else 0.0), side="right"))
    if place == len(inside):  # Rounding of the two sums, as above: take the group's last token with weight.
        place = int(inside.searchsorted(inside[-1]))
    return group * GROUP + place
