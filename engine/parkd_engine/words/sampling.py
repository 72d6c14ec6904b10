"""Sampling from logits that are tensors, on whichever device they are."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from parkd.errors import LogitsNotFinite, NothingAllowed, unfinished
from parkd.words.distribution import Distribution
from parkd.words.sampling import NO_SCORE, Mask, Sampler, certain

HEAD_TOKENS = 1024
"""On a GPU, top_p first looks at this many top tokens, and sorts the whole vocabulary only if they are not enough."""


class TensorSampler(Sampler):
    """A `Sampler` for tensors. On the CPU they are rows in main memory: after a forward has displaced the caches'
    content, each torch call costs about 0.1 ms, and it wakes threads besides the model's."""

    def pick(self, logits: torch.Tensor, mask: Mask | None = None) -> int:
        """`pick_row` for float32 `[vocab]` on any device. Raises LogitsNotFinite, NothingAllowed."""
        return self.remember(self.draw(self.distribution(logits, mask)))

    def distribution(self, logits: torch.Tensor, mask: Mask | None = None, ahead: Sequence[int] = ()) -> Distribution:
        """`distribution_of_row` for a tensor. Raises LogitsNotFinite, NothingAllowed."""
        if logits.device.type == "cpu":
            return self.distribution_of_row(logits.float().numpy(), mask, ahead)
        if mask is None and self._is_plain_greedy:
            return certain(_best(logits))  # On the device: only the id is copied back.
        # Everything runs where the logits are: a GPU sorts a whole vocabulary faster than it copies it to the host.
        scores = logits.to(torch.float32, copy=True)
        self._shape(scores, mask, ahead, lambda values: torch.from_numpy(values).to(scores.device))
        best = _best(scores, logits)
        if self._settings.temperature == 0:
            return certain(best)
        return self._filtered(scores, float(scores[best]))

    def _filtered(self, scores: torch.Tensor, best: float) -> Distribution:
        """`_filtered_row` where the logits are, in float64. The best token has weight 1."""
        settings = self._settings
        weights = ((scores - best).double() / settings.temperature).exp_()
        ids: torch.Tensor | None = None  # None: all ids, in order.
        if 0 < settings.top_k < len(weights):
            weights, ids = torch.topk(weights, settings.top_k)
        if settings.top_p < 1:
            weights, ids = _nucleus(weights, ids, settings.top_p)
        if settings.min_p > 0:
            kept = weights >= settings.min_p
            weights = weights[kept]
            ids = kept.nonzero().squeeze(1) if ids is None else ids[kept]
        return Distribution(weights.cpu().numpy(), None if ids is None else ids.cpu().numpy())


def _nucleus(weights: torch.Tensor, ids: torch.Tensor | None, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`distribution.nucleus` on a GPU, with ids."""
    wanted = top_p * weights.sum()
    if ids is None:
        head, head_ids = torch.topk(weights, min(HEAD_TOKENS, len(weights)))
        if head.sum() >= wanted or len(head) == len(weights):
            weights, ids = head, head_ids
        else:
            weights, ids = torch.sort(weights, descending=True, stable=True)
    kept = max(1, int((weights.cumsum(0) - weights < wanted).sum()))
    return weights[:kept], ids[:kept]


def _best(scores: torch.Tensor, logits: torch.Tensor | None = None) -> int:
    """`best_of` for a tensor."""
    best = int(torch.argmax(scores))
    if not torch.isfinite(scores[best]):
        if logits is not None and scores[best] == -math.inf and bool(torch.isfinite(logits).any()):
            raise NothingAllowed
        raise LogitsNotFinite(unfinished(NO_SCORE))
    return best
