"""The captures that run while the engine computes."""

from __future__ import annotations

import torch

from parkd_engine.moves.capture_in_flight import CaptureInFlight


class CapturesUnderWay:
    """Captures in progress, whose rows must not be overwritten before they are copied."""

    def __init__(self) -> None:
        self._captures: list[CaptureInFlight] = []

    def add(self, capture: CaptureInFlight) -> None:
        """Protects the rows of `capture` until they are copied."""
        self._forget_done()
        self._captures.append(capture)

    def before_write(self, stage: int, stream: torch.cuda.Stream, start: int, stop: int) -> None:
        """Makes `stream` wait until the rows `[start, stop)` of `stage` may be overwritten, counted from the arena's
        first one, whichever seat has them.

        Blocks the host only until the copies of those rows are queued.
        """
        self._forget_done()
        for capture in self._captures:
            capture.free_rows(stage, stream, start, stop)

    def any(self) -> bool:
        """Whether any capture is still in progress."""
        self._forget_done()
        return bool(self._captures)

    def _forget_done(self) -> None:
        if self._captures:
            self._captures = [each for each in self._captures if not each.is_done]
