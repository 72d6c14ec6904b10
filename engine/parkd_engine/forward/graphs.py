"""GPU work that is recorded once as a CUDA graph and then replayed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

WARM_UP_RUNS = 2


class GraphPools:
    """For each device the pool of graphs that never run at the same time: the decode steps of all seats."""

    def __init__(self) -> None:
        self._pools: dict[torch.device, Any] = {}

    def of(self, device: torch.device) -> Any:
        """The pool of a device; None on CPUs."""
        if device.type != "cuda":
            return None
        return self._pools.setdefault(device, torch.cuda.graph_pool_handle())


def recorded(run: Callable[[], None], device: torch.device, pool: Any = None) -> Any:
    """A CUDA graph of what `run` queues on `device`. It runs `WARM_UP_RUNS` times first, so that kernels are compiled.

    Graphs of one `pool` (`torch.cuda.graph_pool_handle`) share the memory of their intermediate tensors. They must not
    run at the same time, nor leave results in that memory.
    """
    with torch.cuda.device(device), torch.inference_mode():
        side = _side_stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_RUNS):
                run()
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads may be page-locking memory meanwhile; their calls must not invalidate the recording.
        with torch.cuda.graph(graph, pool, stream=side, capture_error_mode="thread_local"):
            run()
    return graph


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which everything is recorded on `device`: the memory of a pool is used again only on the stream
    that took it."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
