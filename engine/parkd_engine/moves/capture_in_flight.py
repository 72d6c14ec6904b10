"""A capture that runs while the engine computes, cut into segments so that nothing waits long behind one.

    computing stream   ... rows [0, n) written | next prompt: chunk 0 | chunk 1 | ...
                                               |          waits for |a   |b          each chunk only for its own rows
    copy stream                                | rows 0.. |a rows .. |b rows .. |
    sum stream                                 | sums | sums | sums |

A chunk that overwrites rows waits until those rows are copied and checksummed. Fixed state is copied last, from
checkpoints: copies on the GPU that the computing does not change.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from parkd.state import Checksums, RowRun, StageTransfer, Transfer
from parkd_engine.arenas.arena import StageArena
from parkd_engine.arenas.streams import record_event
from parkd_engine.failures import noticing_loss, stage_failed
from parkd_engine.moves.checksum import WeightedSum
from parkd_engine.moves.copies import CopyStep, StageCopy, host_tensor

SEGMENT_BYTES = 128 << 20
"""Small enough that neither a chunk that writes rows nor hidden states on their way to the next GPU wait long behind
one segment (2.4 ms at 55 GB/s), large enough that the thread which queues them seldom takes the interpreter lock from
the one that launches the next prompt: with 8 MiB that prompt took 1.16 times as long on two GPUs, with 128 MiB 1.02.

Only one segment is queued at a time, because a copy engine that always has another one queued starves other copies:
with two queued, hidden states reached the next GPU only after the whole capture."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows `[start, stop)` that one copy moves, and the host bytes it writes."""

    start: int
    stop: int
    buffer: npt.NDArray[np.uint8]


