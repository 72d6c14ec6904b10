"""What cold reads cost: pure, from sums to a document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

JOULES_PER_KWH = 3_600_000


@dataclass(frozen=True, slots=True)
class Price:
    """What an operator says of the machine."""

    watts: float | None = None
    """That it takes while it reads."""
    per_kwh: float | None = None

    def of(self, seconds: float) -> Mapping[str, float]:
        """kWh if watts are known, money if the price is too."""
        if self.watts is None:
            return {}
        kwh = self.watts * seconds / JOULES_PER_KWH
        return {"kwh": kwh} if self.per_kwh is None else {"kwh": kwh, "money": kwh * self.per_kwh}


@dataclass(frozen=True, slots=True)
class Sum:
    """Over some turns."""

    group: str
    turns: int
    prompt_tokens: int
    reused_tokens: int
    read_tokens: int
    needless_tokens: int
    read_s: float
    needless_s: float

    def document(self, price: Price) -> Mapping[str, Any]:
        return {
            "turns": self.turns,
            "prompt_tokens": self.prompt_tokens,
            "reused_tokens": self.reused_tokens,
            "read_tokens": self.read_tokens,
            "needless_tokens": self.needless_tokens,
            "read_s": round(self.read_s, 3),
            "needless_s": round(self.needless_s, 3),
            **price.of(self.needless_s),
        }
