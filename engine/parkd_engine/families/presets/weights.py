"""Draws random weights with a fixed seed, so that state stays valid between runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from hashlib import blake2b
from types import MappingProxyType
from typing import Any

import torch
from transformers.initialization import no_init_weights

from parkd_engine.families.multimodal import model_class
from parkd_engine.weights.experts import QuantisedExperts, quantised_experts, rows_of
from parkd_engine.weights.kinds import WeightKind
from parkd_engine.weights.linear import QuantisedLinear, put_module
from parkd_engine.weights.rounding import rounded
from parkd_engine.weights.schemes import OWN_VERSION, Scheme, quantised_layers, scheme_of, without_weights_kind

SEED = 20
RECIPE_VERSION = 2
"""Part of the weights' digest. Raise it if a preset's weights change."""
Placement = Callable[[str], torch.device]
"""Name of a parameter -> its device."""
_LAYER = re.compile(r"\blayers\.(\d+)\.")
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
    place: Placement | None = None,
    kinds: Mapping[str, WeightKind] = MappingProxyType({}),
) -> None:
    """Fills every parameter, in the order of `named_parameters`. `layer_gain` scales what layers add to the residual.

    With `place`, each parameter is drawn on the generator's device and then moved to `place(name)`. Those in `kinds`,
    of linear layers and experts, are rounded to codes as soon as they are drawn; that takes a `place`.
    """
    of_experts: dict[str, dict[str, QuantisedLinear]] = {}
    with torch.no_grad():
        for name, parameter in list(model.named_parameters()):
            drawn = parameter if place is None else torch.empty_like(parameter, device=generator.device)
            if name.endswith(FORGETTING):
                drawn.copy_(torch.linspace(*SLOW_AND_FAST, parameter.numel(), device=drawn.device))
            elif parameter.dim() > 1:
                gain = WEIGHT_GAIN * (layer_gain if name.endswith(LAYER_ENDINGS) else 1.0)
                drawn.normal_(0.0, gain / parameter.shape[-1] ** 0.5, generator=generator)
            else:
                drawn.fill_(0.0 if name.endswith("bias") else 1.0)
            module, _, tensor = name.rpartition(".")
            if name in kinds:
                assert place is not None, "codes are made elsewhere than the numbers"
                owner = model.get_submodule(module)
                if tensor == "weight":
                    put_module(model, module, _coded(drawn, kinds[name], place(name), owner.bias))
                else:
                    coded = _coded(rows_of(owner, tensor, drawn), kinds[name], place(name))
                    of_experts.setdefault(module, {})[tensor] = coded
            elif place is not None:
                parameter.data = drawn.to(place(name))
    for module, matrices in of_experts.items():
        put_module(model, module, QuantisedExperts(model.get_submodule(module), matrices))


def _coded(
    matrix: torch.Tensor, kind: WeightKind, device: torch.device, bias: torch.nn.Parameter | None = None
) -> QuantisedLinear:
    tensors = {each: tensor.to(device) for each, tensor in rounded(matrix, kind).items()}
    return QuantisedLinear(kind, matrix.shape[1], matrix.shape[0], tensors, bias)


def kinds_by_parameter(model: Any, scheme: Scheme) -> dict[str, WeightKind]:
    """Name of each parameter that the scheme stores as codes -> their kind."""
    found = {f"{name}.weight": kind for name, (_, kind) in quantised_layers(model, scheme).items()}
    for name, (_, matrices) in quantised_experts(model, scheme).items():
        found |= {f"{name}.{matrix}": kind for matrix, kind in matrices.items()}
    return found


def preset_digest(model: str, dtype: torch.dtype, device: torch.device, weights: str | None = None) -> bytes:
    """16 bytes over everything that determines the weights. Each kind of device draws different numbers."""
    text = f"{model} {SEED} {RECIPE_VERSION} {dtype} {device.type}"
    if weights is not None:
        text += f" {weights} {OWN_VERSION}"
    return blake2b(text.encode(), digest_size=16, person=b"parkd-random").digest()


def random_model(
    config: Any, dtype: torch.dtype, device: torch.device, layer_gain: float = 1.0, place: Placement | None = None
) -> Any:
    """A model with weights drawn on `device` itself, so that they never pass through main memory.

    With `place`, each parameter is moved to its device as soon as it is drawn. Placement does not change the numbers.
    """
    scheme = scheme_of(config)
    if scheme is not None:
        config = without_weights_kind(config)
        place = place or (lambda _: device)
    # The CPU tensors that are replaced one by one are never written, so they take no physical memory.
    with torch.device(device if place is None else "cpu"), no_init_weights():
        model = model_class(config).from_config(config, dtype=dtype)
    model.tie_weights()
    kinds = {} if scheme is None else kinds_by_parameter(model, scheme)
    draw_weights(model, torch.Generator(device).manual_seed(SEED), layer_gain, place, kinds)
    return model.eval()


def layer_placement(
    ranges: Sequence[tuple[int, int]], devices: Sequence[str], host_layers: Collection[int] = ()
) -> Placement:
    """Puts each layer's weights on its stage's device, the head's on the last, and all others on the first; the routed
    experts of `host_layers` in main memory."""

    def place(name: str) -> torch.device:
        found = None if "vision" in name or "visual" in name else _LAYER.search(name)
        if found is None:
            is_last = name.startswith("lm_head")
            return torch.device(devices[-1 if is_last else 0])
        layer = int(found[1])
        if layer in host_layers and ".experts." in name:
            return torch.device("cpu")
        index = next(index for index, (first, end) in enumerate(ranges) if first <= layer < end)
        return torch.device(devices[index])

    return place
