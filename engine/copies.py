"""Copies between cards and host memory, on streams of their own beside the computing.

    computing stream   ... rows [0, n) written | next prompt: chunk 0 | chunk 1 | ...
                                               |          waits for |a   |b          each chunk only for its own rows
    copy stream                                | rows 0.. |a rows .. |b rows .. |
    sum stream                                 | sums | sums | sums |

A copy out waits for the computing that wrote its rows, and whoever overwrites a row waits until it was copied and
summed. Fixed state goes last, from checkpoints: copies on the card that the computing does not touch.
Copies go in runs as long as host memory allows; beside other work they are cut, so that nobody waits long behind one.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from engine.arena import StageArena
from engine.checksum import WeightedSum
from engine.errors import StageFailed
from engine.streams import DeviceStreams

if TYPE_CHECKING:
    from engine.snapshot import Plan, Run, StageMove

SEGMENT_BYTES = 8 << 20
"""Of a capture beside other work: long enough for the speed of a link (4 MiB reach 0.96 of it), short enough that
neither a writer nor the hidden states that go from card to card wait long behind one.

One is queued at a time: a card's copy engine that always has a next segment starves what others ask of it. With two
queued, the hidden states that go from card to card came through only when the whole capture was done."""
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
    """The runs, cut at blocks in pieces of about `SEGMENT_BYTES`; no piece spans two runs. At least a block each."""
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
    if buffer.flags.writeable:
        return torch.from_numpy(buffer)
    if buffer.nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer((ctypes.c_uint8 * buffer.nbytes).from_address(buffer.ctypes.data), dtype=torch.uint8)


def _pieces(buffer: npt.NDArray[np.uint8], source: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(host, device) pieces of one fixed part, of at most `SEGMENT_BYTES`."""
    for start in range(0, buffer.nbytes, SEGMENT_BYTES):
        yield host_tensor(buffer[start : start + SEGMENT_BYTES]), source[start : start + SEGMENT_BYTES]


class StageCopy:
    """One stage's part of a move, once it is queued."""

    def __init__(self, arena: StageArena, streams: DeviceStreams) -> None:
        self.arena = arena
        self._streams = streams
        self._sums: torch.Tensor | None = None
        self._done: torch.cuda.Event | None = None

    def queue_out(
        self, plan: Plan, move: StageMove, checksum: WeightedSum, step: CopyStep, fixed: Sequence[torch.Tensor]
    ) -> None:
        """Arena to host, and `fixed`, a tensor a part. The caller has made the streams follow the computing."""
        streams, arena = self._streams, self.arena
        with torch.cuda.stream(streams.out):
            for run in move.rows:
                step(host_tensor(run.buffer), arena.rows[run.start : run.stop].view(-1))
            for part, state in zip(move.fixed, fixed, strict=True):
                step(host_tensor(part.buffer), state)
        with torch.cuda.stream(streams.sums):
            sums = [self._block_sums(plan, checksum, plan.start, plan.stop)] if plan.stop > plan.start else []
            sums += [checksum.block_sums(state, state.nbytes) for state in fixed]
        streams.sums.wait_stream(streams.out)
        self._collect(sums)

    def queue_in(
        self,
        plan: Plan,
        move: StageMove,
        checksum: WeightedSum,
        step: CopyStep,
        before_write: BeforeWrite,
        fixed: Sequence[torch.Tensor],
    ) -> None:
        """Host to arena and `fixed`; sums what arrived. `before_write` is told of rows before they are overwritten."""
        streams, arena = self._streams, self.arena
        sums, summed = [], plan.start
        with torch.cuda.stream(streams.into):
            for run in move.rows:
                before_write(streams.into, run.start, run.stop)
                step(arena.rows[run.start : run.stop].view(-1), host_tensor(run.buffer))
                whole = run.stop - (run.stop % plan.block_tokens if run.stop < plan.stop else 0)
                if whole == plan.stop or (whole - summed) * arena.layout.row_bytes >= SUM_BYTES:
                    streams.sums.wait_stream(streams.into)
                    with torch.cuda.stream(streams.sums):
                        sums.append(self._block_sums(plan, checksum, summed, whole))
                    summed = whole
            for part, state in zip(move.fixed, fixed, strict=True):
                step(state, host_tensor(part.buffer))
        streams.sums.wait_stream(streams.into)
        with torch.cuda.stream(streams.sums):
            sums += [checksum.block_sums(state, state.nbytes) for state in fixed]
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


