"""The draft head of models with several residual streams (Qwen4-exp). Its layer maps streams to streams.

    streams after token t-1 -> norm over all -> same projection for each stream ----.
    token t -> embedding ----> norm ----------> projection, added to every stream --> layer -> streams after t
                                                                    streams -> mixer -> logits of token t+1

The library's `MtpModel` combines both inputs into one hidden state, which such a layer cannot read, and makes no mask
for layers with an index. Only its code for loading is used. (Sources: names and shapes of the published checkpoint's
`mtp.*` weights, and SGLang's `qwen4_exp_mtp`. The layer has no n-grams.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import MtpModel

from parkd_engine.families.layer_state import streams_of
from parkd_engine.families.multimodal import language_config

SHARED = ("embed_tokens", "shared_head")
"""Names of the modules that a draft head shares with its model."""


class StreamHead(MtpModel):  # type: ignore[misc]
    """A head of one layer. Parameters have the checkpoint's names without `mtp.`."""

    def __init__(self, main_model: Any, num_mtp_layers: int = 1) -> None:
        """`main_model` is the library's model. Its configuration names the head (`draft_loading.declare_head`)."""
        config = main_model.config.get_mtp_config()
        config.ple_layer_ids = []
        PreTrainedModel.__init__(self, config)
        self.num_mtp_layers = num_mtp_layers
        decoder = main_model.get_decoder()
        layer, mixer = type(decoder.layers[-1]), type(decoder.hyper_connection_mixer)
        norm = type(decoder.hyper_connection_mixer.hc_norm)
        width, self.streams = config.hidden_size, config.hc_count
        self.pre_fc_norm_embedding = norm(width, eps=config.rms_norm_eps)
        self.pre_fc_norm_hidden = norm(width * self.streams, eps=config.rms_norm_eps)
        self.fc_embedding = nn.Linear(width, width, bias=False)
        self.fc_hidden = nn.Linear(width, width, bias=False)
        self.layers = nn.ModuleList([layer(config, 0)])
        self.hyper_connection_mixer = mixer(config, use_combine=False)
        self.tie_with_main_model(main_model)
        self.post_init()

    def forward_layer(
        self,
        layer_idx: int,
        last_hidden_states: torch.Tensor,
        position_ids: torch.Tensor,
        mtp_cache: Any,
        *,
        inputs_embeds: torch.Tensor,
    ) -> torch.Tensor:
        """Maps the concatenated streams `[1, q, streams * hidden]` after the previous tokens, and the embeddings
        `[1, q, hidden]` of `q` tokens, to the streams after these. `position_ids` is `[1, q]` or `[3, 1, q]`."""
        behind = self.pre_fc_norm_hidden(last_hidden_states).unflatten(-1, (self.streams, -1))
        token = self.fc_embedding(self.pre_fc_norm_embedding(inputs_embeds))
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=inputs_embeds,
            attention_mask=None,
            cache=mtp_cache,
            allow_is_causal_skip=False,
        )
        output: torch.Tensor = self.layers[layer_idx](
            (self.fc_hidden(behind) + token.unsqueeze(-2)).flatten(-2),
            position_embeddings=self.rotary_emb(inputs_embeds, position_ids),
            attention_mask=mask,
            cache=mtp_cache,
        )
        return output

    def get_weight_conversions(self, main_model: Any) -> list[Any]:
        """The library's conversions, without renaming, since parameters have the checkpoint's names already."""
        own = getattr(main_model, "_weight_conversions", None)
        return [
            PrefixChange(prefix_to_remove="mtp"),
            *(get_model_conversion_mapping(main_model) if own is None else own),
        ]


def head_class(config: Any) -> type[MtpModel]:
    """The draft head's class for this configuration: the library's, or `StreamHead` for several residual streams."""
    return StreamHead if streams_of(language_config(config)) > 1 else MtpModel
