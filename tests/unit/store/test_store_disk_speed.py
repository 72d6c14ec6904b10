"""The speed of the disk tier as it is measured at start."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from parkd.store.disk_speed import LEAST_BYTES, PIECE_BYTES, TRIAL_BYTES, TRIAL_S, read_bytes_per_s
from parkd.store.files.fs import UnlinkedFs
from parkd.store.files.park_directory import open_directory
from tests.fault.fault_fs import Fault, FaultFs

MIB = 1 << 20


class SlowFs(FaultFs):
    """Each piece takes `piece_s` to write or to read, by a clock of its own; calls are counted."""

    def __init__(self, piece_s: float) -> None:
        super().__init__()
        self.piece_s, self.now_s = piece_s, 0.0
        self.moved = {"write": 0, "read": 0}

    def clock(self) -> float:
        return self.now_s

    def step(self, kind: str, *given: object) -> bool:
        if kind in self.moved:
            self.now_s += self.piece_s
            self.moved[kind] += 1
        return super().step(kind, *given)


def test_found_by_use_14_a_directory_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    fs = open_directory(tmp_path / "d")
    before = fs.sizes()
    speed = read_bytes_per_s(fs, 16 * MIB)
    assert speed is not None
    assert 1e5 < speed < 1e12
    assert fs.sizes() == before
    fs.close()
    unnamed = UnlinkedFs(tmp_path)
    assert read_bytes_per_s(unnamed, 16 * MIB) is not None
    assert unnamed.sizes() == {}
    unnamed.close()


@pytest.mark.parametrize(("room", "pieces"), [(LEAST_BYTES, 2), (17 * MIB, 4), (1 << 40, TRIAL_BYTES // PIECE_BYTES)])
def test_found_by_use_14_no_more_is_written_than_there_is_room(room: int, pieces: int) -> None:
    fs = SlowFs(piece_s=0.01)
    assert read_bytes_per_s(fs, room, fs.clock) == pytest.approx(PIECE_BYTES / 0.01)
    assert fs.moved == {"write": pieces, "read": pieces}
    assert fs.peak_bytes <= room


def test_found_by_use_14_a_full_budget_is_measured_by_what_is_there_or_not_at_all() -> None:
    fs = SlowFs(piece_s=0.01)
    assert read_bytes_per_s(fs, LEAST_BYTES - 1, fs.clock) is None
    fs.create("0123456789abcdef.extent").write(0, [np.ones(3 * PIECE_BYTES, np.uint8)])
    fs.moved["write"] = 0
    assert read_bytes_per_s(fs, 1 << 40, fs.clock) == pytest.approx(PIECE_BYTES / 0.01)
    assert fs.moved == {"write": 0, "read": 3}
    assert list(fs.names()) == ["0123456789abcdef.extent"]


def test_found_by_use_14_a_slow_disk_does_not_hold_up_the_start() -> None:
    fs = SlowFs(piece_s=0.4)
    assert read_bytes_per_s(fs, 1 << 40, fs.clock) == pytest.approx(PIECE_BYTES / 0.4)
    assert fs.now_s <= 2 * (TRIAL_S + 0.4) + 0.01


@pytest.mark.parametrize("nth", range(1, 8))
def test_found_by_use_14_a_disk_that_fails_is_not_measured(nth: int) -> None:
    fs = FaultFs()
    fs.fault = Fault(nth)
    assert read_bytes_per_s(fs, LEAST_BYTES) is None or fs.operations < nth
    assert not fs.names()
