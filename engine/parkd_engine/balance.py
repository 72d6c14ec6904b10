"""Chooses where `auto` splits the layers: by the share of its device's free memory that each stage needs.

    device 0  |-- weights --|-- context x rows, fixed state --|---- free ----|
    device 1  |-- weights --------|-- context x rows --|-------- free -------|

First finds the longest context that some split can hold (up to the requested one). Then, among the splits that hold it,
chooses the one whose fullest device is least full.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from parkd.errors import ModelError
from parkd.state import EngineConfig
from parkd_engine.account import ModelMemory, device_needs
from parkd_engine.families.multimodal import language_config
from parkd_engine.layer_split import least_worst, shared_layers, split_layers
from parkd_engine.memory import is_card, usable_bytes

HOST_CONTEXT = 32768
"""The context, in tokens, that is to fit beside the experts on cards, if none is asked for."""


class Need(Protocol):
    """What a stage takes of its device, such as a `StageMemory`."""

    @property
    def constant_bytes(self) -> int: ...

    @property
    def bytes_a_token(self) -> float:
        """Additional bytes for each token of context."""


def balanced_split(
    stage: Callable[[int, int, int], Need],
    layers: int,
    free: Sequence[int],
    context_tokens: int,
    forbidden: range = range(0),
) -> tuple[int, ...]:
    """The first layer of each stage after the first, for devices with `free` bytes each. `stage` takes (stage, first,
    end) and returns what the layers `[first, end)` need there. No stage begins at a layer in `forbidden`. Raises
    InvalidSplit if there are too few layers to split."""

    def shortfall(index: int, first: int, end: int) -> float:
        need = stage(index, first, end)
        room, each = free[index] - need.constant_bytes, need.bytes_a_token
        fitting = room / each if each and room > 0 else context_tokens if room >= 0 else room / max(1, free[index])
        return -min(fitting, context_tokens)

    missing, _ = least_worst(len(free), layers, forbidden, shortfall)
    tokens = max(0, int(-missing))

    def fullness(index: int, first: int, end: int) -> float:
        need = stage(index, first, end)
        return (need.constant_bytes + tokens * need.bytes_a_token) / max(1, free[index])

    return least_worst(len(free), layers, forbidden, fullness)[1]


def choose_host_layers(
    config: Any, dtype: torch.dtype, layout: EngineConfig, free: Callable[[str], int], memory: ModelMemory
) -> tuple[int, ...]:
    """The layers whose routed experts stay in main memory: the last `layout.cpu_experts` that have experts, or (None)
    as few as let the rest fit its devices, with the context that is asked for or else `HOST_CONTEXT`. `memory` is the
    account with all experts on the devices. Raises InvalidSplit, and ModelError if experts are to stay in main memory
    where they are anyway, or if the model has none."""
    layers, asked = memory.expert_layers, layout.cpu_experts
    if asked == 0 or (asked is None and (not layers or not all(is_card(device) for device in layout.devices))):
        return ()
    if not all(is_card(device) for device in layout.devices):
        raise ModelError("--cpu-experts is for cards: on these devices all weights are in main memory. Leave it out.")
    if memory.has_coded_experts:
        raise ModelError("--cpu-experts is for experts in full precision, and this model's are codes. Leave it out.")
    if not layers:
        raise ModelError("--cpu-experts is for models with experts, and this one has none. Leave it out.")
    if asked is not None:
        return layers[-asked:]
    text = language_config(config)
    context = layout.context_tokens or min(int(text.max_position_embeddings), HOST_CONTEXT)
    for count in range(len(layers) + 1):
        hosted = layers[len(layers) - count :]
        account = memory.with_host_layers(hosted)
        stages = account.stages(choose_split(config, dtype, layout, free, account))
        needs = device_needs(stages, layout.seats or 1)
        if all(constant + context * each <= usable_bytes(free(dev), dev) for dev, (constant, each) in needs.items()):
            break
    return hosted


def choose_split(
    config: Any,
    dtype: torch.dtype,
    layout: EngineConfig,
    free: Callable[[str], int],
    memory: ModelMemory | None = None,
) -> tuple[tuple[int, int], ...]:
    """Layer ranges `[first, end)` of every stage: as `layout` says, or balanced.

    Balances by free memory if any stage is on a GPU, else as `split_layers` does without a split, since CPU stages
    share main memory. `free` returns a device's free bytes; `memory` is the account of the same model, if it is known.
    Raises InvalidSplit.
    """
    devices, text = layout.devices, language_config(config)
    if layout.layer_split is not None or len(devices) == 1 or not any(is_card(device) for device in devices):
        return split_layers(config, len(devices), layout.layer_split)
    layers = int(text.num_hidden_layers)
    if len(devices) > layers:
        return split_layers(config, len(devices))  # Raises InvalidSplit with the reason.
    glued = shared_layers(text)
    context = layout.context_tokens or int(text.max_position_embeddings)
    room = [usable_bytes(free(device), device) // devices.count(device) for device in devices]
    account = memory or ModelMemory(config, dtype, layout)
    starts = balanced_split(account.stage, layers, room, context, range(glued[0] + 1, glued[1]))
    return split_layers(config, len(devices), starts)
