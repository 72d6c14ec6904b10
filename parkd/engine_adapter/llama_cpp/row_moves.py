"""Capture and restore of a conversation as blocks of rows and, where the model has any, a partial state.

    capture   | copy blocks | copy blocks | ...           each is summed behind its copy, by other threads
              :             | sum         | sum
    restore   | sum         | sum         | ...           each is compared before the library sees it
              :             | copy blocks | copy blocks

The fixed part of a checkpoint is the library's partial state, padded to the size of full windows, and its length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import xxhash

from parkd.engine_adapter.llama_cpp.ranges import CellRanges, Rows
from parkd.engine_adapter.llama_cpp.sequence import PARTIAL
from parkd.engine_adapter.llama_cpp.timeline import Timeline
from parkd.errors import EngineFailure, RestoreFailed
from parkd.state import Bytes, Checksums, StageLayout, StageTransfer, Sums, Transfer

SUM_THREADS = 8
"""One of them sums at 8 to 20 GB/s, and a link moves up to 55."""
LENGTH_BYTES = 8
"""At the end of a fixed part: how much of it is the partial state."""


class BlockCapture:
    """Blocks that are copied already, and are being summed. A `CaptureInFlight`."""

    def __init__(self, rows: Sequence[Future[int]], fixed: Sequence[Future[int]]) -> None:
        self._rows, self._fixed = rows, fixed

    def wait(self) -> Checksums:
        return Checksums(_sums(self._rows), _sums(self._fixed))


class RowMoves:
    """For the engine's thread, except for `BlockCapture.wait`."""

    def __init__(self, timeline: Timeline, ranges: CellRanges, layout: StageLayout) -> None:
        self._timeline = timeline
        self._ranges = ranges
        self._layout = layout
        self._threads = ThreadPoolExecutor(SUM_THREADS, thread_name_prefix="parkd-sum")

    def start_capture(self, transfer: Transfer) -> BlockCapture:
        """Copies everything, and returns while it is summed. Raises EngineFailure."""
        timeline = self._timeline
        [stage] = transfer.stages
        if transfer.stop > timeline.position:
            raise EngineFailure(f"The engine is at {timeline.position}, not at {transfer.stop}: nothing can be parked.")
        rows = [self._sum(block) for block in self._ranges.read(self._blocks(stage, transfer.block_tokens))]
        for part in stage.fixed:
            self._pad(timeline.partial_at(part.position), part.buffer)
        return BlockCapture(rows, [self._sum(part.buffer) for part in stage.fixed])

    def restore(self, transfer: Transfer) -> None:
        """Raises RestoreFailed, after which the sequence must be emptied."""
        timeline, ranges = self._timeline, self._ranges
        [stage] = transfer.stages
        blocks = list(self._blocks(stage, transfer.block_tokens))
        self._check(transfer, stage, len(blocks))
        assert transfer.checksums is not None, "checked"
        expected_sums = transfer.checksums[:, 0]
        sums = [self._sum(block.state) for block in blocks]
        fixed = _sums([self._sum(part.buffer) for part in stage.fixed])
        if stage.fixed and (transfer.fixed_checksums is None or not np.array_equal(fixed, transfer.fixed_checksums)):
            raise RestoreFailed("A checksum of the parked state does not match its bytes.")

        def verified() -> Iterator[Rows]:
            for block, found, expected in zip(blocks, sums, expected_sums, strict=True):
                if found.result() != expected:
                    raise RestoreFailed("A checksum of the parked state does not match its bytes.")
                yield block

        try:
            if not timeline.keep(transfer.start, ranges):
                raise RestoreFailed(f"llama.cpp refused to cut its memory at {transfer.start} tokens.")
            if refused := ranges.write(verified()):
                where = f"{refused.start} to {refused.stop}"
                raise RestoreFailed(f"llama.cpp refused the tokens {where}: {timeline.last_words()}")
        finally:
            for future in sums:
                future.cancel()
        if transfer.position < transfer.stop and not ranges.cut(transfer.position):
            raise RestoreFailed(f"llama.cpp refused to cut its memory at {transfer.position} tokens.")
        if stage.fixed:
            timeline.set(_unpadded(stage.fixed[0].buffer), PARTIAL, transfer.position)
        else:
            timeline.stand_at(transfer.position)

    def close(self) -> None:
        self._ranges.close()
        self._threads.shutdown()

    def _check(self, transfer: Transfer, stage: StageTransfer, blocks: int) -> None:
        """Raises RestoreFailed before anything is changed."""
        needed = [transfer.position] if self._timeline.has_fixed_state else []
        if (
            transfer.checksums is None
            or transfer.checksums.shape != (blocks, 1)
            or transfer.start > self._timeline.position
            or transfer.start % transfer.block_tokens
            or [part.position for part in stage.fixed] != needed
            or any(part.buffer.nbytes != self._layout.fixed_bytes for part in stage.fixed)
        ):
            raise RestoreFailed("The parked state does not fit what is live.")

    def _blocks(self, stage: StageTransfer, block_tokens: int) -> Iterator[Rows]:
        """Ascending."""
        for run in stage.rows:
            at = 0
            for start in range(run.start, run.stop, block_tokens):
                stop = min(start + block_tokens, run.stop)
                size = self._layout.block_bytes(stop - start)
                yield Rows(start, stop, run.buffer[at : at + size])
                at += size
            assert at == run.buffer.nbytes, "a run has other bytes than its blocks"

    def _pad(self, state: Bytes, buffer: Bytes) -> None:
        size = state.nbytes
        if size + LENGTH_BYTES > buffer.nbytes:
            raise EngineFailure(f"llama.cpp wrote a partial state of {size} bytes, {buffer.nbytes} are reserved.")
        buffer[:size] = state
        buffer[size:-LENGTH_BYTES] = 0
        buffer[-LENGTH_BYTES:] = np.frombuffer(size.to_bytes(LENGTH_BYTES, "little"), dtype=np.uint8)

    def _sum(self, state: Bytes) -> Future[int]:
        return self._threads.submit(xxhash.xxh3_64_intdigest, state.data)


def _unpadded(buffer: Bytes) -> Bytes:
    """The partial state in a fixed part, whose checksum was compared."""
    return buffer[: int.from_bytes(buffer[-LENGTH_BYTES:].tobytes(), "little")]


def _sums(futures: Sequence[Future[int]]) -> Sums:
    """`[n, 1]`"""
    return np.array([future.result() for future in futures], dtype=np.uint64).reshape(len(futures), 1)
