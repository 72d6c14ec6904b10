"""Moves the bytes of a checked plan between arenas and host memory, and computes their checksums.

    CPU     block parts over a few threads; each a piece at a time, copied and then summed while it is in the cache
    CUDA    one copy a run, all devices queued before any is waited for; then the sums, from the arena's bytes

The checksum is always that of the arena's bytes: what was there (out) or what arrived (in).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from engine.arena import StageArena
from engine.checksum import Checksum, RunningChecksum

if TYPE_CHECKING:
    from engine.snapshot import Plan, Run

PIECE_BYTES = 1 << 20
"""Copied and summed in one go on CPU: small enough to be in the cache still when the sum reads it, large enough that
threads seldom meet at the interpreter lock."""
MAX_THREADS = 4
"""More do not copy faster: memory is what is short."""


class Direction(Enum):
    OUT = "arena to host"
    IN = "host to arena"


def copy_on_device(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Queues a copy; it is asynchronous only if the host side is pinned."""
    destination.copy_(source, non_blocking=True)


@dataclass(frozen=True, slots=True)
class CopySteps:
    """How one piece is copied, `(destination, source)`; replaced by tests that make the Nth copy fail."""

    host: Callable[[npt.NDArray[np.uint8], npt.NDArray[np.uint8]], Any] = np.copyto
    device: Callable[[torch.Tensor, torch.Tensor], Any] = copy_on_device


@dataclass(frozen=True, slots=True)
class Part:
    """What one checksum covers: bytes of one arena and the host bytes they go to or come from, in order."""

    arena_bytes: torch.Tensor
    """uint8 `[n]`, contiguous."""
    host: tuple[npt.NDArray[np.uint8], ...]
    """Together `[n]`."""


def move_stages(
    arenas: Sequence[StageArena], plan: Plan, checksum: Checksum, direction: Direction, steps: CopySteps
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Moves all stages; returns the checksums `[blocks, stages]` and `[fixed parts, stages]`.

    The plan has been checked. Raises whatever a copy raises; then some bytes were moved and others not.
    """
    on_device = [index for index, arena in enumerate(arenas) if arena.device.type != "cpu"]
    on_host = [index for index, arena in enumerate(arenas) if arena.device.type == "cpu"]
    try:
        for index in on_device:
            _queue_copies(arenas[index], plan.stages[index].rows, plan.stages[index].fixed, direction, steps)
        # Cut while the cards copy.
        parts = [
            list(_block_parts(arena, plan, stage.rows)) + [Part(arena.fixed, (part.buffer,)) for part in stage.fixed]
            for arena, stage in zip(arenas, plan.stages, strict=True)
        ]
        running = [[checksum.start() for _ in stage_parts] for stage_parts in parts]
        for index in on_device:
            for part, each in zip(parts[index], running[index], strict=True):
                each.update(part.arena_bytes)
        work = [pair for index in on_host for pair in zip(parts[index], running[index], strict=True)]
        _move_on_host(work, direction, steps)
        values = np.stack([checksum.values(stage_running) for stage_running in running], axis=1)
    finally:
        # Also after a failure: the host buffers may be another conversation's as soon as this returns.
        for index in on_device:
            torch.cuda.synchronize(arenas[index].device)
    blocks = -(-(plan.stop - plan.start) // plan.block_tokens)
    return values[:blocks], values[blocks:]


def _block_parts(arena: StageArena, plan: Plan, runs: Sequence[Run]) -> Iterator[Part]:
    """One stage's parts of the blocks that overlap `[plan.start, plan.stop)`, in order."""
    row_bytes = arena.layout.row_bytes
    index = 0
    for first in range(plan.start, plan.stop, plan.block_tokens):
        end = min(first + plan.block_tokens, plan.stop)
        host = []
        at = first
        while at < end:
            run = runs[index]
            until = min(end, run.stop)
            host.append(run.buffer[(at - run.start) * row_bytes : (until - run.start) * row_bytes])
            at = until
            index += at == run.stop
        yield Part(arena.rows[first:end].view(-1), tuple(host))


def _move_on_host(work: Sequence[tuple[Part, RunningChecksum]], direction: Direction, steps: CopySteps) -> None:
    threads = min(MAX_THREADS, os.cpu_count() or 1, len(work))
    if threads <= 1:
        for part, running in work:
            _move_part(part, running, direction, steps)
        return
    # Copies and sums release the interpreter lock. The first failure ends the move; the pool is left only when no
    # thread writes any more.
    with ThreadPoolExecutor(threads, thread_name_prefix="engine-copy") as pool:
        futures = [pool.submit(_move_part, part, running, direction, steps) for part, running in work]
        try:
            for future in futures:
                future.result()
        finally:
            for future in futures:
                future.cancel()


def _move_part(part: Part, running: RunningChecksum, direction: Direction, steps: CopySteps) -> None:
    arena = part.arena_bytes.numpy()
    offset = 0
    for host in part.host:
        for start in range(0, len(host), PIECE_BYTES):
            there = host[start : start + PIECE_BYTES]
            here = arena[offset : offset + len(there)]
            if direction is Direction.IN:
                steps.host(here, there)
            else:
                steps.host(there, here)
            running.update(part.arena_bytes[offset : offset + len(there)])
            offset += len(there)


def _queue_copies(
    arena: StageArena, runs: Sequence[Run], fixed: Sequence[Any], direction: Direction, steps: CopySteps
) -> None:
    moves = [(arena.rows[run.start : run.stop].view(-1), _host_tensor(run.buffer)) for run in runs]
    moves += [(arena.fixed, _host_tensor(part.buffer)) for part in fixed]
    for here, there in moves:
        if direction is Direction.IN:
            steps.device(here, there)
        else:
            steps.device(there, here)


def _host_tensor(buffer: npt.NDArray[np.uint8]) -> torch.Tensor:
    """The same bytes as a tensor. Tensors cannot be read-only as arrays can: a buffer that may only be read is only
    ever a copy's source, which is what `Direction` says."""
    if buffer.flags.writeable or buffer.nbytes == 0:
        return torch.from_numpy(buffer)
    return torch.frombuffer((ctypes.c_uint8 * buffer.nbytes).from_address(buffer.ctypes.data), dtype=torch.uint8)
