"""Counts the parameters of each layer without reading or allocating any."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Parameter counts of a model's parts."""

    layers: tuple[int, ...]
    """Parameters of each layer."""
    first: int
    """Parameters of the embedding."""
    last: int
    """Parameters of the head and everything else."""


def layer_weights(config: Any) -> LayerWeights:
    """Builds the model on the meta device and counts its parameters, which is correct for every kind of layer. A tied
    head counts in both `first` and `last`, since stages on two devices hold it twice."""
    with torch.device("meta"), no_init_weights():
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    inner = model.base_model
    layers = tuple(_count(layer) for layer in inner.layers)
    first = _count(inner.embed_tokens)
    return LayerWeights(layers, first, _count(inner) - sum(layers) - first + _count(model.get_output_embeddings()))


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
