"""What is worth writing to disk, and what is removed from it: pure functions over plain values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from parkd.store.records import ConversationId

DAY_S = 86_400.0
THRIFTY_BELOW = 0.5
"""Once less than this share of the write allowance is left, only conversations that have come back before are written:
three of four that were seen once never return, and writing what nobody reads wears the drive."""


@dataclass
class WriteAllowance:
    """Bytes that may be written: refilled evenly over the day, at most one day's worth."""

    bytes_per_day: int
    at_s: float
    left_bytes: float

    @classmethod
    def full(cls, bytes_per_day: int, now_s: float, written_bytes: int = 0) -> WriteAllowance:
        """`written_bytes` were written to the directory in the last day, by earlier processes."""
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


FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 600.0
"""Pause after a failed write; doubled with each further failure in a row."""


@dataclass
class WritePause:
    """How long nothing is written after writes that failed."""

    until_s: float = float("-inf")
    failures_in_a_row: int = 0

    def failed(self, now_s: float) -> None:
        self.until_s = now_s + min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**self.failures_in_a_row)
        self.failures_in_a_row += 1

    def succeeded(self) -> None:
        self.failures_in_a_row = 0

    def is_on(self, now_s: float) -> bool:
        return now_s < self.until_s


def worth_writing(size_bytes: int, left_bytes: float, share: float, *, has_returned: bool) -> bool:
    """Whether to write a conversation that takes `size_bytes` more on disk, with `left_bytes` (`share`) of the day's
    allowance left."""
    return size_bytes <= left_bytes and (has_returned or share >= THRIFTY_BELOW)


class Removable(NamedTuple):
    """A conversation on disk that may be removed."""

    id: ConversationId
    last_used_s: float
    is_foreign: bool
    """It is of other weights or another layer split, so it cannot be used now."""
    is_superseded: bool
    """What is about to be written makes it superfluous."""


def next_removal(removable: Iterable[Removable], used_before_s: float) -> ConversationId | None:
    """The next conversation to remove from disk: superseded ones first, then those that cannot be used, then the least
    recently used. None used after `used_before_s` is removed, so that a write displaces only what is older, and
    conversations do not displace each other in turns."""
    order = sorted(removable, key=lambda entry: (not entry.is_superseded, not entry.is_foreign, entry.last_used_s))
    for entry in order[:1]:
        if entry.is_superseded or entry.is_foreign or entry.last_used_s <= used_before_s:
            return entry.id
    return None
