"""Figures of a loaded engine: the speed of links and memory, of copies in and out, and of decoding."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.lane import GpuLane
from parkd.store.records import CaptureRequest, Refused
from parkd.types import SamplingParams

GIB = 1 << 30
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=1)


def synchronize(devices: tuple[str, ...]) -> None:
    for device in devices:
        torch.cuda.synchronize(device)


def timed(devices: tuple[str, ...], action: Callable[[], Any], repeats: int) -> float:
    """The median seconds of `action`."""
    seconds = []
    for _ in range(repeats):
        synchronize(devices)
        began = time.perf_counter()
        action()
        synchronize(devices)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def memory_read_bytes_per_s(device: str) -> float:
    """The speed at which a card's memory is read: the faster of a sum and of a copy, which reads and writes."""
    data = torch.empty(2 * GIB, dtype=torch.int64, device=device).random_()
    out = torch.empty_like(data)
    summed = timed((device,), data.sum, 5)
    copied = timed((device,), lambda: out.copy_(data), 5)
    return max(data.nbytes / summed, 2 * data.nbytes / copied)


def raw_copies(lane: GpuLane, transfer: Any, *, into: bool) -> Callable[[], None]:
    """A plain copy of a transfer's bytes, on all cards at once, without checksums or checks."""
    from parkd_engine.moves.copies import host_tensor

    arenas = lane.engine.session.arenas
    pairs = [
        (arena, arena.rows[run.start : run.stop].view(-1), host_tensor(run.buffer))
        for arena, stage in zip(arenas, transfer.stages, strict=True)
        for run in stage.rows
    ] + [
        (arena, arena.fixed, host_tensor(part.buffer))
        for arena, stage in zip(arenas, transfer.stages, strict=True)
        for part in stage.fixed
    ]

    def copy() -> None:
        for arena, rows, host in pairs:
            with torch.cuda.stream(arena.streams.into if into else arena.streams.out):
                if into:
                    rows.copy_(host, non_blocking=True)
                else:
                    host.copy_(rows, non_blocking=True)

    return copy


def capture_request(lane: GpuLane) -> CaptureRequest:
    live = lane.live.rows
    assert live.key is not None
    prompt = lane.prompt(live.key.namespace, live.units.astype("int64"))
    return CaptureRequest(
        key_digest=live.key.digest,
        units=live.units,
        prefix_hashes=prompt.prefix_hashes,
        lineage=(),
        layout_digest=lane.engine.info.layout.digest,
        checkpoints=(live.position,) if lane.engine.info.layout.resume.needs_checkpoints else (),
    )


def copy_figures(lane: GpuLane, devices: tuple[str, ...]) -> dict[str, float]:
    """Captures and restores the live state, and compares with plain copies between the same buffers."""
    engine = lane.engine
    capture = lane.store.begin_capture(capture_request(lane))
    assert not isinstance(capture, Refused), capture
    transfer = capture.transfer
    sums = engine.capture(transfer)
    parked_s = timed(devices, lambda: engine.capture(transfer), 5)
    out_s = timed(devices, raw_copies(lane, transfer, into=False), 5)
    runs = [run.buffer.nbytes for run in transfer.stages[0].rows]
    parked = lane.store.commit(capture, sums)
    with lane.store.lease(parked.id, parked.position) as lease:
        back = lease.transfer
        restored_s = timed(devices, lambda: engine.restore(back), 5)
        in_s = timed(devices, raw_copies(lane, back, into=True), 5)
    lane.store.drop(parked.id, "measured")
    size = transfer.bytes
    return {
        "bytes": size,
        "runs": len(runs),
        "longest_run_bytes": max(runs),
        "park_gb_s": size / parked_s / 1e9,
        "plain_out_gb_s": size / out_s / 1e9,
        "park_share": out_s / parked_s,
        "restore_gb_s": size / restored_s / 1e9,
        "plain_in_gb_s": size / in_s / 1e9,
        "restore_share": in_s / restored_s,
    }


def decode_seconds(lane: GpuLane, devices: tuple[str, ...], steps: int) -> float:
    """Seconds per token after the present position, which is kept."""
    session = lane.engine.session
    position = session.position
    session.checkpoint()
    int(session.step(5).argmax())
    synchronize(devices)
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        int(session.step(5).argmax())
        seconds.append(time.perf_counter() - began)
    session.truncate(position)
    return statistics.median(seconds)


def decode_runs(lane: GpuLane, devices: tuple[str, ...]) -> list[float]:
    """Seconds per token of three runs of 80 tokens."""
    return [decode_seconds(lane, devices, 80) for _ in range(3)]


def generate_seconds(lane: GpuLane, sampling: SamplingParams, steps: int) -> float:
    """Seconds per sampled token after the present position, which is kept."""
    engine = lane.engine
    position = engine.position
    engine.checkpoint()
    engine.begin(np.array([5]), sampling)
    answer = engine.generate()
    next(answer)
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        next(answer)
        seconds.append(time.perf_counter() - began)
    engine.truncate(position)
    return statistics.median(seconds)


def decoded_bytes(lane: GpuLane, position: int) -> int:
    """Bytes that a token at this position reads and writes: weights, rows and fixed state."""
    session = lane.engine.session
    head: Any = session.stages[-1].head
    embedded: Any = session.stages[0].inner.embed_tokens
    is_tied = getattr(head, "weight", None) is not None and head.weight.data_ptr() == embedded.weight.data_ptr()
    weights = lane.engine.info.weights_bytes - (0 if is_tied else embedded.weight.nbytes)
    windows = sum(field.nbytes for arena in session.arenas for field in arena.layout.window_fields)
    fixed = 2 * lane.engine.info.layout.fixed_bytes - windows  # Read and written; windows are only read.
    return int(weights + position * lane.engine.info.layout.row_bytes + fixed)


def decode_figures(lane: GpuLane, devices: tuple[str, ...], read_speed: float) -> dict[str, Any]:
    """Decoding at the present position with and without recorded graphs, and the time to read all weights and rows."""
    session = lane.engine.session
    position = session.position
    limit = decoded_bytes(lane, position) / read_speed
    runs = decode_runs(lane, devices)
    recorded = statistics.median(runs)
    graph, session.forward.decode_graph = session.forward.decode_graph, None
    library = decode_seconds(lane, devices, 4)
    session.forward.decode_graph = graph
    return {
        "position": position,
        "recorded": graph is not None,
        "ms": recorded * 1e3,
        "ms_runs": [seconds * 1e3 for seconds in runs],
        "sampled_ms": generate_seconds(lane, SAMPLED, 40) * 1e3,
        "library_forward_ms": library * 1e3,
        "limit_ms": limit * 1e3,
        "over_limit": recorded / limit,
    }
