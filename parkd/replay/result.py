"""The configuration and the result of a replay."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from parkd.state import Costs
from parkd.store.policy import Policy

DEFAULT_COSTS = Costs(read_s=3.8e-4, read_growth_s=1e-8, bytes_per_s=8e9)
"""20 s for 36k tokens and 70 s for 86k, as observed on two mid-range cards."""
WRITE_BYTES_PER_DAY = 200 << 30
"""The server's default."""


@dataclass(frozen=True, slots=True)
class ReplayConfig:
    budget_bytes: int
    policy: Policy
    costs: Costs = DEFAULT_COSTS
    slots: int | None = None
    disk_bytes: int = 0
    """0: no disk."""
    write_bytes_per_day: int = WRITE_BYTES_PER_DAY


@dataclass
class ReplayResult:
    """What a budget saved over a trace. Seconds are those of the cost model."""

    policy: str
    budget_bytes: int
    disk_bytes: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    live_hit_tokens: int = 0
    """Tokens found in the arenas, without the store."""
    parked_hit_tokens: int = 0
    disk_hit_tokens: int = 0
    """Of the hit tokens: from conversations that were read from disk."""
    cold_s: float = 0.0
    """Seconds to read every prompt whole."""
    saved_s: float = 0.0
    """Of these, the seconds saved by live and parked state, less the time for restores."""
    live_saved_s: float = 0.0
    """Seconds saved by the arenas alone, which are the same for every policy and budget."""
    evictions: int = 0
    written_bytes: int = 0
    """Bytes copied into the store."""
    disk_written_bytes: int = 0
    disk_read_bytes: int = 0
    peak_bytes: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    partial: int = 0
    wall_s: float = 0.0
    turn_read_s: list[float] = field(default_factory=list)
    """Of each turn, the seconds until its prompt is read, once it has the engine."""

    @property
    def hit_tokens(self) -> int:
        return self.live_hit_tokens + self.parked_hit_tokens

    @property
    def parked_saved_s(self) -> float:
        return self.saved_s - self.live_saved_s
