"""The deterministic engine as one that gives its state whole only: the same arithmetic, opaque bytes.

whole        position | rows of all stages up to it | fixed state
checkpoint   position | fixed state
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from parkd.engine_adapter.whole_sums import compare_sums, sums_of
from parkd.errors import EngineFailure, RestoreFailed
from parkd.state import Bytes, Checksums, Grain, RowRun, StageLayout, StateLayout, StateSizes, Transfer
from tests.fakes.engine import FakeEngine

Words = npt.NDArray[np.uint64]
FILE_SLACK_BYTES = 4096
"""A file's size is foreseen with this much to spare."""


class FakeOpaqueEngine(FakeEngine):
    """An engine of opaque state; with `in_files` its state is a file. Options are those of `FakeEngine`."""

    def __init__(self, *, in_files: bool = False, **options: Any) -> None:
        super().__init__(**options)
        rows, fixed = self.info.layout.row_bytes, self.info.layout.fixed_bytes
        if in_files and fixed:
            fixed = 1
        grain = Grain.FILE if in_files else Grain.OPAQUE
        stage = StageLayout(0, len(self.info.layout.stages), rows, fixed, b"fake-opaque-state")
        self.info = replace(self.info, layout=StateLayout((stage,), "xxh3-64", grain), devices=("cpu",))
        self._in_files = in_files

    def state_sizes(self, checkpoints: Sequence[int]) -> StateSizes:
        whole = self._whole().nbytes + (FILE_SLACK_BYTES if self._in_files else 0)
        return StateSizes(whole, tuple(self._partial(place).nbytes for place in checkpoints))

    def capture(self, transfer: Transfer) -> Checksums:
        assert transfer.layout_digest == self.info.layout.digest
        [stage] = transfer.stages
        assert (transfer.start, transfer.stop) == (0 if stage.rows else self._position, self._position)
        self.hook("capture", transfer.stop)
        whole = self._whole()
        file_bytes = max((self._put(run, whole) for run in stage.rows), default=0)
        for part in stage.fixed:
            part.buffer[:] = self._partial(part.position) if part.buffer.nbytes else part.buffer
        fixed = sums_of([part.buffer for part in stage.fixed])
        self.transfers.append(("capture", 0, transfer.stop))
        return Checksums(sums_of([whole for _ in stage.rows]), fixed, file_bytes)

    def restore(self, transfer: Transfer) -> None:
        with self.emptied_by_failures():
            self._restore(transfer)
        self.transfers.append(("restore", 0, transfer.position))

    def _restore(self, transfer: Transfer) -> None:
        if transfer.layout_digest != self.info.layout.digest or transfer.start != 0:
            raise RestoreFailed("The parked state has another layout than this engine.")
        [stage] = transfer.stages
        [run] = stage.rows
        self.hook("restore", transfer.stop)
        whole = run.buffer if run.file is None else np.fromfile(run.file.path, dtype=np.uint8)
        parts = [part for part in stage.fixed if part.buffer.nbytes]
        compare_sums([whole], transfer.checksums)
        compare_sums([part.buffer for part in stage.fixed], transfer.fixed_checksums)
        self.fixed.go_back(0)
        self._set_whole(whole.view(np.uint64))
        if self._position != transfer.stop:
            raise RestoreFailed(f"The state is of {self._position} tokens, not {transfer.stop}.")
        self.hook("restored", transfer.stop)
        if transfer.position < transfer.stop:
            if self.fixed.exists:
                [part] = parts
                self._set_partial(part.buffer.view(np.uint64), transfer.position)
            self._position = transfer.position
        self.checkpoint()

    def _whole(self) -> Bytes:
        rows = [arena[: self._position].reshape(-1) for arena in self.rows.arenas]
        head = np.array([self._position], dtype=np.uint64)
        return np.concatenate([head, *rows, *self.fixed.live]).view(np.uint8)

    def _partial(self, position: int) -> Bytes:
        return np.concatenate([np.array([position], dtype=np.uint64), *self.fixed.held(position)]).view(np.uint8)

    def _set_whole(self, words: Words) -> None:
        position, at = int(words[0]), 1
        for arena, width in zip(self.rows.arenas, self.rows.widths, strict=True):
            arena[:position] = words[at : at + position * width].reshape(position, width)
            at += position * width
        for live in self.fixed.live:
            live[:] = words[at : at + len(live)]
            at += len(live)
        self._position = position

    def _set_partial(self, words: Words, position: int) -> None:
        if int(words[0]) != position:
            raise RestoreFailed(f"The fixed state is of {int(words[0])} tokens, not {position}.")
        for live, state in zip(self.fixed.live, words[1:].reshape(len(self.fixed.live), -1), strict=True):
            live[:] = state

    def _put(self, run: RowRun, state: Bytes) -> int:
        """Into the buffer or the file; the file's length."""
        if run.file is None:
            run.buffer[:] = state
            return 0
        if state.nbytes > run.file.bytes:
            raise EngineFailure(f"The state takes {state.nbytes} bytes, {run.file.bytes} were reserved.")
        state.tofile(run.file.path)
        run.file.path.chmod(0o600)
        return state.nbytes
