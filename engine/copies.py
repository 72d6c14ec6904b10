"""Copies between cards and host memory, on streams of their own beside the computing.

    computing stream   ... rows [0, n) written | next prompt: chunk 0 | chunk 1 | ...
                                               |          waits for |a   |b          each chunk only for its own rows
    copy stream                                | rows 0.. |a rows .. |b rows .. |
    sum stream                                 | sums | sums | sums |

A copy out waits for the computing that wrote its rows, and whoever overwrites a row waits until it was copied and
summed.
Copies go in runs as long as host memory allows, cut so that nobody waits long behind one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from engine.arena import StageArena
from engine.checksum import WeightedSum
from engine.streams import DeviceStreams

if TYPE_CHECKING:
    from engine.snapshot import Plan, Run, StageMove

SEGMENT_BYTES = 32 << 20
"""Long enough for the full speed of a link (4 MiB reach 0.96 of it), short enough that neither a writer nor the hidden
states that go from card to card wait more than half a millisecond behind one."""
SUM_BYTES = 512 << 20
"""What arrived is summed so much at a time, beside the copying of the next."""

BeforeWrite = Callable[[torch.cuda.Stream, int, int], None]
"""`(stream, start, stop)`: what `stream` does next overwrites the rows `[start, stop)`."""
CopyStep = Callable[[torch.Tensor, torch.Tensor], Any]
"""`(destination, source)`; queues a copy on the current stream."""


def copy_on_device(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Queues a copy; it is asynchronous only if the host side is page-locked."""
    destination.copy_(source, non_blocking=True)


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows `[start, stop)` that are copied in one go, and the host bytes of them."""

    start: int
    stop: int
    buffer: npt.NDArray[np.uint8]


def segments(runs: Sequence[Run], row_bytes: int, block_tokens: int) -> Iterator[Segment]:
    """The runs, cut at blocks in pieces of about `SEGMENT_BYTES`; no piece spans two runs."""
    blocks = max(1, SEGMENT_BYTES // (row_bytes * block_tokens))
    for run in runs:
        first = run.start
        while first < run.stop:
            last = min((first // block_tokens + blocks) * block_tokens, run.stop)
            offset = (first - run.start) * row_bytes
            yield Segment(first, last, run.buffer[offset : offset + (last - first) * row_bytes])
            first = last


def host_tensor(buffer: npt.NDArray[np.uint8]) -> torch.Tensor:
    """The same bytes as a tensor. Tensors cannot be read-only as arrays can: a buffer that may only be read is only
    ever a copy's source."""
    if buffer.flags.writeable or buffer.nbytes == 0:
        return torch.from_numpy(buffer)
    return torch.frombuffer((ctypes.c_uint8 * buffer.nbytes).from_address(buffer.ctypes.data), dtype=torch.uint8)


