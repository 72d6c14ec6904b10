"""Weights of what may come next, in the processor's own memory: which stay, and which is drawn.

Without tensors, and over a whole vocabulary only what takes little: this is done for every token, behind a model's pass
through the caches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Weights = npt.NDArray[np.floating[Any]]
FLOORS = (1e-2, 1e-4, 1e-6, 0.0)
"""Shares of the best token's weight. Most choices of top_k and top_p lie above the first; a whole vocabulary is sorted
only when they lie above none."""
GROUP = 256
"""Weights that are added at once when one is drawn."""


@dataclass(frozen=True, eq=False)
class Distribution:
    """What the next token may be, everything that shapes it applied."""

    weights: Weights
    """`[n]`, in proportion to probabilities."""
    ids: npt.NDArray[np.int64] | None
    """`[n]`; None: the whole vocabulary, in its order."""

    def probability(self, token: int) -> float:
        weight = self.weights[token] if self.ids is None else self.weights[self.ids == token].sum()
        return float(weight / self.weights.sum(dtype=np.float64))

    def minus(self, other: Distribution, vocab_size: int) -> Distribution:
        """Where this is likelier than `other`, by how much; this itself if that is nowhere."""
        rest = np.maximum(self._whole(vocab_size) - other._whole(vocab_size), 0)
        return Distribution(rest, None) if rest.any() else self

    def _whole(self, vocab_size: int) -> npt.NDArray[np.float64]:
        """Probabilities `[vocab]`."""
        whole = np.zeros(vocab_size)
        whole[slice(len(self.weights)) if self.ids is None else self.ids] = self.weights
        whole /= self.weights.sum(dtype=np.float64)
        return whole


def heaviest(weights: Weights, count: int) -> npt.NDArray[np.int64]:
    """Places of the `count` heaviest, heaviest first; of equals the first."""
    return _head_of(weights, lambda heavy: len(heavy) >= count)[:count]


def nucleus(weights: Weights, top_p: float) -> npt.NDArray[np.int64]:
    """Places of the fewest weights that hold `top_p` of all, heaviest first."""
    wanted = top_p * weights.sum(dtype=np.float64)
    places = _head_of(weights, lambda heavy: bool(heavy.sum(dtype=np.float64) >= wanted))
    heavy = weights[places]
    # A token stays as long as those before it do not reach the share.
    return places[: max(1, int(np.count_nonzero(heavy.cumsum(dtype=np.float64) - heavy < wanted)))]


def _head_of(weights: Weights, is_enough: Callable[[Weights], bool]) -> npt.NDArray[np.int64]:
    """Places of weights, of which the heaviest is 1, heaviest first and of equals the first: all from some floor up, so
    many that those are enough."""
    for floor in FLOORS:
        places = np.flatnonzero(weights >= floor)
        if is_enough(weights[places]):
            break
    return places[np.argsort(-weights[places], kind="stable")]


def place_of(weights: Weights, share: float) -> int:
    """Where the running sum of the weights goes beyond a share, in `[0, 1)`, of the whole."""
    # Sums of groups first: running sums of a whole vocabulary take longer than all the rest.
    sums = np.add.reduceat(weights, np.arange(0, len(weights), GROUP), dtype=np.float64).cumsum()
    point = share * sums[-1]
    group = int(sums.searchsorted(point, side="right"))
    if group == len(sums):  # The product was rounded up to the total.
        group = int(sums.searchsorted(sums[-1]))
    inside = weights[group * GROUP : (group + 1) * GROUP].cumsum(dtype=np.float64)
    place = int(inside.searchsorted(point - (sums[group - 1] if group else 0.0), side="right"))
    if place == len(inside):  # As above, of the two ways to add: the group's last token of any weight.
        place = int(inside.searchsorted(inside[-1]))
    return group * GROUP + place
