"""A capture that goes on while the engine computes: cut into segments, so that nobody waits long behind one.

    computing stream   ... rows [0, n) written | next prompt: chunk 0 | chunk 1 | ...
                                               |          waits for |a   |b          each chunk only for its own rows
    copy stream                                | rows 0.. |a rows .. |b rows .. |
    sum stream                                 | sums | sums | sums |

A chunk that overwrites rows waits until those rows are copied and summed. Fixed state goes last: it is read from
checkpoints, which are copies on the card that the computing does not touch.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from engine.arena import StageArena
from engine.checksum import WeightedSum
from engine.copies import CopyStep, StageCopy, host_tensor, record_event
from engine.errors import StageFailed

if TYPE_CHECKING:
    from engine.snapshot import Plan, Run, StageMove

SEGMENT_BYTES = 8 << 20
"""Long enough to reach the speed of a link (4 MiB reach 0.96 of it), short enough that neither a writer nor the hidden
states that pass from card to card wait long behind one.

Only one segment is queued at a time, because a card's copy engine that always has a next one starves other copies: with
two queued, hidden states reached the next card only after the whole capture."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows `[start, stop)` that are copied in one go, and the host bytes they go to."""

    start: int
    stop: int
    buffer: npt.NDArray[np.uint8]


def segments(runs: Sequence[Run], row_bytes: int, block_tokens: int) -> Iterator[Segment]:
    """Cuts the runs at block boundaries into segments of about `SEGMENT_BYTES`, at least a block each. No segment spans
    two runs, so its host bytes are contiguous."""
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
        """Makes the streams follow the computing and queues the checksums. `fixed` holds the checkpoints that the
        plan's fixed parts are copied from; nobody may write to their memory before the capture is done."""
        super().__init__(arena, arena.streams)
        self._step = step
        parts = zip(move.fixed, fixed, strict=True)
        self._fixed = chain.from_iterable(_pieces(part.buffer, copy) for part, copy in parts)
        self._sources = tuple(fixed)  # Referenced until all is copied, so that their memory is not reused before.
        self._start, self._stop = plan.start, plan.stop
        self._segments = deque(segments(move.rows, arena.layout.row_bytes, plan.block_tokens))
        self._copied: list[tuple[int, torch.cuda.Event]] = []
        """Pairs `(stop, event)`, ascending: rows below `stop` may be overwritten once `event` has happened."""
        arena.streams.follow_computing()
        with torch.cuda.stream(arena.streams.sums):
            self._total = [self._block_sums(plan, checksum, plan.start, plan.stop)] if plan.stop > plan.start else []
            self._total += [checksum.block_sums(copy, copy.nbytes) for copy in fixed]
            self._summed = record_event(arena.streams.sums)
        self._last: torch.cuda.Event | None = None

    def queue_next(self) -> bool:
        """Waits for the segment that is queued, then queues the next. False if there is none left."""
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
            self._step(host_tensor(segment.buffer), self.arena.rows[segment.start : segment.stop].view(-1))
            if not self._copied:
                out.wait_event(self._summed)
            self._last = record_event(out)
            self._copied.append((segment.stop, self._last))

    def finish(self) -> None:
        self._streams.sums.wait_stream(self._streams.out)
        self._collect(self._total)

    def event_before_writing(self, start: int, stop: int) -> tuple[bool, torch.cuda.Event | None]:
        """Whether the copies of all captured rows in `[start, stop)` are queued, and the event to wait for, if any."""
        if max(start, self._start) >= min(stop, self._stop):
            return True, None
        for reached, event in self._copied:
            if reached >= min(stop, self._stop):
                return True, event
        return False, None


class CaptureInFlight:
    """A capture of all stages that goes on while the engine computes. Its buffers belong to it until `wait` returns."""

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
        """Makes `stream` wait until the rows `[start, stop)` of `stage` are copied and may be overwritten.

        Blocks until those copies are queued: a few milliseconds for a chunk at the front.
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
        """Blocks until all bytes are copied. Returns checksums `[blocks, stages]` and `[fixed parts, stages]`.

        May be called from any thread. Raises StageFailed, or what the device raises. Either way the buffers are no
        longer written to afterwards.
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
        """Queues a segment of each stage in turn, so that all links stay busy."""
        try:
            remaining = list(self._stages)
            while remaining:
                remaining = [stage for stage in remaining if stage.queue_next()]
                with self._changed:
                    self._changed.notify_all()
            for stage in self._stages:
                stage.finish()
        except BaseException as error:  # `wait` raises it; a writer must not wait for ever
            with self._changed:
                self._failed = error
                self._changed.notify_all()
