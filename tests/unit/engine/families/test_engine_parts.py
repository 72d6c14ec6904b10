"""Models that no record names: accepted if a trial of their forward pass finds nothing but known state, and then right;
refused with the reason otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parkd_engine import restore
from parkd_engine.families.architectures import check_config
from parkd_engine.families.parts import TRIAL, family_by_parts
from parkd_engine.families.records import FAMILIES, family_of
from parkd_engine.forward.dense import unrecorded
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.phi3 import modeling_phi3

from parkd.errors import UnsupportedModel
from tests.unit.engine.families.test_engine_families import parked, resumed_at
from tests.unit.engine.kit.core_models import (
    CONTEXT,
    VOCAB,
    assert_same,
    oracle_logits,
    read_and_decode,
    tiny_session,
    token_ids,
)
from tests.unit.engine.kit.hybrid_models import HYBRIDS, WINDOW, hybrid_config

BATCH = 64
_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": None,
}
UNLISTED: dict[str, dict[str, Any]] = {
    "phi3": {},
    "smollm3": {"no_rope_layer_interval": 2},
    "olmo3": {
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_d_state": 8,
        "use_mamba_kernels": False,
    },
}
"""`model_type` -> settings."""
ROUNDS_BY_PLACE = ("jamba",)
"""Some processors round the products of its recurrence by where the state lies in memory, which is elsewhere in an
arena than in the library's cache."""


def unlisted(model_type: str, **changes: Any) -> Any:
    return AutoConfig.for_model(model_type, **{**_SHAPE, **UNLISTED.get(model_type, {}), **changes})


@pytest.mark.filterwarnings("ignore:.*falling back to its reference")
@pytest.mark.parametrize("kv_format", [None, "int8"], ids=["full", "int8"])
@pytest.mark.parametrize("model_type", list(UNLISTED))
def test_an_unlisted_model_is_right_and_resumes_as_if_never_left(model_type: str, kv_format: str | None) -> None:
    config = unlisted(model_type)
    assert model_type not in {family.model_type for family in FAMILIES}
    assert check_config(config) == model_type
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 1.2 / parameter.shape[-1] ** 0.5)
    session = tiny_session(2, model, batch_tokens=BATCH, kv_format=kv_format)
    ids, place = token_ids(130), 75
    expected = oracle_logits(model, ids, BATCH, decoded=4, kv_format=kv_format)
    logits = read_and_decode(session, ids, decoded=4)
    if model_type in ROUNDS_BY_PLACE:
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    else:
        assert_same(logits, expected)
    session.reset()
    session.extend(ids[:place], checkpoint_at=(place,))
    session.extend(ids[place:126])
    stayed = [session.step(int(token)) for token in ids[126:]]
    session.truncate(place)
    plan = parked(session, (place,), place)
    session.reset()
    session.extend(token_ids(100, seed=9))
    session.reset()
    restore(session, resumed_at(plan, place))
    session.extend(ids[place:126])
    assert_same([session.step(int(token)) for token in ids[126:]], stayed)


@pytest.mark.parametrize("name", ["qwen3-moe", "glm4-moe", "minimax-m2", "mistral-window", "gpt-oss"])
def test_a_trial_finds_what_the_record_says(name: str) -> None:
    config = hybrid_config(name)
    found, record = family_by_parts(config), family_of(config)
    assert (found.final_norm, found.layers_give_tuples) == (record.final_norm, record.layers_give_tuples)
    assert found.architecture == record.architecture
    assert HYBRIDS[name][0] == found.model_type


REFUSED = {
    "gemma2": ({}, "attn_logit_softcapping"),
    "cohere": ({}, "it changes its logits after the output head"),
    "granite": ({"embedding_multiplier": 3.0}, "it changes its embeddings before the first layer"),
    "gpt2": ({}, "it is not made of `layers` between an embedding and an output head"),
    "dbrx": ({}, "is not supported"),
    "smollm3": ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type dynamic"),
}


@pytest.mark.parametrize("model_type", list(REFUSED))
def test_a_refusal_says_what_is_unknown(model_type: str) -> None:
    changes, reason = REFUSED[model_type]
    config = AutoConfig.for_model(model_type, **changes)
    config.num_hidden_layers = 2
    with pytest.raises(UnsupportedModel, match=reason.replace("(", r"\(")):
        check_config(config)


def patched(monkeypatch: pytest.MonkeyPatch, part: str, change: Any) -> Any:
    """A configuration of a model whose code does something else; the number of layers keeps it from being found."""
    original = getattr(modeling_phi3, part).forward

    def forward(self: Any, *given: Any, **named: Any) -> Any:
        return change(self, original, given, named)

    monkeypatch.setattr(getattr(modeling_phi3, part), "forward", forward)
    return unlisted("phi3", initializer_range=0.02 + len(part) / 1000)


def test_a_model_that_keeps_something_beside_its_cache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def counts(self: Any, original: Any, given: Any, named: Any) -> Any:
        self.longest = getattr(self, "longest", 0) + 1
        return original(self, *given, **named)

    config = patched(monkeypatch, "Phi3MLP", counts)
    with pytest.raises(UnsupportedModel, match=r"keeps something outside of its cache, in model.layers.0.mlp.longest"):
        check_config(config)


def test_decoding_of_a_model_known_by_parts_is_not_recorded() -> None:
    assert unrecorded(unlisted("phi3"), torch.bfloat16) == "its family is known by its parts alone"


def test_a_trial_leaves_nothing_registered() -> None:
    check_config(unlisted("mixtral"))
    assert TRIAL not in ALL_EXPERTS_FUNCTIONS
    assert TRIAL not in AttentionInterface()
