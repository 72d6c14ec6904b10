"""What is refused, by name, from the configuration alone."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import transformers
from parkd_engine.families.architectures import check_config
from parkd_engine.families.family import Family
from parkd_engine.families.presets.shapes import PRESETS, WITH_HEAD
from parkd_engine.families.records import FAMILIES as FAMILIES_KNOWN
from parkd_engine.families.records import FAMILY_BY_TYPE
from transformers import (
    BertConfig,
    DeepseekV32Config,
    Gemma3nConfig,
    Gemma3nTextConfig,
    LlavaConfig,
    Mamba2Config,
    Qwen4ExpTextConfig,
    T5Config,
)

from parkd.errors import UnsupportedModel
from tests.unit.engine.kit.core_models import FAMILIES, tiny_config
from tests.unit.engine.kit.hybrid_models import hybrid_config


@pytest.mark.parametrize("family", list(FAMILIES))
def test_tested_architectures_pass(family: str) -> None:
    assert check_config(tiny_config(family)) == FAMILIES[family][1].__name__
    named = tiny_config(family, architectures=[FAMILIES[family][1].__name__])
    assert check_config(named) == FAMILIES[family][1].__name__


EVERY_RECORD = pytest.mark.parametrize("record", FAMILIES_KNOWN, ids=lambda record: record.model_type)


@EVERY_RECORD
def test_what_a_record_names_exists_in_the_library(record: Family) -> None:
    """A misspelt name would leave a model unread, or silently without its kernels."""
    known = [record, *([] if record.vision is None else [record.vision])]
    for part in known:
        assert transformers.AutoConfig.for_model(part.model_type).model_type == part.model_type
        assert part.architecture is None or hasattr(transformers, part.architecture)
    [name, *_] = [part.architecture for part in known if part.architecture is not None]
    code = sys.modules[getattr(transformers, name).__module__]
    for name in (*record.fused_parts, *filter(None, [record.recorded_chunks])):
        assert hasattr(code, name)
    if record.vision is not None:
        assert hasattr(transformers, record.vision.processor)


@EVERY_RECORD
def test_every_family_has_a_small_random_model(record: Family) -> None:
    known = {preset.model_type for name, preset in PRESETS.items() if name.startswith("tiny")}
    assert record.model_type in known or record.architecture is None
    assert record.vision is None or record.vision.model_type in known
    assert record.draft_head is None or any(
        name.endswith(WITH_HEAD) and FAMILY_BY_TYPE[preset.model_type] is record for name, preset in PRESETS.items()
    )


def test_a_model_type_and_a_class_name_belong_to_one_family() -> None:
    parts = [*FAMILIES_KNOWN, *(record.vision for record in FAMILIES_KNOWN if record.vision is not None)]
    assert len({part.model_type for part in parts}) == len(parts)
    architectures = [part.architecture for part in parts if part.architecture is not None]
    assert len(set(architectures)) == len(architectures)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (BertConfig(architectures=["BertForMaskedLM"]), "BertForMaskedLM"),
        (T5Config(), "t5"),
        (LlavaConfig(architectures=["LlavaForConditionalGeneration"]), "LlavaForConditionalGeneration"),
        (tiny_config(architectures=["LlamaForSequenceClassification"]), "LlamaForSequenceClassification"),
    ],
)
def test_other_architectures_are_refused_by_name(config: Any, name: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"{name} is not supported"):
        check_config(config)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (Mamba2Config(num_hidden_layers=2, architectures=["Mamba2ForCausalLM"]), "Mamba2ForCausalLM"),
        (DeepseekV32Config(architectures=["DeepseekV32ForCausalLM"]), "DeepseekV32ForCausalLM"),
    ],
)
def test_pure_mamba_and_latent_attention_with_an_index_are_refused(config: Any, name: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"{name} (is not supported|has layers of kind indexed_attention)"):
        check_config(config)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_values_of_another_head_size_than_keys_are_refused(family: str) -> None:
    """The library's code of these families would read the setting past, and the rows would have the wrong shape."""
    config = tiny_config(family)
    config.v_head_dim = 16
    assert check_config(config) == FAMILIES[family][1].__name__
    config.v_head_dim = 24
    with pytest.raises(UnsupportedModel, match=r"v_head_dim \(24\) unlike the keys' head size"):
        check_config(config)


@pytest.mark.parametrize("name", ["Gemma3nForConditionalGeneration", "Gemma3nForCausalLM"])
def test_gemma_3n_is_refused_with_the_reason(name: str) -> None:
    """Its last layers attend to the keys and values of earlier ones; with its other parts it would fail a trial too."""
    config = Gemma3nConfig() if "Conditional" in name else Gemma3nTextConfig()
    config.architectures = [name]
    with pytest.raises(UnsupportedModel, match=rf"{name}.* sets .*num_kv_shared_layers \(layers that share keys and"):
        check_config(config)


def test_layer_kinds_are_refused_by_name() -> None:
    kinds = ["full_attention", "linear_attention", "full_attention", "full_attention"]
    config = tiny_config("qwen3")
    config.layer_types = kinds
    with pytest.raises(UnsupportedModel, match="linear_attention, whose state is not known"):
        check_config(config)
    config.layer_types = ["full_attention", "chunked_attention", "full_attention", "full_attention"]
    with pytest.raises(UnsupportedModel, match="chunked_attention"):
        check_config(config)


def test_a_window_counts_only_when_it_is_used_and_needs_its_layers_named() -> None:
    assert check_config(tiny_config("qwen2", sliding_window=128, use_sliding_window=False)) == "Qwen2ForCausalLM"
    plain = tiny_config()
    plain.sliding_window = 128
    with pytest.raises(UnsupportedModel, match="sliding window of 128"):
        check_config(plain)


@pytest.mark.parametrize("name", ["attn_logit_softcapping", "final_logit_softcapping", "attention_chunk_size"])
def test_settings_that_change_results_are_refused_by_name(name: str) -> None:
    config = tiny_config()
    setattr(config, name, 50)
    with pytest.raises(UnsupportedModel, match=name):
        check_config(config)


@pytest.mark.parametrize("kind", ["default", "linear", "yarn", "longrope", "dynamic"])
def test_positions_that_depend_on_what_else_was_read_are_refused(kind: str) -> None:
    """The library keeps the longest length in the module that turns queries and keys, beside the state."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 64}
    config = tiny_config(rope_parameters={"rope_theta": 1e4, "rope_type": kind, "factor": 4.0, **factors})
    each = hybrid_config("gemma3")
    each.rope_parameters["full_attention"] = {"rope_theta": 1e4, "rope_type": kind, "factor": 4.0}
    for settings in (config, each):
        if kind == "dynamic":
            with pytest.raises(UnsupportedModel, match="rope_type dynamic"):
                check_config(settings)
        else:
            check_config(settings)


def test_an_index_needs_its_settings() -> None:
    config = Qwen4ExpTextConfig(num_hidden_layers=4)
    with pytest.raises(UnsupportedModel, match=r"indexed_attention without the settings of their index"):
        check_config(config)
