"""How a capture beside other work cuts its runs: by size, at block boundaries, never over two runs."""

from __future__ import annotations

import numpy as np
import pytest
from parkd_engine.moves import capture_in_flight
from parkd_engine.moves.capture_in_flight import segments

from parkd.state import RowRun

BLOCK = 4
ROW_BYTES = 8


@pytest.fixture
def two_blocks_a_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_in_flight, "SEGMENT_BYTES", 2 * BLOCK * ROW_BYTES)


def run(start: int, stop: int) -> RowRun:
    return RowRun(start, stop, np.arange(start * ROW_BYTES, stop * ROW_BYTES).astype(np.uint8))


def ranges(*runs: RowRun) -> list[tuple[int, int]]:
    return [(each.start, each.stop) for each in segments(runs, ROW_BYTES, BLOCK)]


@pytest.mark.usefixtures("two_blocks_a_segment")
def test_a_run_is_cut_at_blocks_and_ends_where_it_ends() -> None:
    assert ranges(run(0, 18)) == [(0, 8), (8, 16), (16, 18)]


@pytest.mark.usefixtures("two_blocks_a_segment")
def test_a_run_that_starts_inside_a_block_is_cut_where_blocks_end() -> None:
    assert ranges(run(2, 14)) == [(2, 8), (8, 14)]


@pytest.mark.usefixtures("two_blocks_a_segment")
def test_no_segment_spans_two_runs() -> None:
    assert ranges(run(0, 4), run(4, 12)) == [(0, 4), (4, 12)]


@pytest.mark.usefixtures("two_blocks_a_segment")
def test_each_segment_has_the_bytes_of_its_rows() -> None:
    for each in segments([run(4, 18)], ROW_BYTES, BLOCK):
        expected = np.arange(each.start * ROW_BYTES, each.stop * ROW_BYTES).astype(np.uint8)
        assert np.array_equal(each.buffer, expected)


def test_a_block_larger_than_a_segment_still_goes_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_in_flight, "SEGMENT_BYTES", 1)
    assert ranges(run(0, 6)) == [(0, 4), (4, 6)]
