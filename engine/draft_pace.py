"""Whether guessing goes on: a head that is rarely right costs more than it gains.

    steps    | 8 with guesses | 32 without | 8 with | 64 without | 8 with | ...     while few of the guesses are right
             | 8 with guesses | 8 with     | ...                                    while enough are

Counts alone decide, from the answer's start on, and no clock: drawn answers of one seed depend on which steps guess,
and are to be the same whenever they are asked for, behind a restored conversation as behind one that stayed.
"""

from __future__ import annotations

TRIAL_STEPS = 8
LEAST_RIGHT = 0.25
"""Share of the guesses. With fewer right guessing cannot pay even where a step with two guesses costs half as much
again as one without."""
SHORTEST_PAUSE = 32
LONGEST_PAUSE = 256


class DraftPace:
    """Of one answer. Asked before each step, told after each one that guessed."""

    def __init__(self) -> None:
        self._steps = self._drafted = self._accepted = 0
        self._waits = 0
        self._pause = SHORTEST_PAUSE

    def guesses(self) -> bool:
        """Whether the step that comes should guess."""
        if self._waits:
            self._waits -= 1
            return False
        return True

    def note(self, drafted: int, accepted: int) -> None:
        """A step guessed `drafted` tokens, of which `accepted` were right."""
        self._steps += 1
        self._drafted += drafted
        self._accepted += accepted
        if self._steps < TRIAL_STEPS:
            return
        if self._accepted < LEAST_RIGHT * self._drafted:
            self._waits, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
        else:
            self._pause = SHORTEST_PAUSE
        self._steps = self._drafted = self._accepted = 0