class StageCopy:
    """One stage's part of a move, once it is queued."""

    def __init__(self, arena: StageArena, streams: DeviceStreams) -> None:
        self.arena = arena
        self._streams = streams
        self._free: list[tuple[int, torch.cuda.Event]] = []
        """Ascending: rows below the first may be overwritten once the second has happened."""
        self._sums: torch.Tensor | None = None
        self._done: torch.cuda.Event | None = None

    def queue_out(self, plan: Plan, move: StageMove, checksum: WeightedSum, step: CopyStep) -> None:
        """Arena to host. The caller has made the streams follow the computing."""
        streams, arena = self._streams, self.arena
        with torch.cuda.stream(streams.sums):
            sums = [self._block_sums(plan, checksum, plan.start, plan.stop)] if plan.stop > plan.start else []
            sums += [checksum.block_sums(arena.fixed, arena.fixed.nbytes) for _ in move.fixed]
            summed = _event(streams.sums)
        with torch.cuda.stream(streams.out):
            for segment in segments(move.rows, arena.layout.row_bytes, plan.block_tokens):
                step(host_tensor(segment.buffer), arena.rows[segment.start : segment.stop].view(-1))
                if not self._free:
                    streams.out.wait_event(summed)
                self._free.append((segment.stop, _event(streams.out)))
            for part in move.fixed:
                step(host_tensor(part.buffer), arena.fixed)
        streams.sums.wait_stream(streams.out)
        self._collect(sums)

    def queue_in(
        self, plan: Plan, move: StageMove, checksum: WeightedSum, step: CopyStep, before_write: BeforeWrite
    ) -> None:
        """Host to arena; sums what arrived. `before_write` is told of rows before they are overwritten."""
        streams, arena = self._streams, self.arena
        sums, summed = [], plan.start
        with torch.cuda.stream(streams.into):
            for segment in segments(move.rows, arena.layout.row_bytes, plan.block_tokens):
                before_write(streams.into, segment.start, segment.stop)
                step(arena.rows[segment.start : segment.stop].view(-1), host_tensor(segment.buffer))
                whole = segment.stop - (segment.stop % plan.block_tokens if segment.stop < plan.stop else 0)
                if whole == plan.stop or (whole - summed) * arena.layout.row_bytes >= SUM_BYTES:
                    streams.sums.wait_stream(streams.into)
                    with torch.cuda.stream(streams.sums):
                        sums.append(self._block_sums(plan, checksum, summed, whole))
                    summed = whole
            for part in move.fixed:
                step(arena.fixed, host_tensor(part.buffer))
        streams.sums.wait_stream(streams.into)
        with torch.cuda.stream(streams.sums):
            sums += [checksum.block_sums(arena.fixed, arena.fixed.nbytes) for _ in move.fixed]
        self._collect(sums)

    def _block_sums(self, plan: Plan, checksum: WeightedSum, start: int, stop: int) -> torch.Tensor:
        """int64, one for each block of the rows `[start, stop)`; `start` begins one."""
        return checksum.block_sums(
            self.arena.rows[start:stop].view(-1), plan.block_tokens * self.arena.layout.row_bytes
        )

    def _collect(self, sums: list[torch.Tensor]) -> None:
        with torch.cuda.stream(self._streams.sums):
            total = torch.cat(sums) if sums else torch.empty(0, dtype=torch.int64, device=self.arena.device)
            self._sums = torch.empty(len(total), dtype=torch.int64, pin_memory=True)
            self._sums.copy_(total, non_blocking=True)
            self._done = _event(self._streams.sums)

    @property
    def is_done(self) -> bool:
        return self._done is None or bool(self._done.query())  # type: ignore[no-untyped-call]

    def free_rows(self, stream: torch.cuda.Stream, start: int, stop: int) -> None:
        """Makes what is queued on `stream` from now on wait until the rows `[start, stop)` may be overwritten."""
        for reached, event in self._free:
            if reached > start:
                stream.wait_event(event)
            if reached >= stop:
                break

    def values(self) -> npt.NDArray[np.uint64]:
        """Waits for the move; the checksums of its blocks and then of its fixed parts."""
        assert self._done is not None, "queued first"
        assert self._sums is not None
        self._done.synchronize()
        return self._sums.numpy().view(np.uint64).copy()

    def synchronize(self) -> None:
        self._streams.synchronize()


def _event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


class CaptureInFlight:
    """A capture of all stages that goes on while the engine computes. Its buffers are its own until `wait` returns."""

    def __init__(self, copies: Sequence[StageCopy], blocks: int) -> None:
        self._copies = tuple(copies)
        self._blocks = blocks

    @property
    def is_done(self) -> bool:
        return all(copy.is_done for copy in self._copies)

    def free_rows(self, stage: int, stream: torch.cuda.Stream, start: int, stop: int) -> None:
        """Makes `stream` wait before it overwrites rows of `stage` that are not yet copied."""
        self._copies[stage].free_rows(stream, start, stop)

    def wait(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """Blocks until every stage's bytes are in; the checksums `[blocks, stages]`, `[fixed parts, stages]`.

        May be called from any thread. Raises what the device raises; the buffers are no longer written to either way.
        """
        try:
            values = np.stack([copy.values() for copy in self._copies], axis=1)
        finally:
            for copy in self._copies:
                copy.synchronize()
        return values[: self._blocks], values[self._blocks :]
