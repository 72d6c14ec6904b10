"""Copies the bytes of a checked transfer between arenas and host memory, and computes their checksums.

    CPU     blocks are spread over a few threads; each is copied in pieces, and a piece is summed while in the cache
    CUDA    `parkd_engine.moves.copies`; work is queued on all devices before the host waits for any

Checksums are always computed over the arena's bytes: before a copy out, after a copy in.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from parkd.state import Checksums, RowRun, StageTransfer, Transfer
from parkd_engine.arenas.arena import StageArena
from parkd_engine.moves.checksum import Checksum, RunningChecksum, WeightedSum
from parkd_engine.moves.copies import StageCopy, copy_on_device

PIECE_BYTES = 1 << 20
"""Copied and then summed at a time on the CPU: small enough that the sum reads it from the cache, large enough that
threads seldom wait for the interpreter lock."""
MAX_THREADS = 4
"""More do not copy faster, since memory bandwidth is the limit."""


class Direction(Enum):
    OUT = "arena to host"
    IN = "host to arena"


@dataclass(frozen=True, slots=True)
class CopySteps:
    """How one piece is copied: `(destination, source)`. Tests replace these to make the Nth copy fail."""

    host: Callable[[npt.NDArray[np.uint8], npt.NDArray[np.uint8]], Any] = np.copyto
    device: Callable[[torch.Tensor, torch.Tensor], Any] = copy_on_device


@dataclass(frozen=True, slots=True)
class Part:
    """The bytes that one checksum covers: those of one arena, and the host buffers they are copied from or to."""

    arena_bytes: torch.Tensor
    """uint8 `[n]`, contiguous."""
    host: tuple[npt.NDArray[np.uint8], ...]
    """In order; together `[n]`."""


def move_stages(
    arenas: Sequence[StageArena],
    transfer: Transfer,
    checksum: Checksum,
    direction: Direction,
    steps: CopySteps,
    before_write: Callable[[int, torch.cuda.Stream, int, int], None],
    fixed: Sequence[Sequence[torch.Tensor]],
    meanwhile: Callable[[], None] | None = None,
) -> Checksums:
    """Copies all stages; returns their checksums.

    The transfer must have been checked. `fixed` has, for each fixed part, one tensor per stage to copy from or to.
    `before_write` is called with `(stage, stream, start, stop)` before rows on a GPU are overwritten. `meanwhile` is
    called once all GPU copies are queued and all CPU copies are done. Raises what a copy or `meanwhile` raises; some
    of the bytes have been copied then.
    """
    on_device = [index for index, arena in enumerate(arenas) if arena.device.type != "cpu"]
    on_host = [index for index, arena in enumerate(arenas) if arena.device.type == "cpu"]
    mine = [[part[index] for part in fixed] for index in range(len(arenas))]
    copies: dict[int, StageCopy] = {}
    try:
        queues = []
        for index in on_device:
            arena, states = arenas[index], mine[index]
            arena.streams.follow_computing()
            copies[index] = StageCopy(arena, arena.streams)
            queues.append(queue(index, copies[index], transfer, checksum, direction, steps, before_write, states))
        for _ in zip_longest(*queues):
            pass
        parts = {index: _parts(arenas[index], transfer, transfer.stages[index], mine[index]) for index in on_host}
        running = {index: [checksum.start() for _ in stage_parts] for index, stage_parts in parts.items()}
        work = [pair for index in on_host for pair in zip(parts[index], running[index], strict=True)]
        _move_on_host(work, direction, steps)
        if meanwhile is not None:
            meanwhile()
        values = np.stack(
            [
                copies[index].values() if index in copies else checksum.values(running[index])
                for index in range(len(arenas))
            ],
            axis=1,
        )
    finally:
        # Also after a failure: the host buffers may be reused for another conversation as soon as this returns.
        for index in on_device:
            arenas[index].streams.synchronize()
    blocks = transfer.blocks
    return Checksums(values[:blocks], values[blocks:])


def queue(
    index: int,
    copy: StageCopy,
    transfer: Transfer,
    checksum: Checksum,
    direction: Direction,
    steps: CopySteps,
    before_write: Callable[[int, torch.cuda.Stream, int, int], None],
    fixed: Sequence[torch.Tensor],
) -> Iterator[None]:
    """Queues the copies of stage `index`, a run of rows at a time. `fixed` has one tensor per fixed part."""
    assert isinstance(checksum, WeightedSum), "the kind that cards compute"
    move = transfer.stages[index]
    if direction is Direction.OUT:
        return copy.queue_out(transfer, move, checksum, steps.device, fixed)
    return copy.queue_in(transfer, move, checksum, steps.device, partial(before_write, index), fixed)


def _parts(arena: StageArena, transfer: Transfer, move: StageTransfer, fixed: Sequence[torch.Tensor]) -> list[Part]:
    states = (Part(state, (part.buffer,)) for part, state in zip(move.fixed, fixed, strict=True))
    return [*_block_parts(arena, transfer, move.rows), *states]


def _block_parts(arena: StageArena, transfer: Transfer, runs: Sequence[RowRun]) -> Iterator[Part]:
    """One stage's part of each block that overlaps `[transfer.start, transfer.stop)`, in order."""
    row_bytes = arena.layout.row_bytes
    index = 0
    for first in range(transfer.start, transfer.stop, transfer.block_tokens):
        end = min(first + transfer.block_tokens, transfer.stop)
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
    # Copies and sums release the interpreter lock. The first failure ends the copy. Leaving the pool waits until no
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
