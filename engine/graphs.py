"""Work on a card, recorded once and replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

WARM_UP_RUNS = 2


def recorded(run: Callable[[], None], device: torch.device, pool: Any = None) -> Any:
    """A CUDA graph of what `run` queues on `device`; it runs a few times first, so that kernels are compiled.

    Graphs of one `pool` (`torch.cuda.graph_pool_handle`) share the memory of what they make on the way: none of them
    may run beside another, nor leave anything there.
    """
    with torch.cuda.device(device), torch.inference_mode():
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_RUNS):
                run()
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads may be registering memory meanwhile: their calls must not spoil the recording.
        with torch.cuda.graph(graph, pool, stream=side, capture_error_mode="thread_local"):
            run()
    return graph