class StageCapture(StageCopy):
    """One stage's rows on their way out while the stage computes; queued a few segments at a time by a thread."""

    def __init__(
        self,
        arena: StageArena,
        plan: Plan,
        move: StageMove,
        checksum: WeightedSum,
        step: CopyStep,
        fixed: Sequence[torch.Tensor] = (),
    ) -> None:
        """Queues the sums. The streams follow the computing. `fixed` are the checkpoints of the plan's fixed parts,
        whose memory nobody writes to before this is done."""
        super().__init__(arena, arena.streams)
        self._step = step
        parts = zip(move.fixed, fixed, strict=True)
        self._fixed = chain.from_iterable(_pieces(part.buffer, copy) for part, copy in parts)
        self._sources = tuple(fixed)  # Held until all is copied: their memory must not be given to others before.
        self._start, self._stop = plan.start, plan.stop
        self._segments = deque(segments(move.rows, arena.layout.row_bytes, plan.block_tokens))
        self._copied: list[tuple[int, torch.cuda.Event]] = []
        """Ascending: rows below the first may be overwritten once the second has happened."""
        arena.streams.follow_computing()
        with torch.cuda.stream(arena.streams.sums):
            self._total = [self._block_sums(plan, checksum, plan.start, plan.stop)] if plan.stop > plan.start else []
            self._total += [checksum.block_sums(copy, copy.nbytes) for copy in fixed]
            self._summed = _event(arena.streams.sums)
        self._last: torch.cuda.Event | None = None

    def queue_next(self) -> bool:
        """Queues one segment more, as soon as few enough are queued. False if there is none."""
        if self._last is not None:
            self._last.synchronize()
        if self._segments:
            self._queue_rows()
        elif (piece := next(self._fixed, None)) is not None:
            with torch.cuda.stream(self._streams.out):
                self._step(*piece)
                self._last = _event(self._streams.out)
        else:
            return False
        return True

    def _queue_rows(self) -> None:
        segment = self._segments.popleft()
        out = self._streams.out
        with torch.cuda.stream(out):
            self._step(host_tensor(segment.buffer), self.arena.rows[segment.start : segment.stop].view(-1))
            if not self._copied:
                out.wait_event(self._summed)
            self._last = _event(out)
            self._copied.append((segment.stop, self._last))

    def finish(self) -> None:
        self._streams.sums.wait_stream(self._streams.out)
        self._collect(self._total)

    def event_before_writing(self, start: int, stop: int) -> tuple[bool, torch.cuda.Event | None]:
        """Whether what is queued covers the rows `[start, stop)` as far as they are captured, and what to wait for."""
        if max(start, self._start) >= min(stop, self._stop):
            return True, None
        for reached, event in self._copied:
            if reached >= min(stop, self._stop):
                return True, event
        return False, None


class CaptureInFlight:
    """A capture of all stages that goes on while the engine computes. Its buffers are its own until `wait` returns."""

    def __init__(self, stages: Sequence[StageCapture], blocks: int) -> None:
        self._stages = tuple(stages)
        self._blocks = blocks
        self._changed = threading.Condition()
        self._failed: BaseException | None = None
        # A daemon: a driver call that never returns must not keep the process from ending.
        self._thread = threading.Thread(target=self._queue, name="parkd-capture", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive() and all(stage.is_done for stage in self._stages)

    def free_rows(self, stage: int, stream: torch.cuda.Stream, start: int, stop: int) -> None:
        """Makes `stream` wait before it overwrites rows of `stage` that are not yet copied.

        Waits itself until their copies are queued: a few milliseconds for a chunk at the front.
        """
        with self._changed:
            while True:
                is_queued, event = self._stages[stage].event_before_writing(start, stop)
                if is_queued or self._failed is not None:
                    break
                self._changed.wait()
        if event is not None:
            stream.wait_event(event)

    def wait(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """Blocks until every stage's bytes are in; the checksums `[blocks, stages]`, `[fixed parts, stages]`.

        May be called from any thread. Raises what a copy or the device raises; the buffers are no longer written to
        either way.
        """
        self._thread.join()
        try:
            if self._failed is not None:
                raise StageFailed(0, "capture", self._failed) from self._failed
            values = np.stack([stage.values() for stage in self._stages], axis=1)
        finally:
            for stage in self._stages:
                stage.synchronize()
        return values[: self._blocks], values[self._blocks :]

    def _queue(self) -> None:
        """A segment of each stage in turn, so that all links are busy."""
        try:
            remaining = list(self._stages)
            while remaining:
                remaining = [stage for stage in remaining if stage.queue_next()]
                with self._changed:
                    self._changed.notify_all()
            for stage in self._stages:
                stage.finish()
        except BaseException as error:  # told by `wait`; a writer must not wait for ever
            with self._changed:
                self._failed = error
                self._changed.notify_all()
