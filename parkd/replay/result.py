"""What a replay is given and what it tells."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from parkd.store.policy import Costs, Policy

DEFAULT_COSTS = Costs(read_s=3.8e-4, read_growth_s=1e-8, bytes_per_s=8e9)
"""20 s for 36k tokens and 70 s for 86k, as two cards of the middle class were seen to take."""
WRITE_BYTES_PER_DAY = 200 << 30
"""As on a server that was not told otherwise."""


@dataclass(frozen=True, slots=True)
class ReplayConfig:
    budget_bytes: int
    policy: Policy
    costs: Costs = DEFAULT_COSTS
    slots: int | None = None
    disk_bytes: int = 0
    """0: RAM alone."""
    write_bytes_per_day: int = WRITE_BYTES_PER_DAY


@dataclass
class ReplayResult:
    """What a budget was worth over a trace. Seconds are the cost model's."""

    policy: str
    budget_bytes: int
    disk_bytes: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    live_hit_tokens: int = 0
    """Found in the arenas: these need no store."""
    parked_hit_tokens: int = 0
    disk_hit_tokens: int = 0
    """Of these, from conversations that were read from disk."""
    cold_s: float = 0.0
    """Had every prompt been read whole."""
    saved_s: float = 0.0
    """Of these, by live and parked state, restores paid."""
    live_saved_s: float = 0.0
    """What the arenas alone save: the same under every policy and budget."""
    evictions: int = 0
    written_bytes: int = 0
    """Copied into the store."""
    disk_written_bytes: int = 0
    disk_read_bytes: int = 0
    peak_bytes: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    partial: int = 0
    wall_s: float = 0.0

    @property
    def hit_tokens(self) -> int:
        return self.live_hit_tokens + self.parked_hit_tokens

    @property
    def parked_saved_s(self) -> float:
        return self.saved_s - self.live_saved_s
