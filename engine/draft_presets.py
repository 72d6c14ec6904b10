"""Random models with a draft head: `random:NAME`.

A random head knows nothing of its model, and guesses about one token in a vocabulary right. The `-echo` ones are made
to agree: layers add little to what they read, so that the next token mostly follows from the last one alone, and the
head hands the last token's embedding on to the same output, in which it mostly says the same. What their layers
compute, keep and cost is as in any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from transformers.initialization import no_init_weights
from transformers.modeling_layers import MtpModel

from engine.hybrid_presets import HYBRID_PRESETS
from engine.random_weights import SEED, draw_weights
from engine.vision_presets import VISION_PRESETS

WITH_HEAD = "-mtp"
ECHO = "-echo"
ECHO_GAIN = 0.003
"""How much layers add: guesses are then right more often than not, but not always."""
_HEAD: Mapping[str, Any] = {"num_mtp_layers": 1, "mtp_layer_types": ["full_attention"]}


def _with_head(name: str) -> tuple[str, Mapping[str, Any]]:
    kind, settings = {**HYBRID_PRESETS, **VISION_PRESETS}[name]
    if "text_config" in settings:
        return kind, {**settings, "text_config": {**settings["text_config"], **_HEAD}}
    return kind, {**settings, **_HEAD}


DRAFT_PRESETS: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        f"{name}{WITH_HEAD}{ending}": _with_head(name)
        for name in ("tiny-qwen3.5", "tiny-qwen3.5-vl", "tiny-qwen3-next", "qwen3.5-27b")
        for ending in ("", ECHO)
    }
)


def headless(name: str) -> str:
    """The preset that is the same without a head."""
    return name.removesuffix(ECHO).removesuffix(WITH_HEAD)


def layer_gain(name: str) -> float:
    """How much the layers of a preset add to what they read."""
    return ECHO_GAIN if name.endswith(ECHO) else 1.0


def random_head(model: Any, name: str) -> Any:
    """A head beside a random model, whose weights are drawn as the model's are: the library's `MtpModel`."""
    device, dtype, gain = model.device, model.dtype, layer_gain(name)
    with torch.device(device), no_init_weights():
        head = MtpModel(model, 1).to(dtype)
    draw_weights(head.layers, torch.Generator(device).manual_seed(SEED + 1), gain)
    if name.endswith(ECHO):
        hand_on(head)
    return head.eval()


def hand_on(head: Any) -> None:
    """The head's layer gets the embedding of the token and nothing of the hidden state before it."""
    with torch.no_grad():
        weight = head.layers[0].eh_proj.weight
        weight.zero_()[:, : weight.shape[0]].fill_diagonal_(1.0)
