"""What reading costs is measured as a line over depth."""

from __future__ import annotations

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from parkd.lane.cost import RETRY_SHARE, STALE_S, CostMeter
from parkd.lane.start import Start, cheapest, cold_start
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


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


DISK = CacheOutcome.RESTORED_DISK
TIERS = (CacheOutcome.RESTORED_RAM, DISK)
GB = 1e9
WITHOUT_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)
"""A failure takes hours of the clock's time, each of them a loop: the shortest one takes minutes to find."""


class Tier:
    """A tier whose speed changes, and turns that restore from it or read, whichever is expected to be cheaper."""

    def __init__(self, outcome: CacheOutcome, size: int, read_s: float, measured: float | None = None) -> None:
        self.clock, self.outcome, self.size, self.read_s = Clock(), outcome, size, read_s
        self.meter = CostMeter(measured, self.clock)
        self.speed = 2 * GB
        self.lost_s = 0.0

    def turn(self, pause_s: float) -> bool:
        """One turn of 10,000 tokens after a pause. Whether it was restored."""
        self.clock.now_s += pause_s
        tokens = 10_000
        start = Start(self.outcome, tokens, **{"promote_bytes" if self.outcome is DISK else "move_bytes": self.size})
        chosen = cheapest([cold_start(), start], tokens, self.meter.measured)
        took_s = self.size / self.speed if chosen is start else self.read_s
        self.clock.now_s += took_s
        if chosen is start:
            self.lost_s += max(0.0, took_s - self.read_s)
            self.meter.note_move(self.outcome, self.size, took_s)
        else:
            self.meter.note_read(tokens, took_s)
        return chosen is start


@pytest.mark.parametrize("outcome", TIERS)
@settings(phases=WITHOUT_SHRINKING)
@given(
    slowness=st.floats(20, 5000),
    turns=st.integers(1, 60),
    pause_s=st.floats(1, 120),
    size=st.integers(1 << 20, 2 << 30),
)
def test_found_by_use_14_a_tier_is_tried_again_after_a_slow_phase(
    outcome: CacheOutcome, slowness: float, turns: int, pause_s: float, size: int
) -> None:
    """Issue 22, item 14: after a slow phase restores were never tried again, since only they measure."""
    tier = Tier(outcome, size, read_s=4 * size / (0.9 * GB))  # a good restore is some times faster than reading
    tier.meter.note_read(10_000, tier.read_s)
    assert tier.turn(pause_s), "at first it is used"
    tier.speed = 2 * GB / slowness
    for _ in range(turns):
        tier.turn(pause_s)
    tier.speed = 2 * GB
    slow_until_s = tier.clock.now_s
    restored = 0
    while restored < 20:
        assert tier.clock.now_s < slow_until_s + 20 * (STALE_S + pause_s + tier.read_s), f"{restored} restores"
        restored += tier.turn(pause_s)
    assert tier.turn(pause_s), "and it is used as before"


def test_found_by_use_14_what_trying_again_may_lose_is_bounded() -> None:
    """A tier that stays slow is tried again for a small share of the time."""
    tier = Tier(DISK, 1 << 30, read_s=2.0)
    tier.meter.note_read(10_000, tier.read_s)
    tier.speed = GB / 5  # 5 s, where reading takes 2 s
    for _ in range(20):
        tier.turn(5.0)  # until it is known to be slow
    learned_s, tier.lost_s = tier.clock.now_s, 0.0
    while tier.clock.now_s < learned_s + 24 * 3600:
        tier.turn(5.0)
    assert 0 < tier.lost_s <= 1.5 * RETRY_SHARE * (tier.clock.now_s - learned_s)


def test_found_by_use_14_a_small_move_shows_speed_but_not_slowness() -> None:
    clock = Clock()
    meter = CostMeter(None, clock)
    meter.note_move(DISK, 1 << 20, 1.0)
    assert meter.measured.disk_bytes_per_s == GB
    for _ in range(20):
        meter.note_move(DISK, 1 << 30, 1000.0)
    slow = meter.measured.disk_bytes_per_s
    meter.note_move(DISK, 1 << 20, 1e-3)
    assert meter.measured.disk_bytes_per_s > 10 * slow


def test_found_by_use_14_a_fast_drive_that_was_measured_at_start_is_used_at_once() -> None:
    """Issue 22, item 14: at 8,000 tokens a second the guess of 1 GB/s kept an 8B from a drive of 5 GB/s for ever."""
    tokens, row_bytes = 20_000, 131_072
    start = Start(DISK, tokens, promote_bytes=tokens * row_bytes)
    for measured, restores in ((5 * GB, True), (None, False)):
        meter = CostMeter(measured, Clock())
        meter.note_read(10_000, 10_000 / 8000)
        assert (cheapest([cold_start(), start], tokens, meter.measured) is start) == restores


def test_found_by_use_14_a_drive_that_was_slow_at_start_is_tried_later() -> None:
    tier = Tier(DISK, 1 << 30, read_s=5.0, measured=1e7)
    assert not tier.turn(1.0)
    tier.clock.now_s += STALE_S
    assert tier.turn(1.0)
