"""Makes a stage read the tokens of a step one at a time where it has recurrent state.

Modules with recurrent state (a recurrence, a convolution) read the tokens of such a step one at a time, by the code
path of decoding. The rest of the model reads them together. So the state kept after a token does not depend on the
draft tokens after it, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from parkd_engine.arenas.step_history import StepHistory
from parkd_engine.families.records import family_of
from parkd_engine.forward.stages import Stage

NGRAMS = "ple"
"""The layers' attribute for n-grams, a second module with recurrent state. The whole layer then runs token by token."""
GIVEN_IDS = "ple_input_ids"
"""Argument of such a layer that has one entry per token, besides the hidden states."""


def step_by_step(stage: Stage, history: StepHistory) -> None:
    """Makes the stage's recurrent modules read recorded steps token by token, and note the state after each token in
    `history`, one for each seat. Changes only this stage: its modules are its own, though others may share their
    weights."""
    stage.step_histories.append(history)
    if len(stage.step_histories) > 1:
        return
    inner: Any = stage.inner
    recurrent = family_of(inner.config).recurrent_module
    for index in range(stage.first_layer, stage.end_layer):
        layer = inner.layers[index]
        module = None if recurrent is None else getattr(layer, recurrent, None)
        if getattr(layer, NGRAMS, None) is not None:
            module = layer
        if module is not None:
            module.forward = _stepped(module.forward, stage.step_histories, index)


def _stepped(
    forward: Callable[..., torch.Tensor], histories: Sequence[StepHistory], layer: int
) -> Callable[..., torch.Tensor]:
    def step(hidden_states: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        history = next((each for each in histories if each.is_recording), None)  # One seat computes at a time.
        if history is None:
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
