"""Chooses the next token from its logits.

    logits -> penalties -> bias -> mask -> temperature -> top_k -> top_p -> min_p -> draw
                                      (temperature 0: the best, of equals the lowest id)

Meanings: repetition as in Keskar et al. 2019 (CTRL), over prompt and answer; presence and frequency as in the OpenAI
API reference, over the answer alone; min_p as in Nguyen et al. 2024. Every filter keeps the most probable token, and
works on the probabilities that the one before it left.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine.errors import BadLogits

HEAD_TOKENS = 1024
"""Most top_p choices lie among so many candidates; a whole vocabulary is sorted only when they do not."""
SEED_MODULUS = 1 << 64
NO_SCORE = "The model gave no usable score for any allowed token."


class SamplingSettings(Protocol):
    """Ranges are the caller's to check: temperature >= 0, 0 < top_p <= 1, top_k >= 0, 0 <= min_p <= 1, penalty > 0."""

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


@dataclass(frozen=True, eq=False)
class Distribution:
    """What the next token may be, everything that shapes it applied."""

    weights: torch.Tensor
    """float64 `[n]`, on the CPU, in proportion to probabilities."""
    ids: torch.Tensor | None
    """int64 `[n]`; None: the whole vocabulary, in its order."""

    def probability(self, token: int) -> float:
        if self.ids is None:
            return float(self.weights[token] / self.weights.sum())
        return float(self.weights[self.ids == token].sum() / self.weights.sum())

    def minus(self, other: Distribution, vocab_size: int) -> Distribution:
        """Where this is likelier than `other`, by how much; this itself if that is nowhere."""
        rest = (self._whole(vocab_size) - other._whole(vocab_size)).clamp_(min=0)
        return Distribution(rest, None) if float(rest.sum()) > 0 else self

    def _whole(self, vocab_size: int) -> torch.Tensor:
        """Probabilities `[vocab]`."""
        whole = torch.zeros(vocab_size, dtype=torch.float64)
        whole[slice(len(self.weights)) if self.ids is None else self.ids] = self.weights / self.weights.sum()
        return whole


