"""Assigns contiguous ranges of layers to stages, as configured or balanced by their weights. Pure functions.

layers   0 ........ a ........ b ........ n
stages   |-- 0 ----|-- 1 ----|-- 2 ------|        the first stage also has the embedding, the last one the head
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

from parkd.errors import InvalidSplit
from parkd_engine.families.multimodal import language_config
from parkd_engine.loading.layer_weights import model_weights


def split_layers(config: Any, stages: int, layer_split: Sequence[int] | None = None) -> tuple[tuple[int, int], ...]:
    """Layer ranges `[first, end)` of every stage.

    `layer_split` names the first layer of each stage but the first. None balances the stages by weights, counting
    the embedding in the first stage and the head in the last. Raises InvalidSplit.
    """
    text = language_config(config)
    layers = int(text.num_hidden_layers)
    if stages > layers:
        raise InvalidSplit(f"{layers} layers cannot make {stages} stages; name {layers} devices or fewer")
    glued = shared_layers(text)
    if layer_split is None:
        starts = _balanced_starts(config, stages, forbidden=range(glued[0] + 1, glued[1]))
    else:
        starts = (0, *layer_split)
    edges = (*starts, layers)
    if len(starts) != stages or any(first >= end for first, end in pairwise(edges)):
        raise InvalidSplit(
            f"layer split {','.join(map(str, starts[1:]))} does not cut {layers} layers in {stages} stages: name "
            f"{stages - 1} ascending first layers between 1 and {layers - 1}"
        )
    for start in starts[1:]:
        if glued[0] < start < glued[1]:
            raise InvalidSplit(
                f"layers {glued[0]} to {glued[1] - 1} share keys and values and must stay in one stage; "
                f"a stage cannot begin at layer {start}"
            )
    return tuple(zip(starts, edges[1:], strict=True))


def shared_layers(config: Any) -> tuple[int, int]:
    """The range `[first, end)` of layers that share keys and values, `(0, 0)` if none do.

    A reusing layer reads the keys and values of the last layer of its kind before the first reusing layer.
    """
    modes = getattr(config, "kv_sharing_modes", None) or ()
    reusing = [layer for layer, mode in enumerate(modes) if mode == "reuse"]
    if not reusing:
        return 0, 0
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(modes)
    wanted = {kinds[layer] for layer in reusing}
    first = min(max((k for k in range(reusing[0]) if kinds[k] == kind), default=0) for kind in wanted)
    return first, reusing[-1] + 1


def _balanced_starts(config: Any, stages: int, forbidden: range) -> tuple[int, ...]:
    """First layers of the stages, chosen so that the largest stage is as small as possible."""
    if stages == 1:
        return (0,)
    weights = model_weights(config)
    layers = len(weights.layers)
    before = [0, *accumulate(weights.layers)]

    def weight(first: int, end: int) -> int:
        ends = weights.embedding * (first == 0) + (weights.last + weights.head) * (end == layers)
        return before[end] - before[first] + ends

    return (0, *least_worst(stages, layers, forbidden, lambda _, first, end: weight(first, end))[1])


def least_worst(
    stages: int, layers: int, forbidden: range, cost: Callable[[int, int, int], float]
) -> tuple[float, tuple[int, ...]]:
    """The split whose most expensive stage is cheapest: that cost, and the first layers of all stages but the first.

    `cost` takes (stage, first, end). No stage begins inside `forbidden`. Raises InvalidSplit.
    """
    # best[end]: the best split of the layers [0, end) over the stages so far.
    best: dict[int, tuple[float, tuple[int, ...]]] = {end: (cost(0, 0, end), ()) for end in range(1, layers + 1)}
    for index in range(1, stages):
        grown: dict[int, tuple[float, tuple[int, ...]]] = {}
        for end in range(1, layers + 1) if index < stages - 1 else (layers,):
            options = [
                (max(best[cut][0], cost(index, cut, end)), (*best[cut][1], cut))
                for cut in range(1, end)
                if cut in best and cut not in forbidden
            ]
            if options:
                grown[end] = min(options)
        best = grown
    if layers not in best:
        raise InvalidSplit(f"{layers} layers, some of which must stay together, cannot make {stages} stages")
    return best[layers]
