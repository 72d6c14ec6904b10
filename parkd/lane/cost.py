"""Measures the costs of reading and moving state on this machine while turns run."""

from __future__ import annotations

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


class CostMeter:
    """Running means of bytes per second, and a running linear fit of seconds per token over depth, since attention
    makes deep tokens cost more."""

    def __init__(self) -> None:
        first = Costs()
        self._means = (0.0, first.read_s, 0.0, 0.0)
        """Means of depth, seconds per token, depth squared, and depth times seconds."""
        self._bytes_per_s = {
            CacheOutcome.RESTORED_RAM: first.bytes_per_s,
            CacheOutcome.RESTORED_DISK: first.disk_bytes_per_s,
        }

    @property
    def measured(self) -> Costs:
        read_s, growth_s = self._line()
        speeds = self._bytes_per_s
        return Costs(read_s, growth_s, speeds[CacheOutcome.RESTORED_RAM], speeds[CacheOutcome.RESTORED_DISK])

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
        if moved_bytes >= MIN_MOVED_BYTES and seconds > 0:
            mean = self._bytes_per_s[outcome]
            self._bytes_per_s[outcome] = mean + NEWEST_WEIGHT * (moved_bytes / seconds - mean)