class Sampler:
    """One answer's sampling: its randomness, and what it has said so far."""

    def __init__(
        self,
        settings: SamplingSettings,
        vocab_size: int,
        history: npt.NDArray[np.int64],
        *,
        fresh_seed: int = 0,
    ) -> None:
        """`history` are the prompt's ids `[n]`; `fresh_seed` is used when the settings name no seed."""
        self._settings = settings
        self._vocab_size = vocab_size
        seed = fresh_seed if settings.seed is None else settings.seed
        self._generator = torch.Generator().manual_seed(seed % SEED_MODULUS)
        self._repeats = settings.repetition_penalty != 1.0
        self._counts = bool(settings.presence_penalty or settings.frequency_penalty)
        # Penalties touch few ids, so they are kept as ids and not as vectors over the vocabulary.
        seen = np.unique(history) if self._repeats else np.empty(0, np.int64)
        self._seen = {int(token): None for token in seen if 0 <= token < vocab_size}
        self._said: dict[int, int] = {}
        bias = {token: value for token, value in settings.logit_bias.items() if 0 <= token < vocab_size}
        self._bias_ids = torch.tensor(list(bias), dtype=torch.int64)
        self._bias = torch.tensor(list(bias.values()), dtype=torch.float32)

        shaped = self._repeats or self._counts or bool(bias)
        self._is_plain_greedy = settings.temperature == 0 and not shaped

    def pick(self, logits: torch.Tensor, mask: npt.NDArray[np.bool_] | None = None) -> int:
        """The next id. `logits` is float32 `[vocab]` on any device, left as it is; `mask` is True where allowed.

        Raises BadLogits when no allowed token has a score.
        """
        return self.remember(self.draw(self.distribution(logits, mask)))

    def pick_row(self, logits: npt.NDArray[np.float32], mask: npt.NDArray[np.bool_] | None = None) -> int:
        """`pick` of scores `[vocab]` in the processor's own memory. Raises BadLogits.

        The plain case takes no tensor: behind a model's pass through the caches each call of torch costs 0.1 ms or so.
        """
        if mask is not None or not self._is_plain_greedy:
            return self.pick(torch.from_numpy(logits), mask)
        best = int(logits.argmax())
        if not math.isfinite(logits[best]):
            raise BadLogits(NO_SCORE)
        return best

    def distribution(
        self, logits: torch.Tensor, mask: npt.NDArray[np.bool_] | None = None, ahead: Sequence[int] = ()
    ) -> Distribution:
        """What `pick` draws from; `ahead` are tokens supposed to have been said behind those that were.

        Raises BadLogits.
        """
        if mask is None and self._is_plain_greedy:
            return _certain(_best(logits))  # On the device: only the id comes back.
        # All of it where the logits are: on a card a whole vocabulary is sorted sooner than it is copied from there.
        scores = self._penalised(logits.to(torch.float32, copy=True), ahead)
        if mask is not None:
            allowed = torch.from_numpy(np.ascontiguousarray(mask[: len(scores)])).to(scores.device)
            scores[: len(allowed)].masked_fill_(~allowed, -torch.inf)
            scores[len(allowed) :] = -torch.inf
        best = _best(scores)
        if self._settings.temperature == 0:
            return _certain(best)
        return self._filtered(scores, float(scores[best]))

    def draw(self, distribution: Distribution) -> int:
        """A token, not remembered yet."""
        weights, ids = distribution.weights, distribution.ids
        if self._settings.temperature == 0 and ids is not None:
            return int(ids[0])
        sums = weights.cumsum(0)
        point = torch.rand(1, generator=self._generator, dtype=torch.float64) * sums[-1]
        place = int(torch.searchsorted(sums, point, right=True))
        if place == len(sums):  # The product was rounded up to the total: the last token of any weight.
            place = int(torch.searchsorted(sums, sums[-1]))
        return place if ids is None else int(ids[place])

    def judge(self, guess: int, guessed_from: Distribution, wanted: Distribution) -> int:
        """A token distributed as `wanted` that is `guess`, drawn from `guessed_from`, as often as can be.

        Speculative sampling: Leviathan et al. 2023, algorithm 1; Chen et al. 2023, theorem 1.
        """
        if self._settings.temperature == 0:
            return self.draw(wanted)
        likely, guessed = wanted.probability(guess), guessed_from.probability(guess)
        point = float(torch.rand(1, generator=self._generator, dtype=torch.float64))
        if point * guessed < likely:
            return guess
        return self.draw(wanted.minus(guessed_from, self._vocab_size))

    def remember(self, token: int) -> int:
        """The token was said: penalties count it."""
        if self._repeats:
            self._seen[token] = None
        if self._counts:
            self._said[token] = self._said.get(token, 0) + 1
        return token

    def _penalised(self, scores: torch.Tensor, ahead: Sequence[int]) -> torch.Tensor:
        settings = self._settings
        seen = self._seen | dict.fromkeys(ahead) if self._repeats else self._seen
        said = self._said
        if self._counts and ahead:
            said = {token: said.get(token, 0) + ahead.count(token) for token in said.keys() | set(ahead)}
        if seen:
            ids = torch.tensor(list(seen), dtype=torch.int64, device=scores.device)
            values = scores[ids]
            penalty = settings.repetition_penalty
            scores[ids] = torch.where(values > 0, values / penalty, values * penalty)
        if said:
            ids = torch.tensor(list(said), dtype=torch.int64, device=scores.device)
            counts = torch.tensor(list(said.values()), dtype=torch.float32, device=scores.device)
            scores[ids] -= settings.presence_penalty + settings.frequency_penalty * counts
        if len(self._bias_ids):
            scores[self._bias_ids.to(scores.device)] += self._bias.to(scores.device)
        return scores

    def _filtered(self, scores: torch.Tensor, best: float) -> Distribution:
        """Weights are relative to the best token's, so the best has weight 1."""
        settings = self._settings
        weights = ((scores - best).double() / settings.temperature).exp_()
        ids: torch.Tensor | None = None  # None: all, in the vocabulary's order.
        if 0 < settings.top_k < len(weights):
            weights, ids = torch.topk(weights, settings.top_k)
        if settings.top_p < 1:
            weights, ids = _nucleus(weights, ids, settings.top_p)
        if settings.min_p > 0:
            kept = weights >= settings.min_p
            weights = weights[kept]
            ids = kept.nonzero().squeeze(1) if ids is None else ids[kept]
        return Distribution(weights.cpu(), None if ids is None else ids.cpu())


def _certain(token: int) -> Distribution:
    return Distribution(torch.ones(1, dtype=torch.float64), torch.tensor([token]))


def _nucleus(weights: torch.Tensor, ids: torch.Tensor | None, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The fewest tokens that hold `top_p` of the weight, heaviest first, and their ids."""
    wanted = top_p * weights.sum()
    if ids is None:
        head, head_ids = torch.topk(weights, min(HEAD_TOKENS, len(weights)))
        if head.sum() >= wanted or len(head) == len(weights):
            weights, ids = head, head_ids
        else:
            weights, ids = torch.sort(weights, descending=True, stable=True)
    # A token stays as long as those before it do not reach the share.
    kept = max(1, int((weights.cumsum(0) - weights < wanted).sum()))
    return weights[:kept], ids[:kept]


def _best(scores: torch.Tensor) -> int:
    """The lowest id among those of the highest score."""
    # On a CPU torch takes 25 times as long as numpy over one row, and wakes threads beside the model's.
    best = int(scores.numpy().argmax() if scores.device.type == "cpu" else torch.argmax(scores))
    if not torch.isfinite(scores[best]):
        raise BadLogits(NO_SCORE)
    return best
