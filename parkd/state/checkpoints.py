"""An engine's checkpoints (copies of its fixed state at earlier positions), and where chunks end so that they can be
taken: one rule for every engine.

|---- root ----|---- dropped first ----|--------|---- used last ----| position
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

S = TypeVar("S")


class KeptStates(Generic[S]):
    """At most `limit` states by position. The least recently used one is dropped first; the earliest always stays."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._states: dict[int, S] = {}
        """Position -> state, the least recently used first."""

    @property
    def positions(self) -> tuple[int, ...]:
        """Ascending."""
        return tuple(sorted(self._states))

    def __contains__(self, position: int) -> bool:
        return position in self._states

    def get(self, position: int) -> S | None:
        """The state at `position`, or None. Does not count as use."""
        return self._states.get(position)

    def use(self, position: int) -> S:
        """The state at `position`, now the most recently used. Raises KeyError."""
        self._states[position] = state = self._states.pop(position)
        return state

    def keep(self, position: int, copy: Callable[[S | None], S | None]) -> None:
        """Calls `copy` for the state at `position`, if there is none yet. Does nothing at 0, or if the limit is 0.

        `copy` is given the state that had to make room, whose memory it may use again, or None. It may return None if
        there is no memory: then nothing is kept.
        """
        if not self._limit or position == 0:
            return
        if position not in self._states:
            dropped = None
            if len(self._states) >= self._limit:
                root = min(self._states)
                dropped = self._states.pop(next((place for place in self._states if place != root), root))
            state = copy(dropped)
            if state is None:
                return
            self._states[position] = state
        self.use(position)

    def last(self, position: int) -> int:
        """The last position up to `position`; 0 if there is none."""
        return max((place for place in self._states if place <= position), default=0)

    def forget_beyond(self, position: int) -> None:
        for place in [place for place in self._states if place > position]:
            del self._states[place]

    def clear(self) -> None:
        self._states.clear()


def chunk_end(start: int, stop: int, batch_tokens: int, places: Sequence[int]) -> int:
    """Where the chunk from `start` ends: at an absolute multiple of the batch size, at `stop`, or at the first of
    `places` (ascending) inside it."""
    end = min(stop, (start // batch_tokens + 1) * batch_tokens)
    return min(end, next((place for place in places if place > start), end))
