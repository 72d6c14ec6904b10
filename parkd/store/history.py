"""What is remembered of conversations that may be gone: how they have come back so far, and why they left.

The first is only for their value to eviction: what may be reused is decided by units alone. The second explains a cold
read.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import NamedTuple

FIRST_GAP_S = 120.0
"""Time between two turns, until a conversation shows its own: the median of a public trace of chats."""
GAP_WEIGHT = 0.3
"""Weight of the newest gap in the running means."""
LEAST_GAP_S = 1e-3
LEAST_JITTER = 0.15
GHOST_LIMIT = 4096
"""Conversations that are remembered after they are gone, outside the budget."""
GHOST_BYTES = 500
"""Bytes of each, about: two tuples, their numbers, the hash and its place."""
LEAST_KINSHIP = 0.5
"""A conversation continues another if that is at least this share of it; otherwise they only share a beginning."""
GONE_LIMIT = 128
"""Conversations remembered."""
GONE_HASHES = 16
"""Prefix hashes remembered of each: evenly spaced, always including the last."""
GONE_BYTES = 400 + GONE_HASHES * 72
"""Most bytes of each, about, outside the budget."""


class History(NamedTuple):
    turns: int = 1
    """Prompts of this conversation so far."""
    forks: int = 0
    """Other conversations that began from it."""
    gap_s: float = FIRST_GAP_S
    """Running mean of the time between turns."""
    jitter: float = 1.0
    """Running mean of the relative distance of gaps from that mean: near 0 for agents that take turns."""

    def returned(self, gap_s: float) -> History:
        """The history after one more turn, `gap_s` after the last."""
        return self._after(gap_s)._replace(turns=self.turns + 1)

    def forked(self, gap_s: float) -> History:
        """The history after another conversation began from this one, `gap_s` after its last use."""
        return self._after(gap_s)._replace(forks=self.forks + 1)

    def _after(self, gap_s: float) -> History:
        gap_s = max(gap_s, LEAST_GAP_S)
        if self.turns + self.forks == 1:
            return self._replace(gap_s=gap_s)
        off = abs(gap_s - self.gap_s) / max(gap_s, self.gap_s)
        return self._replace(
            gap_s=self.gap_s + GAP_WEIGHT * (gap_s - self.gap_s),
            jitter=max(LEAST_JITTER, self.jitter + GAP_WEIGHT * (off - self.jitter)),
        )


class Ghost(NamedTuple):
    history: History
    position: int
    at_s: float


class Ghosts:
    """Histories by the hash of the last full block, also of conversations that are gone or were never parked.

    At most GHOST_LIMIT; the one noted longest ago makes room.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, Ghost] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def next(self, prefix_hashes: tuple[bytes, ...], position: int, now_s: float) -> History:
        """The history of a conversation of `position` tokens, including the present turn. If the same state is offered
        again after a refusal, that is no further turn."""
        for blocks in range(len(prefix_hashes), max(0, int(len(prefix_hashes) * LEAST_KINSHIP) - 1), -1):
            found = self._known.get(prefix_hashes[blocks - 1])
            if found is not None:
                return found.history if found.position == position else found.history.returned(now_s - found.at_s)
        return History()

    def note(self, prefix_hashes: tuple[bytes, ...], position: int, history: History, now_s: float) -> None:
        if not prefix_hashes:
            return
        known = self._known.get(prefix_hashes[-1])
        if known is None or known.position != position:
            self._known[prefix_hashes[-1]] = Ghost(history, position, now_s)
        self._known.move_to_end(prefix_hashes[-1])
        if len(self._known) > GHOST_LIMIT:
            self._known.popitem(last=False)


@dataclass(frozen=True, slots=True)
class _Gone:
    key_digest: bytes
    hashes: tuple[bytes, ...]
    verb: str
    reason: str
    at_s: float


class GoneMemory:
    """Bounded; the oldest entry makes room."""

    def __init__(self) -> None:
        self._gone: deque[_Gone] = deque(maxlen=GONE_LIMIT)

    def __len__(self) -> int:
        return len(self._gone)

    def remember(self, key_digest: bytes, hashes: tuple[bytes, ...], verb: str, reason: str, at_s: float) -> None:
        """`verb` is what happened (`evicted`), `reason` why. Ignores conversations shorter than a block."""
        if hashes:
            step = -(-len(hashes) // GONE_HASHES)
            self._gone.append(_Gone(key_digest, hashes[::-1][::step], verb, reason, at_s))

    def why(self, key_digest: bytes, hashes: tuple[bytes, ...], now_s: float) -> str:
        """`evicted 12 s ago: ...` for the conversation that shared most with this prompt, the latest among equals; else
        empty."""
        depth = {prefix_hash: index for index, prefix_hash in enumerate(hashes)}
        best, deepest = None, -1
        for gone in reversed(self._gone):
            if gone.key_digest != key_digest:
                continue
            reach = max((depth.get(prefix_hash, -1) for prefix_hash in gone.hashes), default=-1)
            if reach > deepest:
                best, deepest = gone, reach
        if best is None:
            return ""
        return f"{best.verb} {max(0.0, now_s - best.at_s):.0f} s ago: {best.reason}"
