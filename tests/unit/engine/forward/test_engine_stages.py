"""Where layers go."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from parkd_engine import EngineConfig, layer_split
from parkd_engine.forward.stages import PassThrough, place
from parkd_engine.layer_split import split_layers
from parkd_engine.loading.layer_weights import ModelWeights, model_weights

from parkd.errors import InvalidSplit
from tests.unit.engine.kit.core_models import tiny_config, tiny_model
from tests.unit.engine.kit.hybrid_models import hybrid_config, hybrid_model


def test_a_given_split_names_first_layers() -> None:
    assert split_layers(tiny_config(num_hidden_layers=10), 3, (2, 9)) == ((0, 2), (2, 9), (9, 10))


def test_auto_split_gives_the_ends_fewer_layers_when_the_vocabulary_is_large() -> None:
    small = split_layers(tiny_config(num_hidden_layers=30, vocab_size=1), 3)
    assert small == ((0, 10), (10, 20), (20, 30))
    first, middle, last = split_layers(tiny_config(num_hidden_layers=30, vocab_size=2000), 3)
    assert middle[1] - middle[0] > first[1] - first[0]
    assert middle[1] - middle[0] > last[1] - last[0]
    assert first[0] == 0
    assert last[1] == 30


@pytest.mark.parametrize(("stages", "split"), [(2, (0,)), (2, (4,)), (3, (2, 2)), (3, (3, 1)), (3, (2,)), (5, None)])
def test_a_split_that_leaves_a_stage_empty_is_refused(stages: int, split: Any) -> None:
    with pytest.raises(InvalidSplit):
        split_layers(tiny_config(), stages, split)


def test_what_a_layer_weighs_is_counted() -> None:
    """One dense layer among such of many experts, and a recurrent one among such of attention, as they are."""
    experts = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "mlp_only_layers": [0, 1, 2]}
    config = hybrid_config("qwen3-next", **experts)
    assert split_layers(config, 2) == ((0, 3), (3, 4))
    model = hybrid_model("qwen3-next", **experts)
    weights = model_weights(config)
    assert weights.layers == tuple(sum(p.nbytes for p in layer.parameters()) for layer in model.model.layers)
    whole = sum(p.nbytes for p in model.parameters())
    assert sum(weights.layers) + weights.embedding + weights.head + weights.last + weights.everywhere == whole
    assert len(set(model_weights(hybrid_config("granite-h")).layers)) == 2


def sharing_config() -> Any:
    """Layers 2 (sliding) and 3 (full) are what layers 4 and 5 read."""
    shape = {name: getattr(tiny_config(), name) for name in ("hidden_size", "num_attention_heads", "head_dim")}
    return SimpleNamespace(
        **shape,
        num_key_value_heads=2,
        intermediate_size=64,
        vocab_size=10,
        num_hidden_layers=6,
        layer_types=["sliding", "full", "sliding", "full", "sliding", "full"],
        kv_sharing_modes=[None, None, None, None, "reuse", "reuse"],
    )


@pytest.mark.parametrize("start", [3, 4, 5])
def test_layers_that_share_keys_stay_together(start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = ModelWeights(
        (100,) * 6, embedding=10, head=10, is_tied=False, last=0, everywhere=0, tower=0, draft=0, codes=0
    )
    monkeypatch.setattr(layer_split, "model_weights", lambda config: weights)
    with pytest.raises(InvalidSplit, match="share keys and values"):
        split_layers(sharing_config(), 2, (start,))
    assert split_layers(sharing_config(), 2) == ((0, 2), (2, 6))
    with pytest.raises(InvalidSplit, match="stay together"):
        split_layers(sharing_config(), 4)


def test_each_stage_holds_only_its_own_layers() -> None:
    model = tiny_model()
    stages = place(model, ((0, 1), (1, 3), (3, 4)), ("cpu",) * 3)
    for stage in stages:
        own = [i for i, layer in enumerate(stage.inner.layers) if not isinstance(layer, PassThrough)]
        assert own == list(range(stage.first_layer, stage.end_layer))
        assert (stage.inner.embed_tokens is not None) == (stage.index == 0)
        assert (stage.head is not None) == (stage.index == 2)
    assert isinstance(stages[1].inner.norm, torch.nn.Identity)
    assert not isinstance(stages[2].inner.norm, torch.nn.Identity)


def test_placing_on_the_same_device_copies_no_weights_and_keeps_the_model() -> None:
    model = tiny_model(tie_word_embeddings=True)
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    stages = place(model, ((0, 2), (2, 4)), ("cpu", "cpu"))
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == before
    placed = {parameter.data_ptr() for stage in stages for parameter in stage.inner.parameters()}
    assert placed == set(before.values())
    assert stages[1].head is not None
    assert next(stages[1].head.parameters()).data_ptr() == stages[0].inner.embed_tokens.weight.data_ptr()


def test_hooks_on_a_stage_do_not_reach_the_model() -> None:
    model = tiny_model()
    [stage] = place(model, ((0, 4),), ("cpu",))
    stage.inner.layers[0].register_forward_pre_hook(lambda *_: None)
    assert not model.model.layers[0]._forward_pre_hooks


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"devices": ("cpu", "cpu"), "layer_split": (1, 2)}, "name 1, one for each stage"),
        ({"context_tokens": 0}, "context_tokens is 0"),
        ({"batch_tokens": 0}, "batch_tokens is 0"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**wrong)
