"""The speed of the disk tier as it is measured at start."""

from __future__ import annotations

from itertools import chain, repeat
from pathlib import Path

import numpy as np
import pytest

from parkd.store.files.disk_speed import (
    CALLS_IN_FLIGHT,
    LEAST_BYTES,
    PIECE_BYTES,
    TRIAL_BYTES,
    TRIAL_S,
    read_bytes_per_s,
)
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


def holding(fs: SlowFs, name: str, pieces: int) -> SlowFs:
    fs.create(name).write(0, [np.ones(pieces * PIECE_BYTES, np.uint8)])
    fs.moved["write"], fs.now_s = 0, 0.0
    return fs


def test_only_an_extent_that_is_large_enough_is_read_in_place_of_a_new_file() -> None:
    least, other = holding(SlowFs(0.01), "0123456789abcdef.extent", 2), holding(SlowFs(0.01), "answers", 4)
    assert read_bytes_per_s(least, 0, least.clock) == pytest.approx(PIECE_BYTES / 0.01)
    assert read_bytes_per_s(other, 0, other.clock) is None, "it is not the store's"
    assert other.moved["read"] == 0


@pytest.mark.parametrize(("piece_s", "pieces"), [(2.0, LEAST_BYTES // PIECE_BYTES), (TRIAL_S / 4, 4)])
def test_writing_ends_with_its_time_but_not_before_there_is_enough(piece_s: float, pieces: int) -> None:
    fs = SlowFs(piece_s)
    read_bytes_per_s(fs, 1 << 40, fs.clock)
    assert fs.moved["write"] == pieces


def test_reading_ends_with_its_time_and_reads_something_in_any_case() -> None:
    fs = holding(SlowFs(0.4), "0123456789abcdef.extent", 30)
    assert read_bytes_per_s(fs, 0, fs.clock) == pytest.approx(PIECE_BYTES / 0.4)
    assert 3 <= fs.moved["read"] <= 3 + CALLS_IN_FLIGHT
    late = holding(SlowFs(0.0), "0123456789abcdef.extent", 30)
    times = chain([0.0], repeat(10.0))  # the machine is busy with something else
    assert read_bytes_per_s(late, 0, lambda: next(times)) == pytest.approx(PIECE_BYTES / 10)
