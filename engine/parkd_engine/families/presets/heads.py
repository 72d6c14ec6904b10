"""Random models with a draft head: `random:NAME`.

A random head is unrelated to its model: a guess is right about once in as many tries as the vocabulary has tokens. The
`-echo` presets make model and head agree. Their layers add little to their input, so the next token mostly depends on
the last one alone; the head passes the last token's embedding to the same output, which mostly gives the same token.
Their layers compute, store and cost the same as in other presets.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.initialization import no_init_weights

from parkd_engine.draft.stream_head import SHARED, StreamHead, head_class
from parkd_engine.families.presets.shapes import ECHO
from parkd_engine.families.presets.weights import SEED, draw_weights

ECHO_GAIN = 0.003
"""How much layers add to their input: with this, most guesses are right, but not all."""


def layer_gain(name: str) -> float:
    """How much the layers of a preset add to their input."""
    return ECHO_GAIN if name.endswith(ECHO) else 1.0


def random_head(model: Any, name: str) -> Any:
    """A draft head for a random model, with weights drawn in the same way."""
    device, dtype, gain = model.device, model.dtype, layer_gain(name)
    with torch.device(device), no_init_weights():
        head = head_class(model.config)(model, 1).to(dtype)
    generator = torch.Generator(device).manual_seed(SEED + 1)
    for part in own_parts(head):
        draw_weights(part, generator, gain)
    if name.endswith(ECHO):
        hand_on(head, model)
    return head.eval()


def own_parts(head: Any) -> list[nn.Module]:
    """The modules that a head does not share with its model, its layers first."""
    others = ("layers", "rotary_emb", *SHARED)
    return [head.layers, *(part for name, part in head.named_children() if name not in others)]


def hand_on(head: Any, model: Any) -> None:
    """Makes the head's layer read only the embedding of the token, and nothing of the hidden state before it."""
    with torch.no_grad():
        if isinstance(head, StreamHead):
            head.hyper_connection_mixer.load_state_dict(model.get_decoder().hyper_connection_mixer.state_dict())
            head.fc_hidden.weight.zero_()
            head.fc_embedding.weight.zero_().fill_diagonal_(1.0)
        else:
            weight = head.layers[0].eh_proj.weight
            weight.zero_()[:, : weight.shape[0]].fill_diagonal_(1.0)