def segments(runs: Sequence[RowRun], row_bytes: int, block_tokens: int) -> Iterator[Segment]:
    """Cuts the runs at block boundaries into segments of at most `SEGMENT_BYTES`, or of one block if that is larger. No
    segment spans two runs, so its host bytes are contiguous."""
    blocks = max(1, SEGMENT_BYTES // (row_bytes * block_tokens))
    for run in runs:
        first = run.start
        while first < run.stop:
            last = min((first // block_tokens + blocks) * block_tokens, run.stop)
            offset = (first - run.start) * row_bytes
            yield Segment(first, last, run.buffer[offset : offset + (last - first) * row_bytes])
            first = last


def _pieces(buffer: npt.NDArray[np.uint8], source: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Cuts one fixed part into (host, device) pairs of at most `SEGMENT_BYTES`."""
    for start in range(0, buffer.nbytes, SEGMENT_BYTES):
        yield host_tensor(buffer[start : start + SEGMENT_BYTES]), source[start : start + SEGMENT_BYTES]


class StageCapture(StageCopy):
    """One stage's part of a capture, queued segment by segment from a thread while the stage computes."""

    def __init__(
        self,
        arena: StageArena,
        transfer: Transfer,
        move: StageTransfer,
        checksum: WeightedSum,
        step: CopyStep,
        fixed: Sequence[torch.Tensor] = (),
    ) -> None:
        """Makes the streams wait for the compute stream and queues the checksums. `fixed` holds the checkpoints that
        the transfer's fixed parts are copied from; their memory must not be written before the capture is done."""
        super().__init__(arena, arena.streams)
        self._step = step
        parts = zip(move.fixed, fixed, strict=True)
        self._fixed = chain.from_iterable(_pieces(part.buffer, copy) for part, copy in parts)
        self._sources = tuple(fixed)  # Referenced so that their memory is not reused before it is copied.
        self._base = arena.base
        """Of the rows that it copies; callers count from the arena's first row."""
        self._start, self._stop = transfer.start, transfer.stop
        self._segments = deque(segments(move.rows, arena.layout.row_bytes, transfer.block_tokens))
        self._copied: list[tuple[int, torch.cuda.Event]] = []
        """Pairs `(stop, event)`, ascending: rows below `stop` may be overwritten once `event` has completed."""
        arena.streams.follow_computing()
        with torch.cuda.stream(arena.streams.sums):
            self._total = (
                [self._block_sums(transfer, checksum, transfer.start, transfer.stop)]
                if transfer.stop > transfer.start
                else []
            )
            self._total += [checksum.block_sums(copy, copy.nbytes) for copy in fixed]
            self._summed = record_event(arena.streams.sums)
        self._last: torch.cuda.Event | None = None

    def queue_next(self) -> bool:
        """Waits for the queued segment, then queues the next. Returns False if none is left."""
        if self._last is not None:
            self._last.synchronize()
        if self._segments:
            self._queue_rows()
        elif (piece := next(self._fixed, None)) is not None:
            with torch.cuda.stream(self._streams.out):
                self._step(*piece)
                self._last = record_event(self._streams.out)
        else:
            return False
        return True

    def _queue_rows(self) -> None:
        segment = self._segments.popleft()
        out = self._streams.out
        with torch.cuda.stream(out):
            self._step(host_tensor(segment.buffer), self._rows[segment.start : segment.stop].view(-1))
            if not self._copied:
                out.wait_event(self._summed)
            self._last = record_event(out)
            self._copied.append((segment.stop, self._last))

    def finish(self) -> None:
        self._streams.sums.wait_stream(self._streams.out)
        self._collect(self._total)

    def event_before_writing(self, start: int, stop: int) -> tuple[bool, torch.cuda.Event | None]:
        """Whether the copies of all captured rows in `[start, stop)` of the arena, counted from its first one, are
        queued, and the event to await, if any."""
        start, stop = start - self._base, stop - self._base
        if max(start, self._start) >= min(stop, self._stop):
            return True, None
        for reached, event in self._copied:
            if reached >= min(stop, self._stop):
                return True, event
        return False, None


class CaptureInFlight:
    """A capture of all stages that runs while the engine computes. It owns its buffers until `wait` returns."""

    def __init__(self, stages: Sequence[StageCapture], blocks: int) -> None:
        self._stages = tuple(stages)
        self._blocks = blocks
        self._changed = threading.Condition()
        self._failed: BaseException | None = None
        # A daemon thread: a driver call that never returns must not keep the process from exiting.
        self._thread = threading.Thread(target=self._queue, name="parkd-capture", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive() and all(stage.is_done for stage in self._stages)

    def free_rows(self, stage: int, stream: torch.cuda.Stream, start: int, stop: int) -> None:
        """Makes `stream` wait until the rows `[start, stop)` of `stage` are copied and may be overwritten: rows of the
        arena, counted from its first one.

        Blocks until those copies are queued: a few milliseconds for a chunk at the first rows.
        """
        with self._changed:
            while True:
                is_queued, event = self._stages[stage].event_before_writing(start, stop)
                if is_queued or self._failed is not None:
                    break
                self._changed.wait()
        if event is not None:
            stream.wait_event(event)

    def wait(self) -> Checksums:
        """Blocks until all bytes are copied.

        May be called from any thread. Raises StageFailed, EngineLost. Nothing writes to the buffers
        after this returns or raises.
        """
        self._thread.join()
        try:
            if self._failed is not None:
                raise stage_failed(0, "capture", self._failed) from self._failed
            with noticing_loss():
                values = np.stack([stage.values() for stage in self._stages], axis=1)
        finally:
            for stage in self._stages:
                stage.synchronize()
        return Checksums(values[: self._blocks], values[self._blocks :])

    def _queue(self) -> None:
        """Queues one segment of each stage in turn, so that all links stay busy."""
        try:
            remaining = list(self._stages)
            while remaining:
                remaining = [stage for stage in remaining if stage.queue_next()]
                with self._changed:
                    self._changed.notify_all()
            for stage in self._stages:
                stage.finish()
        except BaseException as error:  # `wait` raises it. `free_rows` must not block forever.
            with self._changed:
                self._failed = error
                self._changed.notify_all()
