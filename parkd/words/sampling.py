"""Samples the next token from logits.

    logits -> penalties -> bias -> mask -> temperature -> top_k -> top_p -> min_p -> draw
                                      (temperature 0: the highest logit, the lowest id among equals)

Definitions: repetition penalty as in Keskar et al. 2019 (CTRL), over prompt and answer; presence and frequency
penalties as in the OpenAI API reference, over the answer only; min_p as in Nguyen et al. 2024. Every filter keeps the
most probable token, and works on what the previous filter kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from parkd.errors import LogitsNotFinite, NothingAllowed, unfinished
from parkd.words.distribution import Distribution, Weights, heaviest, nucleus, place_of

COLDEST = 1e-30
"""Smallest divisor for a temperature in float32. Below it only the best token has any weight."""
SEED_MODULUS = 1 << 64
Row = npt.NDArray[np.float32]
"""Logits in main memory, `[vocab]`."""
Mask = npt.NDArray[np.bool_]
NO_SCORE = "The model's logits are not finite for any allowed token."


class SamplingSettings(Protocol):
    """The caller checks ranges: temperature >= 0, 0 < top_p <= 1, top_k >= 0, 0 <= min_p <= 1, penalty > 0."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_p(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def min_p(self) -> float: ...
    @property
    def repetition_penalty(self) -> float: ...
    @property
    def presence_penalty(self) -> float: ...
    @property
    def frequency_penalty(self) -> float: ...
    @property
    def seed(self) -> int | None: ...
    @property
    def logit_bias(self) -> Mapping[int, float]: ...


