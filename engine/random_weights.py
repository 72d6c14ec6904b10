"""Draws the weights of models that have none: seeded, so that state can depend on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

SEED = 20
WEIGHT_GAIN = 1.5
"""A weight's standard deviation is this over the root of its inputs: scores then depend on the whole prompt, and differ
enough that wrong state gives other tokens."""
FORGETTING = "A_log"
"""Name of the logarithm of how fast a head of a recurrent layer forgets."""
SLOW_AND_FAST = (-6.0, 0.0)
"""Over the heads: some remember hundreds of tokens, some only the last few."""
LAYER_ENDINGS = (
    *("o_proj.weight", "out_proj.weight", "down_proj.weight", "experts.down_proj"),
    *("ple.value_proj.weight", "ple.conv1d.weight"),
)
"""Projections whose output a layer adds to what it read; of n-grams also a convolution of what was normed."""


def draw_weights(
    model: Any,
    generator: torch.Generator,
    layer_gain: float = 1.0,
    place: Callable[[str], torch.device] | None = None,
) -> None:
    """Fills every parameter, in the order the model names them. `layer_gain`: how much layers add to what they read.

    With `place` each is drawn on the generator's device and goes at once where that says.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = parameter if place is None else torch.empty_like(parameter, device=generator.device)
            if name.endswith(FORGETTING):
                drawn.copy_(torch.linspace(*SLOW_AND_FAST, parameter.numel(), device=drawn.device))
            elif parameter.dim() > 1:
                gain = WEIGHT_GAIN * (layer_gain if name.endswith(LAYER_ENDINGS) else 1.0)
                drawn.normal_(0.0, gain / parameter.shape[-1] ** 0.5, generator=generator)
            else:
                drawn.fill_(0.0 if name.endswith("bias") else 1.0)
            if place is not None:
                parameter.data = drawn.to(place(name))
