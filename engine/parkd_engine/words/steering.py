"""Control vectors in effect: hooks on the layers of all stages that add directions to what the layers put out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from parkd.words.steering import Steering
from parkd_engine.failures import stage_failed


def hook_layers(stage: Any, steering: Steering) -> list[tuple[Any, Callable[..., Any]]]:
    """The module of each steered layer of a stage, and a forward hook that adds the direction. The directions are moved
    to the stage's device and dtype; no hook is registered. Raises what moving a tensor to a device can raise."""
    hooks = []
    for layer in range(stage.first_layer, stage.end_layer):
        if layer in steering.sums:
            # Residual streams start as copies of one and are mixed into one, so all get the same direction.
            direction = (
                torch.from_numpy(steering.sums[layer]).repeat(stage.streams).to(device=stage.device, dtype=stage.dtype)
            )
            hooks.append((stage.inner.layers[layer], _adder(direction)))
    return hooks


class SteeringHooks:
    """The steering in effect, as forward hooks on the layers of all stages."""

    def __init__(self, stages: Sequence[Any]) -> None:
        self._stages = tuple(stages)
        self._handles: list[Any] = []
        self.steering = Steering()

    def change(self, steering: Steering) -> None:
        """Uses `steering` from now on. Raises StageFailed, and then changes nothing."""
        if steering.digest == self.steering.digest:
            return
        hooks = []
        for stage in self._stages:
            try:
                hooks += hook_layers(stage, steering)
            except Exception as error:
                raise stage_failed(stage.index, "steering", error) from error
        for handle in self._handles:
            handle.remove()
        self._handles = [module.register_forward_hook(hook) for module, hook in hooks]
        self.steering = steering


def _adder(direction: torch.Tensor) -> Callable[..., Any]:
    def add(_module: Any, _inputs: Any, output: Any) -> Any:
        # Layers of some architectures return a tuple whose first element is the hidden state.
        if isinstance(output, tuple):
            return (output[0] + direction, *output[1:])
        return output + direction

    return add
