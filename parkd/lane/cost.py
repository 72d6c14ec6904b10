"""Measures the costs of reading and moving state on this machine while turns run."""

from __future__ import annotations

import time
from collections.abc import Callable

from parkd.state import Costs
from parkd.types import CacheOutcome

MIN_READ_TOKENS = 512
MIN_MOVED_BYTES = 8 * 1024 * 1024
"""Smaller samples would measure overhead, not speed."""
NEWEST_WEIGHT = 0.3
MIN_DEPTH_SPREAD = 1024
"""The slope is only used if the standard deviation of depths, in tokens, is at least this."""
LEAST_FLAT_SHARE = 0.2
"""The share of a token's mean cost that never counts as depth."""
RETRY_SHARE = 0.02
"""The share of time that may be lost by trying a tier again that was slow when it was last used."""
STALE_S = 1800.0
"""After this long without use, a tier is tried as if it had never been slow."""


class CostMeter:
    """Running means of each tier's bytes per second, and a running linear fit of seconds per token over depth, since
    attention makes deep tokens cost more."""

    def __init__(
        self,
        disk_bytes_per_s: float | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        *,
        ram_bytes_per_s: float | None = None,
    ) -> None:
        """`disk_bytes_per_s` and `ram_bytes_per_s` are what was measured at start; None: nothing was."""
        first, now_s = Costs(), monotonic()
        self._monotonic = monotonic
        self._means = (0.0, first.read_s, 0.0, 0.0)
        """Means of depth, seconds per token, depth squared, and depth times seconds."""
        self._speeds = {
            CacheOutcome.RESTORED_RAM: _Speed(first.bytes_per_s, ram_bytes_per_s, now_s),
            CacheOutcome.RESTORED_DISK: _Speed(first.disk_bytes_per_s, disk_bytes_per_s, now_s),
        }

    @property
    def measured(self) -> Costs:
        read_s, growth_s = self._line()
        ram, disk = self._speeds[CacheOutcome.RESTORED_RAM], self._speeds[CacheOutcome.RESTORED_DISK]
        now_s = self._monotonic()
        return Costs(
            read_s,
            growth_s,
            bytes_per_s=ram.bytes_per_s,
            disk_bytes_per_s=disk.bytes_per_s,
            best_bytes_per_s=ram.best,
            best_disk_bytes_per_s=disk.best,
            doubt_s=ram.doubt_s(now_s),
            disk_doubt_s=disk.doubt_s(now_s),
        )

    def note_read(self, tokens: int, seconds: float, start: int = 0) -> None:
        """Notes that reading the tokens `[start, start + tokens)` took `seconds`."""
        if tokens < MIN_READ_TOKENS or seconds <= 0:
            return
        depth, token_s = start + tokens / 2, seconds / tokens
        sample = (depth, token_s, depth * depth, depth * token_s)
        # The first sample replaces the guess.
        weight = NEWEST_WEIGHT if self._means[2] else 1.0
        mean = [old + weight * (new - old) for old, new in zip(self._means, sample, strict=True)]
        self._means = (mean[0], mean[1], mean[2], mean[3])

    def _line(self) -> tuple[float, float]:
        """Seconds of the first token, and the additional seconds per token of depth.

        The slope is 0 until depths differ enough; it is never negative, nor so steep that the first token would be
        free.
        """
        depth, token_s, depth_squared, product = self._means
        spread = depth_squared - depth * depth
        if spread < MIN_DEPTH_SPREAD**2:
            return token_s, 0.0
        slope = max(0.0, (product - depth * token_s) / spread)
        slope = min(slope, (1 - LEAST_FLAT_SHARE) * token_s / depth)
        return token_s - slope * depth, slope

    def note_move(self, outcome: CacheOutcome, moved_bytes: int, seconds: float) -> None:
        """Notes that a restore (RAM) or a promotion (disk) took `seconds`."""
        if seconds > 0:
            self._speeds[outcome].note(moved_bytes, moved_bytes / seconds, self._monotonic())


class _Speed:
    """The bandwidth of one tier, and how much what was measured is to be trusted.

    Moves are only measured when they are made. So after a slow phase nothing would be moved any more, and nothing
    measured. Therefore a measurement is doubted by a share of the time since: a restore that seems to lose n seconds
    against reading is tried again after n / RETRY_SHARE seconds, and any after STALE_S.
    """

    def __init__(self, guess: float, measured: float | None, now_s: float) -> None:
        self.bytes_per_s = guess if measured is None else measured
        self.best = max(guess, self.bytes_per_s)  # even if the first measurement was in a slow phase
        self._noted_s = now_s

    def note(self, moved_bytes: int, bytes_per_s: float, now_s: float) -> None:
        self._noted_s = now_s
        # A small move is slowed down by overhead, so it tells only that the tier is at least as fast.
        if moved_bytes >= MIN_MOVED_BYTES or bytes_per_s > self.bytes_per_s:
            self.bytes_per_s += NEWEST_WEIGHT * (bytes_per_s - self.bytes_per_s)
            self.best = max(self.best, self.bytes_per_s)

    def doubt_s(self, now_s: float) -> float:
        age_s = now_s - self._noted_s
        return RETRY_SHARE * age_s if age_s < STALE_S else float("inf")
