"""Pauses guessing while too few guesses are accepted: it then costs more than it gains.

    steps    | 8 with guesses | 32 without | 8 with | 64 without | 8 with | ...     while too few are accepted
             | 8 with guesses | 8 with     | ...                                    while enough are

Only counts from the start of the answer decide, never a clock. Sampled answers depend on which steps guess, and the
same seed must give the same answer, whether the conversation was restored or stayed live.
"""

from __future__ import annotations

TRIAL_STEPS = 8
LEAST_RIGHT = 0.25
"""Share of guesses accepted. Below it guessing cannot pay, even if a step with two guesses costs only 1.5 times as much
as one without."""
SHORTEST_PAUSE = 32
LONGEST_PAUSE = 256


class DraftPace:
    """The pace of one answer. Call `guesses` before each step, and `note` after each step that guessed."""

    def __init__(self) -> None:
        self._steps = self._drafted = self._accepted = 0
        self._waits = 0
        self._pause = SHORTEST_PAUSE

    def guesses(self) -> bool:
        """Whether the next step should guess."""
        if self._waits:
            self._waits -= 1
            return False
        return True

    def note(self, drafted: int, accepted: int) -> None:
        """Counts a step that guessed `drafted` tokens, of which `accepted` were accepted."""
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
