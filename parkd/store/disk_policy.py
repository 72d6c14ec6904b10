"""What is worth a write, and who goes from the disk: pure functions over plain values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from parkd.store.records import ConversationId

DAY_S = 86_400.0
THRIFTY_BELOW = 0.5
"""Once less than this share of the write allowance is left, only conversations that came back are written: three of
four that were seen once never return, and a drive is worn by writing what nobody reads."""


@dataclass
class WriteAllowance:
    """Bytes that may be written, refilled evenly over the day, at most a day's worth."""

    bytes_per_day: int
    at_s: float
    left_bytes: float

    @classmethod
    def full(cls, bytes_per_day: int, now_s: float, written_bytes: int = 0) -> WriteAllowance:
        """`written_bytes` were written in the last day, by whoever had the directory before."""
        return cls(bytes_per_day, now_s, float(max(0, bytes_per_day - written_bytes)))

    def refill(self, now_s: float) -> None:
        gained = max(0.0, now_s - self.at_s) * self.bytes_per_day / DAY_S
        self.left_bytes = min(float(self.bytes_per_day), self.left_bytes + gained)
        self.at_s = now_s

    def spend(self, size: int) -> None:
        self.left_bytes -= size

    @property
    def share(self) -> float:
        return self.left_bytes / self.bytes_per_day if self.bytes_per_day else 0.0


def worth_writing(size_bytes: int, left_bytes: float, share: float, *, has_returned: bool) -> bool:
    """Whether a conversation that takes `size_bytes` more on disk is written, with so much of the allowance left."""
    return size_bytes <= left_bytes and (has_returned or share >= THRIFTY_BELOW)


class Removable(NamedTuple):
    """A conversation on disk that may go."""

    id: ConversationId
    last_used_s: float
    is_foreign: bool
    """Of other weights, or of another split of the layers: it can't be used now."""
    is_superseded: bool
    """What is about to be written can do all that this one can."""


def next_removal(removable: Iterable[Removable], used_before_s: float) -> ConversationId | None:
    """Who makes room on disk: what is superseded, then what can't be used, then the least recently used; but nobody
    used after `used_before_s`. So a write displaces only what is older than itself, and nothing is written to push out
    what will be written again."""
    order = sorted(removable, key=lambda entry: (not entry.is_superseded, not entry.is_foreign, entry.last_used_s))
    for entry in order[:1]:
        if entry.is_superseded or entry.is_foreign or entry.last_used_s <= used_before_s:
            return entry.id
    return None
