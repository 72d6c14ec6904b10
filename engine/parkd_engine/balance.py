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

from parkd.state import EngineConfig
from parkd_engine.account import ModelMemory
from parkd_engine.families.multimodal import language_config
from parkd_engine.layer_split import least_worst, shared_layers, split_layers
from parkd_engine.memory import is_card, usable_bytes


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
