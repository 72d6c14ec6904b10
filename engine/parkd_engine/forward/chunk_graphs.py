"""Linear-attention layers as CUDA graphs, one for each layer, for prefill chunks of full length.

    hidden [1, tokens, width] -> | graph of layer 4 | -> | graph of layer 5 | -> layer 6: attention, not recorded
                                   state in the arena, updated in place

Such a layer does not depend on the position, so every full chunk is the same work. Its forward pass launches about
sixty kernels from Python, which takes longer than running them once two GPUs share the layers. The first chunk has no
previous state; its graph goes on from zeros. Shorter chunks run unrecorded through the same kernels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from parkd_engine.arenas.cache import StageCache
from parkd_engine.families.records import RECORDED_CHUNKS
from parkd_engine.forward.graphs import recorded
from parkd_engine.forward.stages import Stage

log = logging.getLogger("parkd.engine")

LINEAR = "linear_attention"


def record_chunks(stage: Stage, cache: StageCache, tokens: int) -> None:
    """Records the stage's linear-attention layers of a known class over the fixed state of `cache`; chunks of `tokens`
    tokens that use it replay them from now on. Overwrites that state. Call it once for the cache of each seat.

    Layers that cannot be recorded stay as they are; the reason is logged.
    """
    layers = {
        index: layer
        for index, layer in enumerate(stage.layers, stage.first_layer)
        if type(layer).__name__ in RECORDED_CHUNKS and layer.block_type == LINEAR
    }
    if not layers:
        return
    width = next(iter(layers.values())).hidden_size
    if stage.chunk_memory is None:
        flow = torch.zeros((1, tokens, width), dtype=stage.dtype, device=stage.device)
        stage.chunk_memory = flow, torch.cuda.graph_pool_handle() if stage.device.type == "cuda" else None
    flow, pool = stage.chunk_memory
    # Not at 0, where there is no previous state.
    cache.begin(0)
    cache.begin(1)
    try:
        for index, layer in layers.items():
            layer.forward = _recorded(layer.forward, cache, index, flow, pool)
    except Exception as error:
        log.warning(
            "prompt chunks run without CUDA graphs, because recording failed: %s: %s", type(error).__name__, error
        )


def _recorded(
    forward: Callable[..., torch.Tensor], cache: StageCache, index: int, flow: torch.Tensor, pool: Any
) -> Callable[..., torch.Tensor]:
    """The forward pass of layer `index`, replayed where that applies: by its own graph if it uses `cache`, else as
    `forward` does. `flow` holds its input and output. All layers of the stage share `flow` and the memory `pool` of
    intermediate results, since they run one after the other."""

    def run() -> None:
        flow.copy_(forward(flow, position_embeddings=None, cache=cache))

    graph = recorded(run, flow.device, pool)

    def replay(hidden_states: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        if named.get("cache") is not cache or hidden_states.shape != flow.shape or cache.history.is_recording:
            return forward(hidden_states, *arguments, **named)
        if cache.position == 0:
            cache.layers[index].clear()
        if hidden_states is not flow:
            flow.copy_(hidden_states)
        graph.replay()
        return flow

    return replay
