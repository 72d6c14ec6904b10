"""A prompt's whole chunks through layers of linear attention, each layer a CUDA graph.

    hidden [1, tokens, width] -> | graph of layer 4 | -> | graph of layer 5 | -> layer 6, which attends: the library's
                                   state in the arena, moved on in place

Such a layer goes on from its state wherever the chunk lies, so that a whole chunk is the same work each time. The
library launches some sixty kernels from Python for it, which takes longer than running them once two cards share the
layers. Shorter chunks, and the first, which has no state to go on from, go through the library's code, to the same
kernels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from engine.cache import StageCache
from engine.graphs import recorded
from engine.stages import Stage

log = logging.getLogger("parkd.engine")

KNOWN = frozenset({"Qwen3_5DecoderLayer"})
"""The library's classes whose layers of linear attention ask the device nothing midway and look at no position."""
LINEAR = "linear_attention"


def record_chunks(stage: Stage, cache: StageCache, tokens: int) -> None:
    """From now on chunks of `tokens` go through what is recorded here, where a layer is of a known class. Overwrites
    the stage's fixed state.

    What cannot be recorded stays as it is, with the reason in the log.
    """
    layers = [layer for layer in stage.layers if type(layer).__name__ in KNOWN and layer.block_type == LINEAR]
    if not layers:
        return
    flow = torch.zeros((1, tokens, layers[0].hidden_size), dtype=stage.dtype, device=stage.device)
    pool = torch.cuda.graph_pool_handle() if stage.device.type == "cuda" else None
    # Not at 0, where there is no state to go on from.
    cache.begin(0)
    cache.begin(1)
    try:
        for layer in layers:
            layer.forward = _recorded(layer.forward, cache, flow, pool)
    except Exception as error:
        log.warning("chunks without CUDA graphs: recording failed: %s: %s", type(error).__name__, error)


def _recorded(
    forward: Callable[..., torch.Tensor], cache: StageCache, flow: torch.Tensor, pool: Any
) -> Callable[..., torch.Tensor]:
    """The layer's forward. Hidden states come and go in `flow`, which all layers of the stage share, as they share the
    `pool` of what lies between: they run one after the other."""

    def run() -> None:
        flow.copy_(forward(flow, position_embeddings=None, cache=cache))

    graph = recorded(run, flow.device, pool)

    def replay(hidden_states: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        if hidden_states.shape != flow.shape or cache.position == 0 or cache.history.is_recording:
            return forward(hidden_states, *arguments, **named)
        if hidden_states is not flow:
            flow.copy_(hidden_states)
        graph.replay()
        return flow

    return replay
