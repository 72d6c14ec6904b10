"""Checkpoints in published formats: codes mean what the format says, and the model multiplies by what they mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from parkd_engine.families.presets.words import tiny_tokenizer
from parkd_engine.loading.loader import LoadConfig, LoadedModel, load_model
from parkd_engine.weights.linear import QuantisedLinear
from parkd_engine.weights.schemes import scheme_of, tail
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from parkd.errors import ModelError, UnsupportedModel
from tests.unit.engine.kit.published_weights import FORMATS, Published, publish

EVERY_FORMAT = pytest.mark.parametrize("name", list(FORMATS))
SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


def saved(folder: Path, **changes: Any) -> Path:
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(**{**SHAPE, **changes})).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def load(folder: Path, **settings: Any) -> LoadedModel:
    return load_model(LoadConfig(str(folder), folder.parent / "cache", **settings))


def quantised(model: Any) -> dict[str, QuantisedLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantisedLinear)}


def in_file_order(layer: QuantisedLinear) -> torch.Tensor:
    stored = layer.numbers(torch.float32)
    if layer.order is None:
        return stored
    out = torch.empty_like(stored)
    out[:, layer.order.long()] = stored
    return out


@EVERY_FORMAT
def test_codes_mean_what_the_format_says(name: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", attention_bias=True)
    means = publish(folder, FORMATS[name])
    loaded = load(folder)
    layers = quantised(loaded.model)
    assert {f"{each}.weight" for each in layers} == set(means)
    for each, layer in layers.items():
        assert torch.equal(in_file_order(layer), means[f"{each}.weight"]), each
    plain = LlamaForCausalLM(LlamaConfig(**{**SHAPE, "attention_bias": True})).eval()
    kept = {
        name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if name in plain.state_dict()
    }
    plain.load_state_dict({**kept, **means})
    ids = torch.arange(1, 40)[None]
    with torch.inference_mode():
        torch.testing.assert_close(loaded.model(ids).logits, plain(ids).logits, atol=1e-5, rtol=1e-5)


def test_a_layer_that_the_file_has_in_full_precision_stays_so(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    form = FORMATS["w4a16"]
    publish(folder, Published(form.settings, form.write, frozenset({"lm_head", "layers.1.mlp.up_proj"})))
    layers = quantised(load(folder).model)
    assert len(layers) == 13
    assert "model.layers.1.mlp.up_proj" not in layers


def test_an_output_head_with_codes_is_one_of_the_layers(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    form = FORMATS["int8"]
    means = publish(folder, Published({**form.settings, "ignore": []}, form.write, frozenset()))
    loaded = load(folder)
    assert torch.equal(loaded.model.lm_head.numbers(torch.float32), means["lm_head.weight"])


def test_modelopts_own_file_says_what_the_configuration_does_not(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    means = publish(folder, FORMATS["nvfp4"])
    config = json.loads((folder / "config.json").read_text())
    settings = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    told = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": settings["ignore"]}
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": told}))
    assert {f"{each}.weight" for each in quantised(load(folder).model)} == set(means)


@pytest.mark.parametrize("lost", ["weight_scale", "weight_packed"])
def test_a_tensor_that_is_missing_is_named(lost: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    publish(folder, FORMATS["w4a16"])
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"model.layers.1.mlp.down_proj.{lost}"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.down_proj"):
        load(folder)


@pytest.mark.parametrize(
    ("entry", "name", "is_left"),
    [
        ("model.layers.*.self_attn", "model.layers.3.self_attn.q_proj", True),
        ("model.layers.3*", "model.layers.3.mlp.up_proj", True),
        ("model.layers.3*", "model.layers.2.mlp.up_proj", False),
        ("*lm_head", "lm_head", True),
        ("*.mlp.gate", "model.layers.3.mlp.gate_proj", False),
        ("language_model.model.layers.3.*", "model.layers.3.mlp.up_proj", True),
    ],
)
def test_names_with_a_star_leave_layers_alone(entry: str, name: str, is_left: bool) -> None:
    config = LlamaConfig(**SHAPE, quantization_config={**FORMATS["nvfp4"].settings, "ignore": [entry]})
    scheme = scheme_of(config)
    assert scheme is not None
    assert (scheme.kind_of(name, 64) is None) == is_left


_W4: dict[str, Any] = FORMATS["w4a16"].settings
_GROUP: dict[str, Any] = _W4["config_groups"]["group_0"]
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another method": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "method bitsandbytes"),
    "AWQ of another packing": ({**FORMATS["awq"].settings, "version": "gemv"}, "packed as gemv"),
    "GPTQ of three bits": ({**FORMATS["gptq"].settings, "bits": 3}, "3 bits"),
    "GPTQ that differs by layer": (
        {**FORMATS["gptq"].settings, "dynamic": {"+:.*down.*": {"bits": 8}}},
        r"differ by layer .*down",
    ),
    "groups that no word divides": ({**FORMATS["gptq"].settings, "group_size": 24}, "groups of 24"),
    "two groups of settings": (
        {**_W4, "config_groups": {"a": _GROUP, "b": _GROUP}},
        "2 groups of settings",
    ),
    "sparse": ({**_W4, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse"),
    "rotated": ({**_W4, "transform_config": {"R1": {}}}, "rotated"),
    "fp4 of compressed-tensors": ({**_W4, "format": "nvfp4-pack-quantized"}, "nvfp4-pack-quantized"),
    "another of ModelOpt": ({**FORMATS["nvfp4"].settings, "quant_algo": "W4A8_AWQ"}, "ModelOpt's W4A8_AWQ"),
    "NVFP4 in other groups": ({**FORMATS["nvfp4"].settings, "group_size": 32}, "NVFP4 weights have groups of 32"),
    "e5m2": ({**FORMATS["fp8-blocks"].settings, "fmt": "e5m2"}, "e5m2"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_formats_are_refused_by_name_before_weights_are_read(case: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    settings, message = REFUSED[case]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    (folder / "model.safetensors").write_bytes(b"not read")
    with pytest.raises(UnsupportedModel, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.3.mlp.up_proj", "layers.3.mlp.up_proj"),
        ("language_model.model.layers.3.mlp.up_proj", "layers.3.mlp.up_proj"),
        ("model.vision_tower.encoder.layers.3.fc1", "vision_tower.encoder.layers.3.fc1"),
        ("lm_head", "lm_head"),
        ("language_model.lm_head", "lm_head"),
    ],
)
def test_names_are_compared_from_the_layer_on(name: str, expected: str) -> None:
    assert tail(name) == expected
