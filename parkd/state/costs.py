"""What it costs to read tokens and to move state, in seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds as measured on this machine. Reading token number t costs `read_s + t * read_growth_s`."""

    read_s: float = 1e-3
    """Seconds to read one token at the start of a conversation. High until there is a measurement, so that the first
    decisions prefer to restore."""
    read_growth_s: float = 0.0
    """Additional seconds per token for each token before it, since attention grows with depth."""
    bytes_per_s: float = 8e9
    """Bandwidth of a restore."""
    disk_bytes_per_s: float = 1e9
    """Bandwidth of a promotion, which comes before the restore."""
    best_bytes_per_s: float = float("inf")
    """The bandwidth of restores when nothing slows them down: never less than `bytes_per_s`."""
    best_disk_bytes_per_s: float = float("inf")
    doubt_s: float = 0.0
    """Seconds by which a restore may be faster than `bytes_per_s` says, since that was measured some time ago."""
    disk_doubt_s: float = 0.0

    def reading_s(self, start: int, stop: int) -> float:
        """Seconds to read the tokens `[start, stop)`."""
        count = max(0, stop - start)
        return count * (self.read_s + self.read_growth_s * (start + stop - 1) / 2)

    def moving_s(self, size_bytes: int, *, from_disk: bool) -> float:
        """Seconds to restore `size_bytes`, or to promote them: as measured, less the doubt in it, and at best speed at
        least."""
        if from_disk:
            speed, best, doubt_s = self.disk_bytes_per_s, self.best_disk_bytes_per_s, self.disk_doubt_s
        else:
            speed, best, doubt_s = self.bytes_per_s, self.best_bytes_per_s, self.doubt_s
        return max(size_bytes / best, size_bytes / speed - doubt_s)
