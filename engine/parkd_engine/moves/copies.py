"""Copies between GPUs and host memory, on their own streams beside the compute stream.

A copy out waits for the computing that wrote its rows. Each move copies runs as long as contiguous host memory allows;
a capture that runs while the engine computes is cut into segments instead (`parkd_engine.moves.capture_in_flight`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from parkd.state import StageTransfer, Transfer
from parkd_engine.arenas.arena import StageArena
from parkd_engine.arenas.streams import DeviceStreams, record_event
from parkd_engine.moves.checksum import WeightedSum

SUM_BYTES = 512 << 20
"""Copied-in bytes are checksummed in portions of about this size while the next portion is copied."""

BeforeWrite = Callable[[torch.cuda.Stream, int, int], None]
"""`(stream, start, stop)`: called before `stream` is given work that overwrites the rows `[start, stop)`."""
CopyStep = Callable[[torch.Tensor, torch.Tensor], Any]
"""`(destination, source)`: queues a copy on the current stream."""


def copy_on_device(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Queues a copy, which is asynchronous only if the host side is page-locked."""
    destination.copy_(source, non_blocking=True)


def host_tensor(buffer: npt.NDArray[np.uint8]) -> torch.Tensor:
    """The same memory as a uint8 tensor `[buffer.nbytes]`. Tensors cannot be read-only: if `buffer` is, use the result
    only as the source of a copy."""
    if buffer.flags.writeable:
        return torch.from_numpy(buffer)
    if buffer.nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer((ctypes.c_uint8 * buffer.nbytes).from_address(buffer.ctypes.data), dtype=torch.uint8)


class StageCopy:
    """One stage's part of a move: queues it, then waits for it and returns its checksums."""

    def __init__(self, arena: StageArena, streams: DeviceStreams) -> None:
        self.arena = arena
        self._rows = arena.rows
        """Those of now: if the seat's rows begin elsewhere later, these stay until they are overwritten."""
        self._streams = streams
        self._sums: torch.Tensor | None = None
        self._done: torch.cuda.Event | None = None

    def queue_out(
        self,
        transfer: Transfer,
        move: StageTransfer,
        checksum: WeightedSum,
        step: CopyStep,
        fixed: Sequence[torch.Tensor],
    ) -> Iterator[None]:
        """Queues the copies from the arena to the host, and their checksums; `fixed` holds one tensor for each fixed
        part. Yields after each run of rows, so that the copies of several stages begin together.

        The caller has already made the streams wait for the compute stream.
        """
        streams = self._streams
        for run in move.rows:
            with torch.cuda.stream(streams.out):
                step(host_tensor(run.buffer), self._rows[run.start : run.stop].view(-1))
            yield
        with torch.cuda.stream(streams.out):
            for part, state in zip(move.fixed, fixed, strict=True):
                step(host_tensor(part.buffer), state)
        with torch.cuda.stream(streams.sums):
            sums = (
                [self._block_sums(transfer, checksum, transfer.start, transfer.stop)]
                if transfer.stop > transfer.start
                else []
            )
            sums += [checksum.block_sums(state, state.nbytes) for state in fixed]
        streams.sums.wait_stream(streams.out)
        self._collect(sums)

    def queue_in(
        self,
        transfer: Transfer,
        move: StageTransfer,
        checksum: WeightedSum,
        step: CopyStep,
        before_write: BeforeWrite,
        fixed: Sequence[torch.Tensor],
    ) -> Iterator[None]:
        """Queues the copies from the host to the arena and to `fixed`, and checksums of the bytes that arrived. Yields
        as `queue_out` does.

        Calls `before_write` for each run of rows before its copy is queued.
        """
        streams, arena = self._streams, self.arena
        sums, summed = [], transfer.start
        for run in move.rows:
            with torch.cuda.stream(streams.into):
                before_write(streams.into, run.start, run.stop)
                step(self._rows[run.start : run.stop].view(-1), host_tensor(run.buffer))
            whole = run.stop - (run.stop % transfer.block_tokens if run.stop < transfer.stop else 0)
            if whole == transfer.stop or (whole - summed) * arena.layout.row_bytes >= SUM_BYTES:
                streams.sums.wait_stream(streams.into)
                with torch.cuda.stream(streams.sums):
                    sums.append(self._block_sums(transfer, checksum, summed, whole))
                summed = whole
            yield
        with torch.cuda.stream(streams.into):
            for part, state in zip(move.fixed, fixed, strict=True):
                step(state, host_tensor(part.buffer))
        streams.sums.wait_stream(streams.into)
        with torch.cuda.stream(streams.sums):
            sums += [checksum.block_sums(state, state.nbytes) for state in fixed]
        self._collect(sums)

    def _block_sums(self, transfer: Transfer, checksum: WeightedSum, start: int, stop: int) -> torch.Tensor:
        """int64 `[blocks]`, one sum for each block of the rows `[start, stop)`; `start` is a block boundary."""
        return checksum.block_sums(self._rows[start:stop].view(-1), transfer.block_tokens * self.arena.layout.row_bytes)

    def _collect(self, sums: list[torch.Tensor]) -> None:
        with torch.cuda.stream(self._streams.sums):
            total = torch.cat(sums) if sums else torch.empty(0, dtype=torch.int64, device=self.arena.device)
            self._sums = torch.empty(len(total), dtype=torch.int64, pin_memory=True)
            self._sums.copy_(total, non_blocking=True)
            self._done = record_event(self._streams.sums)

    @property
    def is_done(self) -> bool:
        return self._done is None or bool(self._done.query())  # type: ignore[no-untyped-call]

    def values(self) -> npt.NDArray[np.uint64]:
        """Waits for the move. Returns the checksums of its blocks, then those of its fixed parts."""
        assert self._done is not None, "queued first"
        assert self._sums is not None
        self._done.synchronize()
        return self._sums.numpy().view(np.uint64).copy()

    def synchronize(self) -> None:
        self._streams.synchronize()