class Sampler:
    """Samples one answer. Holds its random generator and the tokens it has so far."""

    def __init__(
        self,
        settings: SamplingSettings,
        vocab_size: int,
        history: npt.NDArray[np.int64],
        *,
        fresh_seed: int = 0,
    ) -> None:
        """`history` has the prompt's ids `[n]`. `fresh_seed` is used if the settings have no seed."""
        self._settings = settings
        self._vocab_size = vocab_size
        seed = fresh_seed if settings.seed is None else settings.seed
        self._generator = np.random.Generator(np.random.PCG64(seed % SEED_MODULUS))
        self._repeats = settings.repetition_penalty != 1.0
        self._counts = bool(settings.presence_penalty or settings.frequency_penalty)
        # Penalties apply to few ids, so ids are kept and not vectors over the vocabulary.
        seen = np.unique(history) if self._repeats else np.empty(0, np.int64)
        self._seen = seen[(seen >= 0) & (seen < vocab_size)].astype(np.int64)
        self._is_seen = set(self._seen.tolist())
        self._said: dict[int, int] = {}
        bias = {token: value for token, value in settings.logit_bias.items() if 0 <= token < vocab_size}
        self._bias_ids = np.array(list(bias), dtype=np.int64)
        self._bias = np.array(list(bias.values()), dtype=np.float32)

        self._shapes = self._repeats or self._counts or bool(bias)
        self._is_plain_greedy = settings.temperature == 0 and not self._shapes

    def pick_row(self, logits: Row, mask: Mask | None = None) -> int:
        """Samples and remembers the next id. `logits`, `[vocab]`, are not changed. `mask` is True for allowed ids.

        Raises LogitsNotFinite if the highest logit is not finite, and NothingAllowed if only the mask and the bias make
        it so.
        """
        if mask is None and self._is_plain_greedy:
            return best_of(logits)
        return self.remember(self.draw(self.distribution_of_row(logits, mask)))

    def distribution_of_row(self, row: Row, mask: Mask | None = None, ahead: Sequence[int] = ()) -> Distribution:
        """The distribution that `pick_row` draws from. `ahead` are draft tokens, as if they followed the answer.

        Raises LogitsNotFinite, NothingAllowed.
        """
        logits = row
        if self._shapes or mask is not None:
            row = row.copy()
            self._shape(row, mask, ahead, lambda values: values)
        best = best_of(row, logits)
        return certain(best) if self._settings.temperature == 0 else self._filtered_row(row, best)

    def draw(self, distribution: Distribution) -> int:
        """Draws a token without remembering it."""
        weights, ids = distribution.weights, distribution.ids
        if self._settings.temperature == 0 and ids is not None:
            return int(ids[0])
        place = place_of(weights, self._random())
        return place if ids is None else int(ids[place])

    def _random(self) -> float:
        """A random number in `[0, 1)`."""
        return self._generator.random()

    def judge(self, guess: int, guessed_from: Distribution, wanted: Distribution) -> int:
        """Draws from `wanted`, and returns `guess`, which was drawn from `guessed_from`, as often as that allows.

        Speculative sampling: Leviathan et al. 2023, algorithm 1; Chen et al. 2023, theorem 1.
        """
        if self._settings.temperature == 0:
            return self.draw(wanted)
        likely, guessed = wanted.probability(guess), guessed_from.probability(guess)
        if self._random() * guessed < likely:
            return guess
        return self.draw(wanted.minus(guessed_from, self._vocab_size))

    def remember(self, token: int) -> int:
        """Adds the token to the answer, so that penalties count it. Returns it."""
        if self._repeats and token not in self._is_seen:
            self._is_seen.add(token)
            self._seen = np.append(self._seen, token)
        if self._counts:
            self._said[token] = self._said.get(token, 0) + 1
        return token

    def _shape(self, scores: Any, mask: Mask | None, ahead: Sequence[int], put: Callable[[Any], Any]) -> None:
        """Applies penalties, bias and mask in place, to an array or to what behaves like one. `put` moves an array to
        where the scores are."""
        settings, seen, said = self._settings, self._seen, self._said
        if self._repeats and ahead:
            seen = np.append(seen, [token for token in dict.fromkeys(ahead) if token not in self._is_seen])
        if self._counts and ahead:
            said = {token: said.get(token, 0) + ahead.count(token) for token in said.keys() | set(ahead)}
        if len(seen):
            ids = put(seen.astype(np.int64))
            values = scores[ids]
            is_positive = values > 0
            values[is_positive] /= settings.repetition_penalty
            values[~is_positive] *= settings.repetition_penalty
            scores[ids] = values
        if said:
            counts = put(np.array(list(said.values()), dtype=np.float32))
            scores[put(np.array(list(said), dtype=np.int64))] -= (
                settings.presence_penalty + settings.frequency_penalty * counts
            )
        if len(self._bias_ids):
            scores[put(self._bias_ids)] += put(self._bias)
        if mask is not None:
            allowed = put(np.ascontiguousarray(mask[: len(scores)]))
            scores[: len(allowed)][~allowed] = -math.inf
            scores[len(allowed) :] = -math.inf

    def _filtered_row(self, row: Row, best: int) -> Distribution:
        """Applies temperature and filters, in float32; sums are in float64."""
        settings = self._settings
        with np.errstate(over="ignore"):  # Overflow to -inf means a weight of 0, as it should.
            weights: Weights = row - row[best]
            weights /= np.float32(max(settings.temperature, COLDEST))
        np.exp(weights, out=weights)
        ids: npt.NDArray[np.int64] | None = None  # None: all ids, in order.
        if 0 < settings.top_k < len(weights):
            ids = heaviest(weights, settings.top_k)
            weights = weights[ids]
        if settings.top_p < 1:
            kept = nucleus(weights, settings.top_p)
            weights, ids = weights[kept], kept if ids is None else ids[kept]
        if settings.min_p > 0:
            kept = np.flatnonzero(weights >= settings.min_p)
            weights, ids = weights[kept], kept if ids is None else ids[kept]
        return Distribution(weights, ids)


def certain(token: int) -> Distribution:
    """The one in which only this token can be drawn."""
    return Distribution(np.ones(1), np.array([token]))


def best_of(row: Row, logits: Row | None = None) -> int:
    """The lowest id among those with the highest logit. Raises LogitsNotFinite, or NothingAllowed if `row` was shaped
    from `logits`, of which one is finite, and has none left."""
    best = int(row.argmax())
    if not math.isfinite(row[best]):
        if logits is not None and row[best] == -math.inf and np.isfinite(logits).any():
            raise NothingAllowed
        raise LogitsNotFinite(unfinished(NO_SCORE))
    return best
