"""Copies of an engine's fixed state at earlier positions of what is live, and where chunks end to have them taken.

|---- root ----|---- dropped first ----|--------|---- used last ----| position
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

S = TypeVar("S")


class KeptStates(Generic[S]):
    """At most `limit`: the earliest stays, of the others the least recently used goes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._states: dict[int, S] = {}
        """By position; the least recently used first."""

    @property
    def positions(self) -> tuple[int, ...]:
        """Ascending."""
        return tuple(sorted(self._states))

    def __contains__(self, position: int) -> bool:
        return position in self._states

    def get(self, position: int) -> S | None:
        """Does not count as use."""
        return self._states.get(position)

    def use(self, position: int) -> S:
        """Raises KeyError."""
        self._states[position] = state = self._states.pop(position)
        return state

    def keep(self, position: int, copy: Callable[[], S]) -> None:
        """`copy` makes the state once there is room, if it is not there yet. Nothing at 0, or without a limit."""
        if not self._limit or position == 0:
            return
        if position not in self._states:
            while len(self._states) >= self._limit:
                root = min(self._states)
                del self._states[next((place for place in self._states if place != root), root)]
            self._states[position] = copy()
        self.use(position)

    def last(self, position: int) -> int:
        """The largest position up to that one; 0 without any."""
        return max((place for place in self._states if place <= position), default=0)

    def forget_beyond(self, position: int) -> None:
        for place in [place for place in self._states if place > position]:
            del self._states[place]

    def clear(self) -> None:
        self._states.clear()


def chunk_end(start: int, stop: int, batch_tokens: int, places: Sequence[int]) -> int:
    """Where the chunk from `start` ends: at an absolute multiple of the batch, or at one of `places`, ascending."""
    end = min(stop, (start // batch_tokens + 1) * batch_tokens)
    return min(end, next((place for place in places if place > start), end))
