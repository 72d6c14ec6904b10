"""Engines whose state the store cannot cut: all rows in one buffer, or in a file that the engine writes itself."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xxhash

from parkd.state import Checksums, Grain, StageLayout, StateLayout, StateSizes, Transfer
from parkd.store.records import Capture, CaptureRequest, Lease, Parked, Refused
from parkd.store.store import ConversationStore
from tests.fault.fault_fs import FaultFs
from tests.unit.store.store_kit import KEY, CopyEngine, make_hashes

ROW_BYTES = 2800
FIXED_BYTES = 3000
SPARE_BYTES = 5000


def whole_layout(grain: Grain, fixed_bytes: int = 0) -> StateLayout:
    return StateLayout((StageLayout(0, 4, ROW_BYTES, fixed_bytes, b"whole" * 3),), "xxh3-64", grain)


def path_of(name: str) -> Path:
    """A directory that is nowhere: the engine reads and writes names of the test's own file system."""
    return Path("/nowhere") / name


class WholeEngine(CopyEngine):
    """Its state is its rows, one behind the other; a checkpoint at the end has no bytes of its own."""

    def __init__(self, layout: StateLayout, block_tokens: int, seed: int, fs: FaultFs) -> None:
        super().__init__(layout, block_tokens, seed=seed)
        self.fs = fs
        self.covered = 0
        """Rows `[0, covered)` descend from the lineage's segment."""
        self.spare_bytes = SPARE_BYTES if layout.grain is Grain.FILE else 0
        """How long a file will be is known only up to so much before it is written."""

    def truncate(self, position: int) -> None:
        lineage = self.lineage
        super().truncate(position)
        self.covered = min(self.covered, position)
        self.lineage = lineage if self.covered else ()

    def extend(self, units: np.ndarray, *, checkpoint: bool = False) -> None:
        lineage = self.lineage
        super().extend(units, checkpoint=checkpoint)
        self.lineage = lineage

    def request(self, key: bytes = KEY, *, width: int = 16) -> CaptureRequest:
        has_fixed = self.layout.fixed_bytes > 0
        places = tuple(sorted(self.fixed)) if has_fixed else ()
        sizes = tuple(0 if place == self.position else FIXED_BYTES for place in places)
        return CaptureRequest(
            key_digest=key,
            units=self.units,
            prefix_hashes=make_hashes(self.units, self.block_tokens, key, width),
            lineage=self.lineage,
            layout_digest=self.layout.digest,
            checkpoints=places,
            sizes=StateSizes(self.position * ROW_BYTES + self.spare_bytes, sizes),
            covered=self.covered,
        )

    def park(self, store: ConversationStore, key: bytes = KEY) -> Parked | Refused:
        capture = store.begin_capture(self.request(key))
        if isinstance(capture, Refused):
            return capture
        try:
            return self.finish(store, capture)
        except OSError as error:  # an engine that cannot write its file parks nothing
            store.abort(capture)
            return Refused(None, str(error))  # type: ignore[arg-type]

    def finish(self, store: ConversationStore, capture: Capture) -> Parked:
        parked = super().finish(store, capture)
        self.covered = self.position
        return parked

    def capture(self, transfer: Transfer) -> Checksums:
        [stage] = transfer.stages
        file_bytes, whole = 0, self.arenas[0][: self.position].reshape(-1)
        for run in stage.rows:
            assert (run.start, run.stop) == (0, self.position)
            if run.file is None:
                run.buffer[:] = whole
            else:
                assert whole.nbytes <= run.file.bytes
                self._write(run.file.path.name, whole)
                file_bytes = whole.nbytes
        for part in stage.fixed:
            if part.buffer.nbytes:
                part.buffer[:] = self.fixed[part.position][0]
        parts = [xxh3(part.buffer) for part in stage.fixed]
        return Checksums(_column([xxh3(whole)] * len(stage.rows)), _column(parts), file_bytes)

    def restore(self, lease: Lease) -> None:
        """Sets the whole state, as it was parked, and cuts it at the lease's end."""
        [stage] = lease.transfer.stages
        [run] = stage.rows
        state = self._read(run.file.path.name, run.file.bytes) if run.file is not None else run.buffer
        assert lease.transfer.checksums is not None
        assert xxh3(state) == int(lease.transfer.checksums[0, 0]), "other bytes than the checksum's"
        self.arenas[0][: lease.stop] = state.reshape(-1, ROW_BYTES)[: lease.stop]
        self.fixed = {}
        for part, expected in zip(stage.fixed, lease.transfer.fixed_checksums, strict=True):
            assert part.position == lease.stop
            assert xxh3(part.buffer) == int(expected[0]), "other bytes than the checksum's"
            self.fixed[lease.stop] = [part.buffer.copy() if part.buffer.nbytes else self._at_the_end()]
        self.units = lease.parked.units[: lease.stop].copy()
        self.lineage, self.covered = lease.lineage, lease.stop

    def _at_the_end(self) -> np.ndarray:
        """The fixed state that is part of a whole state, as the engine gives it on its own."""
        return self.rng.integers(0, 256, FIXED_BYTES, dtype=np.uint8)

    def _read(self, name: str, size: int) -> np.ndarray:
        state = np.zeros(size, dtype=np.uint8)
        file = self.fs.open(name)
        file.read(0, [state])
        file.close()
        return state

    def _write(self, name: str, whole: np.ndarray) -> None:
        try:
            file = self.fs.create(name)
            file.write(0, [whole])
            file.close()
        except OSError:
            with contextlib.suppress(OSError):
                self.fs.remove(name)
            raise


def whole_rows(store: ConversationStore, fs: FaultFs, parked: Parked, stop: int) -> list[np.ndarray] | None:
    """The rows of `whole_state`; None if it can't be read."""
    state = whole_state(store, fs, parked, stop)
    return None if state is None else state[0]


def whole_state(
    store: ConversationStore, fs: FaultFs, parked: Parked, stop: int
) -> tuple[list[np.ndarray], tuple[np.ndarray, ...]] | None:
    """The rows `[0, stop)` as an engine would have them that sets the whole state and cuts it, and the fixed state
    there, which has no bytes at the end; None if it cannot.

    Raises AssertionError for bytes that are not those of the checksum: the store has read them, or held them."""
    with store.lease(parked.id, stop) as lease:
        [stage] = lease.transfer.stages
        [run] = stage.rows
        state = run.buffer.copy()
        if run.file is not None:
            state = np.zeros(run.file.bytes, dtype=np.uint8)
            try:
                file = fs.open(run.file.path.name)
                file.read(0, [state])
                file.close()
            except OSError:
                return None
        assert lease.transfer.checksums is not None
        assert xxh3(state) == int(lease.transfer.checksums[0, 0]), "other bytes than the checksum's"
        for part, expected in zip(stage.fixed, lease.transfer.fixed_checksums, strict=True):
            assert xxh3(part.buffer) == int(expected[0]), "other bytes than the checksum's"
        return [state.reshape(-1, ROW_BYTES)[:stop].copy()], tuple(part.buffer.copy() for part in stage.fixed)


def xxh3(data: np.ndarray) -> int:
    return int(xxhash.xxh3_64_intdigest(data.tobytes()))


def _column(sums: Sequence[int]) -> np.ndarray:
    return np.array(sums, dtype=np.uint64).reshape(len(sums), 1)
