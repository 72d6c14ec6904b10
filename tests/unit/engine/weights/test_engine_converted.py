"""Weights in full precision converted at load: checkpoints into the model cache, random models as they are drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parkd_engine import EngineConfig
from parkd_engine.families.presets.shapes import preset_config
from parkd_engine.families.presets.weights import random_model
from parkd_engine.families.presets.words import tiny_tokenizer
from parkd_engine.loading.layer_weights import model_weights
from parkd_engine.loading.loader import LoadConfig, LoadedModel, load_model
from parkd_engine.plan import plan_model
from parkd_engine.reading_work import reading_work
from parkd_engine.weights.experts import QuantisedExperts
from parkd_engine.weights.linear import QuantisedLinear
from parkd_engine.weights.rounding import rounded
from parkd_engine.weights.schemes import OWN_KINDS, convert_to
from parkd_engine.weights.tiles import put_tiles

from parkd.config import ModelConfig
from parkd.engine_adapter.torch_engine.loading import load_parts
from parkd.errors import ModelError
from tests.unit.engine.kit.published_weights import FORMATS, publish

EVERY_KIND = pytest.mark.parametrize("weights", list(OWN_KINDS))
GIB = 1 << 30


def load(model: str | Path, cache: Path, **settings: Any) -> LoadedModel:
    return load_model(LoadConfig(str(model), cache, **settings))


def saved(name: str, path: Path, **changes: Any) -> Path:
    config = preset_config(f"random:{name}")
    for setting, value in changes.items():
        setattr(config, setting, value)
    random_model(config, torch.float32, torch.device("cpu")).save_pretrained(path, max_shard_size="200KB")
    tiny_tokenizer().save_pretrained(path)
    return path


def quantised(model: Any) -> dict[str, QuantisedLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantisedLinear)}


@EVERY_KIND
@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-qwen3.5"])
def test_a_converted_checkpoint_has_the_rounded_weights_of_the_whole_one(
    name: str, weights: str, tmp_path: Path
) -> None:
    folder, cache = saved(name, tmp_path / "model"), tmp_path / "cache"
    assert len(list(folder.glob("*.safetensors"))) > 1
    whole, converted = load(folder, cache), load(folder, cache, weights=weights)
    layers = quantised(converted.model)
    plain = {module: weight for module, weight in whole.model.named_modules() if type(weight) is torch.nn.Linear}
    # Which experts run and how fast a memory decays is left alone.
    assert {each for each in plain if each not in layers} == {each for each in plain if each[-4:] in ("oj_a", "oj_b")}
    for each, layer in layers.items():
        expected = QuantisedLinear(
            layer.kind, layer.in_features, layer.out_features, rounded(plain[each].weight.detach(), layer.kind)
        )
        assert torch.equal(layer.numbers(torch.float32), expected.numbers(torch.float32))
    if weights == "int4":
        assert layers["lm_head"].kind == OWN_KINDS["int8"]
        assert {layer.kind.group for each, layer in layers.items() if each != "lm_head"} <= {64, 128}
    others = {each: tensor for each, tensor in whole.model.state_dict().items() if each[:-7] not in layers}
    mine = converted.model.state_dict()
    assert all(torch.equal(mine[each], tensor) for each, tensor in others.items())
    assert converted.weights_digest != whole.weights_digest


@pytest.mark.parametrize(("name", "weights"), [("tiny-qwen3.5-moe", "int4"), ("tiny-gpt-oss", "fp8")])
def test_experts_are_converted_too(name: str, weights: str, tmp_path: Path) -> None:
    """From files with a layer for each expert, and with one tensor for all of them; and as they are drawn."""
    folder = saved(name, tmp_path / "model")
    whole, converted = load(folder, tmp_path / "cache"), load(folder, tmp_path / "cache", weights=weights)
    drawn = load(f"random:{name}", tmp_path, weights=weights)
    experts = {each: part for each, part in converted.model.named_modules() if isinstance(part, QuantisedExperts)}
    assert len(experts) == 4
    for each, part in experts.items():
        plain, other = whole.model.get_submodule(each), drawn.model.get_submodule(each)
        for matrix, layer in part.named_children():
            numbers = getattr(plain, matrix).detach()
            rows = (numbers.transpose(1, 2) if plain.is_transposed else numbers).reshape(-1, layer.in_features)
            expected = rounded(rows, layer.kind)
            assert torch.equal(layer.codes.view(torch.uint8), expected["codes"].view(torch.uint8))
            assert torch.equal(layer.scales, expected["scales"])
            assert torch.equal(other.get_submodule(matrix).codes.view(torch.uint8), layer.codes.view(torch.uint8))
    planned = plan_model(f"random:{name}", EngineConfig(("cpu",), context_tokens=64, weights=weights))
    put_tiles(drawn.model)  # As where stages are on CPUs.
    tensors = {t.data_ptr(): t.nbytes for t in drawn.model.parameters()}
    tensors |= {b.data_ptr(): b.nbytes for layer in quantised(drawn.model).values() for b in layer.buffers()}
    assert dict(planned.memory[0].lines(64))["weights"] == sum(tensors.values())


def test_a_conversion_is_kept_and_says_what_it_is(tmp_path: Path) -> None:
    folder, cache, seen = saved("tiny-qwen3", tmp_path / "model"), tmp_path / "cache", list[str]()
    first = load_model(LoadConfig(str(folder), cache, weights="int4"), lambda what, _: seen.append(what))
    assert "Converting weights to int4" in seen
    seen.clear()
    again = load_model(LoadConfig(str(folder), cache, weights="int4"), lambda what, _: seen.append(what))
    assert "Converting weights to int4" not in seen
    assert again.weights_digest == first.weights_digest
    assert again.config.quantization_config == {"quant_method": "parkd", "version": 2, "weights": "int4"}
    other = load(folder, cache, weights="int8")
    assert other.weights_digest != first.weights_digest


def test_a_tied_output_head_stays_the_embedding(tmp_path: Path) -> None:
    folder = saved("tiny-qwen3", tmp_path / "model", tie_word_embeddings=True)
    model = load(folder, tmp_path / "cache", weights="int4").model
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_codes_are_not_converted_again(tmp_path: Path) -> None:
    folder = saved("tiny-qwen3", tmp_path / "model")
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    config = preset_config("random:tiny-qwen3")
    random_model(config, torch.float32, torch.device("cpu")).save_pretrained(folder)
    publish(folder, FORMATS["w4a16"])
    with pytest.raises(ModelError, match=r"quantised already \(int4 in groups of 32\).*without --weights"):
        load(folder, tmp_path / "cache", weights="int8")


@EVERY_KIND
@pytest.mark.parametrize(
    "name", ["tiny-qwen3", "tiny-gemma3", "tiny-qwen3.5-mtp", "tiny-qwen3.5-vl", "tiny-qwen3-next"]
)
def test_random_weights_are_rounded_as_they_are_drawn(name: str, weights: str, tmp_path: Path) -> None:
    whole, converted = load(f"random:{name}", tmp_path), load(f"random:{name}", tmp_path, weights=weights)
    layers = {each: layer for each, layer in quantised(converted.model).items() if ".experts." not in each}
    assert layers
    for each, layer in layers.items():
        expected = rounded(whole.model.get_submodule(each).weight.detach(), layer.kind)
        assert torch.equal(layer.codes.view(torch.uint8), expected["codes"].view(torch.uint8))
        assert torch.equal(layer.scales, expected["scales"])
    assert converted.weights_digest != whole.weights_digest


@pytest.mark.parametrize("devices", [("cpu",), ("cpu", "cpu")], ids=",".join)
@pytest.mark.parametrize(
    ("name", "weights"), [("tiny-qwen3", "int4"), ("tiny-qwen3.5-mtp", "int8"), ("tiny-qwen3.5-vl", "fp8")]
)
def test_the_account_counts_codes(name: str, weights: str, devices: tuple[str, ...], tmp_path: Path) -> None:
    layout = EngineConfig(devices, context_tokens=1024, draft_tokens=2 if name.endswith("-mtp") else 0, weights=weights)
    parts = load_parts(ModelConfig(f"random:{name}", tmp_path, layout=layout), None, lambda _: 8 * GIB)
    session = parts.session
    modules = [module for stage in session.stages for module in (stage.inner, stage.head, stage.mixer)]
    modules += [getattr(session.vision, "module", None), getattr(session.draft, "model", None)]
    tensors: dict[int, int] = {}
    for module in (each for each in modules if each is not None):
        tensors |= {p.data_ptr(): p.nbytes for p in module.parameters()}
        tensors |= {b.data_ptr(): b.nbytes for layer in quantised(module).values() for b in layer.buffers()}
    assert parts.info.weights_bytes == sum(tensors.values())
    planned = plan_model(f"random:{name}", layout)
    assert [dict(each.lines(1024)) for each in planned.memory] == [dict(each) for each in parts.info.memory]
    assert planned.weights.startswith(weights)


def test_int4_takes_a_quarter_and_work_stays_the_same() -> None:
    plain, small = preset_config("random:qwen3.5-27b"), preset_config("random:qwen3.5-27b")
    convert_to(small, "int4")
    sizes = [sum(model_weights(config, torch.bfloat16).layers) for config in (plain, small)]
    assert 0.258 < sizes[1] / sizes[0] < 0.262
    assert reading_work(plain) == reading_work(small)
