"""Draws random weights with a fixed seed, so that state stays valid between runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

SEED = 20
WEIGHT_GAIN = 1.5
"""A weight's standard deviation is this over the square root of its number of inputs. Logits then depend on the whole
prompt, and differ enough that wrong state gives other tokens."""
FORGETTING = "A_log"
"""Name of the parameter with the logarithm of each head's decay rate, in recurrent layers."""
SLOW_AND_FAST = (-6.0, 0.0)
"""Its range over the heads: some remember hundreds of tokens, some only the last few."""
LAYER_ENDINGS = (
    *("o_proj.weight", "out_proj.weight", "down_proj.weight", "experts.down_proj"),
    *("ple.value_proj.weight", "ple.conv1d.weight"),
)
"""Projections whose output is added to the residual stream; of n-grams also the convolution after the norm."""


def draw_weights(
    model: Any,
    generator: torch.Generator,
    layer_gain: float = 1.0,
    place: Callable[[str], torch.device] | None = None,
) -> None:
    """Fills every parameter, in the order of `named_parameters`. `layer_gain` scales what layers add to the residual.

    With `place`, each parameter is drawn on the generator's device and then moved to `place(name)`.
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
