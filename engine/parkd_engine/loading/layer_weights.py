"""Sizes of a model's weights, part by part, counted on a model that has no memory: right for every kind of layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.initialization import no_init_weights

from parkd_engine.draft.stream_head import SHARED, head_class
from parkd_engine.families.layer_shapes import experts_of
from parkd_engine.families.layer_state import draft_layers
from parkd_engine.families.multimodal import language_config, language_model, model_class
from parkd_engine.families.records import family_of
from parkd_engine.forward.stages import MIXER
from parkd_engine.weights.experts import QuantisedExperts, quantised_experts
from parkd_engine.weights.host_experts import expert_bytes, experts_module
from parkd_engine.weights.linear import QuantisedLinear, put_module
from parkd_engine.weights.schemes import quantised_layers, scheme_of, without_weights_kind
from parkd_engine.weights.tiles import put_tiles


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """Bytes of a model's parts, by the stage that holds them."""

    layers: tuple[int, ...]
    """One for each layer, its experts included."""
    embedding: int
    """First stage."""
    head: int
    """Last stage: the output head."""
    is_tied: bool
    """The head is the embedding's tensor: on one device it is held once, on two twice."""
    last: int
    """Last stage: the final norm and what mixes residual streams."""
    everywhere: int
    """Every stage: other parts of the decoder."""
    tower: int
    """First stage: the vision tower; 0 for text models."""
    draft: int
    """Last stage: the draft head, without what it shares with the model; 0 without one."""
    codes: int
    """Weights of the largest matrix that is stored as codes; 0 without any."""
    experts: tuple[int, ...] = ()
    """Of the bytes of each layer, those of its routed experts."""
    expert: int = 0
    """Bytes of the largest expert, in a room for fetching (`weights.host_experts`)."""
    experts_a_layer: int = 0
    has_coded_experts: bool = False
    """Whether routed experts are stored as codes: then none of the three above counts them."""


def model_weights(config: Any, dtype: torch.dtype = torch.float32, *, on_cpus: bool = False) -> ModelWeights:
    """Sizes for the library's configuration, with the draft head that it declares, in the compute dtype. With
    `on_cpus`, as they are where all stages are on CPUs."""
    model, draft = weightless_model(config, dtype)
    if on_cpus:
        put_tiles(model)
    decoder, output = language_model(model), model.get_output_embeddings()
    embedding = decoder.get_input_embeddings()
    parts = {name: part for name, part in decoder.named_children() if name != "layers" and part is not embedding}
    ends = [part for name, part in parts.items() if name in (family_of(language_config(config)).final_norm, MIXER)]
    own = () if draft is None else (part for name, part in draft.named_children() if name not in SHARED)
    count, _ = experts_of(language_config(config))
    routed = [experts_module(layer, count) for layer in decoder.layers]
    return ModelWeights(
        layers=tuple(_nbytes([layer]) for layer in decoder.layers),
        experts=tuple(0 if part is None else _nbytes([part]) for part in routed),
        expert=max((expert_bytes(part) for part in routed if part is not None), default=0),
        experts_a_layer=count,
        has_coded_experts=any(isinstance(part, QuantisedExperts) for part in decoder.modules()),
        embedding=_nbytes([embedding]),
        head=_nbytes([output]),
        is_tied=getattr(output, "weight", None) is embedding.weight,
        last=_nbytes(ends),
        everywhere=_nbytes(parts.values()) - _nbytes(ends),
        tower=_nbytes([model]) - _nbytes([decoder, output]),
        draft=_nbytes(own),
        codes=max(
            (part.in_features * part.out_features for part in model.modules() if isinstance(part, QuantisedLinear)),
            default=0,
        ),
    )


def weightless_model(config: Any, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """The library's model on the meta device, with its quantised layers, and the draft head that the configuration
    declares, or None. Heads are in full precision."""
    scheme = scheme_of(config)
    with torch.device("meta"), no_init_weights():
        model: Any = model_class(config).from_config(without_weights_kind(config), dtype=dtype)
        model.tie_weights()
        has_head = draft_layers(language_config(config)) > 0
        head = head_class(config)(model, 1).to(dtype) if has_head else None
        if scheme is None:
            return model, head
        for name, (linear, stored) in quantised_layers(model, scheme).items():
            put_module(model, name, QuantisedLinear.empty(stored, linear))
        for name, (experts, kinds) in quantised_experts(model, scheme).items():
            put_module(model, name, QuantisedExperts.empty(experts, kinds))
        return model, head


def _nbytes(modules: Iterable[nn.Module]) -> int:
    """Bytes of all parameters and codes; a tensor that several modules share counts once."""
    return sum({id(tensor): tensor.nbytes for module in modules for tensor in _weights(module)}.values())


def _weights(module: nn.Module) -> Iterable[torch.Tensor]:
    yield from module.parameters()
    for part in module.modules():
        if isinstance(part, QuantisedLinear):
            yield from part.buffers()
