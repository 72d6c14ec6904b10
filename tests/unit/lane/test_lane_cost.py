"""What reading costs is measured as a line over depth."""

from __future__ import annotations

import pytest

from parkd.lane.cost import CostMeter
from parkd.types import CacheOutcome


def test_a_line_through_reads_at_several_depths():
    meter = CostMeter()
    for _ in range(20):
        for start in (0, 20_000, 60_000):
            meter.note_read(2000, 2000 * (4e-4 + 1e-8 * (start + 1000)), start)
    assert meter.measured.read_s == pytest.approx(4e-4, rel=0.01)
    assert meter.measured.read_growth_s == pytest.approx(1e-8, rel=0.01)


def test_one_depth_gives_no_slope_and_noise_no_negative_one():
    meter = CostMeter()
    meter.note_read(100, 50.0)  # too small to tell speed
    assert meter.measured.read_s == 1e-3
    meter.note_read(1000, 0.5)
    assert (meter.measured.read_s, meter.measured.read_growth_s) == (5e-4, 0.0)
    meter.note_read(1000, 0.1, start=50_000)
    assert meter.measured.read_growth_s == 0.0
    assert 1e-4 < meter.measured.read_s < 5e-4


def test_the_store_judges_by_the_bandwidth_of_memory():
    meter = CostMeter()
    for _ in range(40):
        meter.note_move(CacheOutcome.RESTORED_RAM, 1 << 30, 0.5)
    assert meter.measured.bytes_per_s == pytest.approx(2 * (1 << 30), rel=0.01)
