"""How a conversation came back so far: what expectations of its next return rest on.

Only ever used to judge worth. What may be reused is decided by units alone.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

FIRST_GAP_S = 120.0
"""Between two turns, until a conversation shows its own: the median of a public trace of chats."""
GAP_WEIGHT = 0.3
"""Of the newest gap in the running means."""
LEAST_GAP_S = 1e-3
LEAST_JITTER = 0.15
GHOST_LIMIT = 4096
"""Conversations remembered after they went, at about 300 bytes each, outside the budget."""
LEAST_KINSHIP = 0.5
"""A conversation continues another if that is at least this share of it; else it only shares its head."""


class History(NamedTuple):
    turns: int = 1
    """Prompts of this conversation so far."""
    forks: int = 0
    """Other conversations that began from it."""
    gap_s: float = FIRST_GAP_S
    """Running mean of the time between turns."""
    jitter: float = 1.0
    """Running mean of how far a gap is from that mean, in parts of it: near 0 for agents that go round."""

    def returned(self, gap_s: float) -> History:
        """After one more turn, `gap_s` behind the one before."""
        return self._after(gap_s)._replace(turns=self.turns + 1)

    def forked(self, gap_s: float) -> History:
        """After another conversation began from it, `gap_s` after it was last of use."""
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
    """How conversations came back, by the hash of their last full block: also of those that went or never were parked.

    Bounded; the one noted longest ago makes room.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, Ghost] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def next(self, prefix_hashes: tuple[bytes, ...], position: int, now_s: float) -> History:
        """The history of the conversation of `position` tokens that is offered now, this turn counted. The same state
        offered again, after a refusal, is no further turn."""
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
