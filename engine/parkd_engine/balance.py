"""Chooses where `auto` splits the layers: by the share of its device's free memory that each stage needs.

    device 0  |-- weights --|-- context x rows, fixed state --|---- free ----|
    device 1  |-- weights --------|-- context x rows --|-------- free -------|

First finds the longest context that some split can hold (up to the requested one). Then, among the splits that hold it,
chooses the one whose fullest device is least full.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from parkd_engine.arenas.layout import build_layout
from parkd_engine.config import EngineConfig
from parkd_engine.families.multimodal import language_config
from parkd_engine.families.records import vision_of
from parkd_engine.layer_split import least_worst, shared_layers, split_layers
from parkd_engine.memory import usable_bytes
from parkd_engine.opening import window_room


@dataclass(frozen=True, slots=True)
class LayerNeed:
    """The memory of one layer: a constant part, and bytes for each token of context."""

    constant_bytes: int
    row_bytes: int


@dataclass(frozen=True, slots=True)
class ModelNeed:
    layers: tuple[LayerNeed, ...]
    first_bytes: int
    """The embedding and everything else that only the first stage holds."""
    last_bytes: int
    """The output head."""


def model_need(config: Any, dtype: torch.dtype, layout: EngineConfig) -> ModelNeed:
    """Counts weights on the meta device, so it is right for every architecture and allocates nothing."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(language_config(config), dtype=dtype)
    weights = [sum(p.nbytes for p in layer.parameters()) for layer in model.base_model.layers]
    room = window_room(config, layout)
    layers = []
    for index, weight in enumerate(weights):
        (state,) = build_layout(config, [(index, index + 1)], layout.kv_dtype or dtype, dtype)
        fixed = state.fixed_bytes * (1 + layout.ctx_checkpoints) + state.window_bytes(room.tokens)
        layers.append(LayerNeed(weight + fixed, state.row_bytes if state.row_fields else 0))
    first = model.get_input_embeddings().weight.nbytes
    if vision_of(config) is not None:
        with torch.device("meta"):
            whole = AutoModelForImageTextToText.from_config(config, dtype=dtype)
        first += max(0, _nbytes(whole) - _nbytes(model))  # The vision tower.
    return ModelNeed(tuple(layers), first, model.get_output_embeddings().weight.nbytes)


def _nbytes(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def balanced_split(
    need: ModelNeed, free: Sequence[int], context_tokens: int, forbidden: range = range(0)
) -> tuple[int, ...]:
    """The first layer of each stage after the first, for devices with `free` bytes each. No stage begins at a layer in
    `forbidden`. Raises InvalidSplit if there are too few layers to split."""
    layers = len(need.layers)
    constants, rows = _sums(need)

    def stage(first: int, end: int) -> tuple[int, int]:
        """The constant bytes of a stage, and its bytes for each token."""
        ends = need.first_bytes * (first == 0) + need.last_bytes * (end == layers)
        return constants[end] - constants[first] + ends, rows[end] - rows[first]

    def shortfall(index: int, first: int, end: int) -> float:
        constant, row = stage(first, end)
        room = free[index] - constant
        fitting = room / row if row and room > 0 else context_tokens if room >= 0 else room / free[index]
        return -min(fitting, context_tokens)

    missing, _ = least_worst(len(free), layers, forbidden, shortfall)
    tokens = max(0, int(-missing))

    def fullness(index: int, first: int, end: int) -> float:
        constant, row = stage(first, end)
        return (constant + tokens * row) / max(1, free[index])

    return least_worst(len(free), layers, forbidden, fullness)[1]


def _sums(need: ModelNeed) -> tuple[list[int], list[int]]:
    """Prefix sums `[layers + 1]` of constant bytes and row bytes."""
    constants, rows = [0], [0]
    for layer in need.layers:
        constants.append(constants[-1] + layer.constant_bytes)
        rows.append(rows[-1] + layer.row_bytes)
    return constants, rows


def choose_split(
    config: Any, dtype: torch.dtype, layout: EngineConfig, free: Callable[[str], int]
) -> tuple[tuple[int, int], ...]:
    """Layer ranges `[first, end)` of every stage: as `layout` says, or balanced.

    Balances by free memory if any stage is on a GPU, else as `split_layers` does without a split, since CPU stages
    share main memory. `free` returns a device's free bytes. Raises InvalidSplit.
    """
    devices, text = layout.devices, language_config(config)
    if layout.layer_split is not None or len(devices) == 1 or all(torch.device(d).type == "cpu" for d in devices):
        return split_layers(config, len(devices), layout.layer_split)
    if len(devices) > int(text.num_hidden_layers):
        return split_layers(config, len(devices))  # Raises InvalidSplit with the reason.
    glued = shared_layers(text)
    context = layout.context_tokens or int(text.max_position_embeddings)
    room = [usable_bytes(free(device)) // devices.count(device) for device in devices]
    starts = balanced_split(model_need(config, dtype, layout), room, context, range(glued[0] + 1, glued[1]))
    return split_layers(config, len(devices), starts)
