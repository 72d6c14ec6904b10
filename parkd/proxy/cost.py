"""What reading and moving cost on this machine, measured as turns go by."""

from __future__ import annotations

from parkd.identity.matcher import CostModel
from parkd.types import CacheOutcome

FIRST_READ_S = 1e-3
"""A token, until one was measured. On the high side: then the first decisions restore."""
FIRST_BYTES_PER_S = {CacheOutcome.RESTORED_RAM: 8e9, CacheOutcome.RESTORED_DISK: 1e9}
MIN_READ_TOKENS = 512
MIN_MOVED_BYTES = 8 * 1024 * 1024
"""Smaller samples measure overhead, not speed."""
NEWEST_WEIGHT = 0.3


class CostMeter:
    """Running means of seconds a token and bytes a second."""

    def __init__(self) -> None:
        self._read_s = FIRST_READ_S
        self._bytes_per_s = dict(FIRST_BYTES_PER_S)

    @property
    def model(self) -> CostModel:
        return CostModel(read_s=self._read_s, bytes_per_s=dict(self._bytes_per_s))

    def has_read(self, tokens: int, seconds: float) -> None:
        if tokens >= MIN_READ_TOKENS and seconds > 0:
            self._read_s += NEWEST_WEIGHT * (seconds / tokens - self._read_s)

    def has_moved(self, outcome: CacheOutcome, moved_bytes: int, seconds: float) -> None:
        if moved_bytes >= MIN_MOVED_BYTES and seconds > 0:
            mean = self._bytes_per_s[outcome]
            self._bytes_per_s[outcome] = mean + NEWEST_WEIGHT * (moved_bytes / seconds - mean)
