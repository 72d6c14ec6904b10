"""The fixed state of one stage after each token of the last step, so that guesses can be taken back.

    step     start ---- t ---- g1 ---- g2            three tokens at once: one that is sure, two guesses
    kept            after t  after g1   (live)       the timeline can be cut to start + 1, start + 2

What keeps state that moves on with every token (a recurrence, a convolution) is given the tokens of such a step one at
a time, through the path that decoding takes; all else in the model sees them at once. So the state kept after a token
has not seen the guesses behind it, in the same bits whatever they were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from engine.arena import StageArena
from engine.layer_state import WINDOW_FIELDS
from engine.layout import OFFSET_FIELD

if TYPE_CHECKING:
    from engine.stages import Stage

MIXERS: Mapping[str, str] = MappingProxyType(
    {"qwen3_next": "linear_attn", "qwen3_5_text": "linear_attn", "qwen4_exp_text": "linear_attn"}
)
"""`model_type` -> what its layers call the module that keeps such state. Families with draft heads of their own."""
NGRAMS = "ple"
"""What a layer calls a module that keeps some too, beside that one. Then the layer goes step by step."""
GIVEN_IDS = "ple_input_ids"
"""What such a layer is given of every token, beside hidden states."""


class StepHistory:
    """Room for the states behind `tokens` tokens; without it nothing is kept."""

    def __init__(self, arena: StageArena, tokens: int = 0) -> None:
        self._fixed = arena.fixed
        self._spans: dict[int, slice] = {}
        """Layer -> its bytes of the fixed state; without windows, which reach back behind the step by themselves, and
        without the offset of positions, which only pictures change."""
        for field in arena.layout.fixed_fields:
            if field.name not in (*WINDOW_FIELDS, OFFSET_FIELD):
                first = self._spans[field.layer].start if field.layer in self._spans else field.offset
                self._spans[field.layer] = slice(first, field.offset + field.nbytes)
        self._kept = torch.empty(
            (tokens if self._spans else 0, len(self._fixed)), dtype=torch.uint8, device=arena.device
        )
        self._noted = dict.fromkeys(self._spans, 0)
        """Layer -> how many states of the step it has told of."""
        self._start = 0
        self._stop = 0
        """The step covers `[start, stop)`; empty: there is nothing to go back to."""
        self.is_recording = False

    @property
    def is_empty(self) -> bool:
        """No layer here keeps such state."""
        return not self._spans

    def record(self, start: int, count: int) -> None:
        """The step that comes is of `count` tokens from `start` on. Raises ValueError for one that is too long."""
        if self._spans and count - 1 > len(self._kept):
            raise ValueError(f"a step of {count} tokens where states behind {len(self._kept)} can be kept")
        self._start, self._stop, self.is_recording = start, start + count, True
        self._noted = dict.fromkeys(self._spans, 0)

    def check(self) -> None:
        """Behind the forward of a recorded step: every layer told of its state after each token. Raises RuntimeError
        otherwise, since going back would then bring another step's bytes to life."""
        count = self._stop - self._start
        if self.is_recording and (silent := [layer for layer, noted in self._noted.items() if noted != count]):
            raise RuntimeError(f"layers {silent} did not keep their state after each of the step's {count} tokens")

    def was_replayed(self) -> None:
        """The step ran as it was recorded: every layer told of its states there."""
        self._noted = dict.fromkeys(self._spans, self._stop - self._start)

    def finish(self) -> None:
        """The step is over, and the timeline at its end."""
        self.is_recording = False

    def forget(self) -> None:
        self._start = self._stop = 0
        self.is_recording = False

    def note(self, layer: int, index: int) -> None:
        """The live state of `layer` is that after token `index` of the step."""
        self._noted[layer] += 1
        if index < self._stop - self._start - 1:
            span = self._spans[layer]
            self._kept[index, span].copy_(self._fixed[span])

    def floor(self, position: int) -> int:
        """The lowest position that the timeline, now at `position`, can be cut to."""
        return self._start + 1 if self._start < position <= self._stop else position

    def go_back(self, position: int) -> None:
        """Makes the state at `position` live, which `floor` allows and which is before where the timeline is."""
        for span in self._spans.values():
            self._fixed[span].copy_(self._kept[position - self._start - 1, span])


def step_by_step(stage: Stage, history: StepHistory) -> None:
    """From now on what keeps such state in a stage reads a recorded step token by token, and the state after each is
    noted. The stage's modules are its own, whoever else has their weights."""
    inner: Any = stage.inner
    for index in range(stage.first_layer, stage.end_layer):
        layer = inner.layers[index]
        module = getattr(layer, MIXERS.get(inner.config.model_type, ""), None)
        if getattr(layer, NGRAMS, None) is not None:
            module = layer
        if module is not None:
            module.forward = _stepped(module.forward, history, index)


def _stepped(forward: Callable[..., torch.Tensor], history: StepHistory, layer: int) -> Callable[..., torch.Tensor]:
    def step(hidden_states: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        if not history.is_recording:
            return forward(hidden_states, *arguments, **named)
        outputs = []
        ids = named.get(GIVEN_IDS)
        for index in range(hidden_states.shape[1]):
            if ids is not None:
                named[GIVEN_IDS] = ids[:, index : index + 1]
            outputs.append(forward(hidden_states[:, index : index + 1], *arguments, **named))
            history.note(layer, index)
        return torch.cat(outputs, dim=1)

    return step
