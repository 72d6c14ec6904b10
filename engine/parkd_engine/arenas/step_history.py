"""Keeps one stage's fixed state after each token of the last step, so that rejected draft tokens can be undone.

    step     start ---- t ---- g1 ---- g2            three tokens in one step: one certain, two draft tokens
    kept            after t  after g1   (live)       the timeline can be cut to start + 1 or start + 2

`parkd_engine.forward.step_by_step` makes the modules with such state note it after each token.
"""

from __future__ import annotations

import torch

from parkd_engine.arenas.arena import StageArena


class StepHistory:
    """Memory for the states after `tokens` tokens of a step. With 0 nothing is kept."""

    def __init__(self, arena: StageArena, tokens: int = 0) -> None:
        self._fixed = arena.fixed
        self._spans: dict[int, slice] = {}
        """Layer -> its bytes of the fixed state."""
        for field in arena.layout.step_fields:
            first = self._spans[field.layer].start if field.layer in self._spans else field.offset
            self._spans[field.layer] = slice(first, field.offset + field.nbytes)
        self._kept = torch.empty(
            (tokens if self._spans else 0, len(self._fixed)), dtype=torch.uint8, device=arena.device
        )
        self._noted = dict.fromkeys(self._spans, 0)
        """Layer -> the number of states it has noted in this step."""
        self._start = 0
        self._stop = 0
        """The step covers `[start, stop)`. If empty, there is nothing to go back to."""
        self.is_recording = False

    @property
    def is_empty(self) -> bool:
        """Whether no layer of the stage has recurrent state."""
        return not self._spans

    def record(self, start: int, count: int) -> None:
        """Announces a step of `count` tokens at `start`. Raises ValueError if it is too long."""
        if self._spans and count - 1 > len(self._kept):
            raise ValueError(f"a step of {count} tokens where states behind {len(self._kept)} can be kept")
        self._start, self._stop, self.is_recording = start, start + count, True
        self._noted = dict.fromkeys(self._spans, 0)

    def check(self) -> None:
        """Checks, after the forward of a recorded step, that every layer noted its state after each token. Raises
        RuntimeError otherwise, since going back would then restore bytes of another step."""
        count = self._stop - self._start
        if self.is_recording and (silent := [layer for layer, noted in self._noted.items() if noted != count]):
            raise RuntimeError(f"layers {silent} did not keep their state after each of the step's {count} tokens")

    def was_replayed(self) -> None:
        """The step was replayed as a CUDA graph, which notes every layer's states."""
        self._noted = dict.fromkeys(self._spans, self._stop - self._start)

    def finish(self) -> None:
        """Ends the step; the timeline is at its end."""
        self.is_recording = False

    def forget(self) -> None:
        self._start = self._stop = 0
        self.is_recording = False

    def note(self, layer: int, index: int) -> None:
        """Keeps the live state of `layer`, which is the one after token `index` of the step."""
        self._noted[layer] += 1
        if index < self._stop - self._start - 1:
            span = self._spans[layer]
            self._kept[index, span].copy_(self._fixed[span])

    def floor(self, position: int) -> int:
        """The lowest position to which the timeline, now at `position`, can be cut."""
        return self._start + 1 if self._start < position <= self._stop else position

    def go_back(self, position: int) -> None:
        """Makes the state at `position` live: at or above `floor`, and before the end of the timeline."""
        for span in self._spans.values():
            self._fixed[span].copy_(self._kept[position - self._start - 1, span])
