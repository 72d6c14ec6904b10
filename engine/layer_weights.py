"""How many parameters each layer has, told without reading or making any."""

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
    """Numbers of parameters: of each layer, and of what goes before the first and behind the last."""

    layers: tuple[int, ...]
    first: int
    last: int


def layer_weights(config: Any) -> LayerWeights:
    """Of a language model of this configuration, as its own code lays it out: experts, recurrent and n-gram layers
    weigh what they are. A tied head counts in both ends, since stages on two devices hold it twice."""
    with torch.device("meta"), no_init_weights():
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    inner = model.base_model
    layers = tuple(_count(layer) for layer in inner.layers)
    first = _count(inner.embed_tokens)
    return LayerWeights(layers, first, _count(inner) - sum(layers) - first + _count(model.get_output_embeddings()))


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
