"""Gated delta nets on CPU stages when `flash-linear-attention` is installed.

Transformers selects that package's kernels once, on import, whatever the device of the tensors; they run on GPUs only.
A stage on a CPU needs the reference implementation, which transformers keeps as `__wrapped__`.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

FUNCTIONS = (
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
    "causal_conv1d_fn",
    "causal_conv1d_update",
)
"""The functions that transformers' modules call, by their names there."""
CHOOSES = "parkd_chooses"
"""Attribute that marks a replaced function."""


def choose_by_device(layers: Any) -> None:
    """Makes the functions that these layers call use the reference for CPU tensors. May be called again."""
    for module in {sys.modules[type(part).__module__] for layer in layers for part in layer.modules()}:
        for name in FUNCTIONS:
            function = getattr(module, name, None)
            reference = getattr(function, "__wrapped__", None)
            if function is not None and reference is not None and not hasattr(function, CHOOSES):
                setattr(module, name, _chosen(function, reference))


def _chosen(function: Callable[..., Any], reference: Callable[..., Any]) -> Callable[..., Any]:
    known = inspect.signature(reference).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())

    @functools.wraps(function)
    def chosen(first: Any, *arguments: Any, **named: Any) -> Any:
        if first.device.type != "cpu":
            return function(first, *arguments, **named)
        kept = named if takes_all else {name: value for name, value in named.items() if name in known}
        return reference(first, *arguments, **kept)

    setattr(chosen, CHOOSES, True)
    return chosen
