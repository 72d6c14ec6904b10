"""Experts whose weights are codes: what the library makes of the numbers that they mean, in every published form."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parkd_engine import EngineConfig, restore
from parkd_engine.account import ModelMemory
from parkd_engine.balance import choose_host_layers
from parkd_engine.families.multimodal import language_model
from parkd_engine.families.presets.words import tiny_tokenizer
from parkd_engine.loading.loader import LoadConfig, LoadedModel, load_model
from parkd_engine.plan import plan_model
from parkd_engine.weights.experts import QuantisedExperts, _groups, joined
from parkd_engine.weights.kinds import Codes, WeightKind
from parkd_engine.weights.linear import QuantisedLinear
from parkd_engine.weights.schemes import scheme_of
from safetensors.torch import load_file, save_file
from torch import nn

from parkd.errors import ModelError, UnsupportedModel
from tests.unit.engine.kit.core_models import read_and_decode, tiny_session, token_ids
from tests.unit.engine.kit.hybrid_models import hybrid_config, hybrid_model
from tests.unit.engine.kit.parking import parked
from tests.unit.engine.kit.published_weights import FORMATS, Published, fp8, publish
from tests.unit.engine.kit.quantised_models import KINDS, coded_experts, e2m1, numbers_of, random_codes

EXPERTS, CHOSEN = 4, 2
KINDS_OF_EXPERTS = {
    **{name: KINDS[name] for name in ("int4", "fp4", "fp4-rows", "int8", "int8-zeros", "fp8")},
    "fp8-blocks": WeightKind(Codes.FP8, 48, 16, scale_dtype=torch.float32),
}
MIXER = {"nemotron-h": ("moe_intermediate_size", 1), "gpt-oss": ("intermediate_size", 0)}
"""The setting with the width of an expert, if it is another one, and a layer with experts."""
FAMILIES = ("qwen3-moe", "gpt-oss", "nemotron-h", "gemma4", "minimax-m2")


def experts_of(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """The library's experts of one layer."""
    setting, layer = MIXER.get(family, ("moe_intermediate_size", 0))
    setting = "intermediate_size" if family == "minimax-m2" else setting
    decoder = language_model(hybrid_model(family, hidden_size=192, dtype=dtype, **{setting: 64}))
    decoder.config._experts_implementation = "grouped_mm"
    return next(part for name, part in decoder.layers[layer].named_modules() if name.endswith("experts"))


def put_in(experts: Any, coded: QuantisedExperts, dtype: torch.dtype) -> Any:
    """The library's experts with the numbers that codes mean."""
    twin = copy.deepcopy(experts)
    for name, matrix in coded.named_children():
        assert isinstance(matrix, QuantisedLinear)
        numbers = numbers_of(matrix).view(EXPERTS, -1, matrix.in_features)
        setattr(twin, name, nn.Parameter((numbers.transpose(1, 2) if twin.is_transposed else numbers).to(dtype)))
    return twin


@pytest.mark.parametrize("kind", list(KINDS_OF_EXPERTS))
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_the_librarys_with_the_numbers(family: str, kind: str) -> None:
    """Of one token, and of more than products over codes take; an expert that nobody chose, weights that are zero."""
    library = experts_of(family)
    draw = torch.Generator().manual_seed(2)
    coded = coded_experts(library, KINDS_OF_EXPERTS[kind], draw)
    assert coded is not None
    expected = put_in(library, coded, torch.float32)
    for tokens in (1, 40):
        hidden = torch.randn((tokens, 192), generator=draw)
        index = torch.rand((tokens, EXPERTS - 1), generator=draw).topk(CHOSEN).indices
        weights = torch.rand((tokens, CHOSEN), generator=draw)
        weights[0, 0] = 0
        with torch.inference_mode():
            mine, theirs = coded(hidden, index, weights), expected(hidden, index, weights)
        # Torch's product over int8 codes rounds vectors to bf16.
        loose = 3e-2 if kind == "int8" else 1e-4
        torch.testing.assert_close(mine, theirs, atol=loose * float(theirs.abs().max()), rtol=0)


def test_groups_reach_from_one_chosen_expert_to_another() -> None:
    assert list(_groups([0, 3, 0, 1, 2, 0, 0, 5], 2)) == [(1, 2), (3, 5), (7, 8)]
    assert list(_groups([0, 3, 0, 1, 2, 0, 0, 5], 4)) == [(1, 5), (7, 8)]
    assert list(_groups([1, 0, 1], 1)) == [(0, 1), (2, 3)]
    assert list(_groups([0, 0], 3)) == []


@pytest.mark.parametrize(("codes", "middle"), [(Codes.INT4, 8), (Codes.INT8, 0)])
def test_zeros_that_a_part_need_not_store_are_the_middle(codes: Codes, middle: int) -> None:
    kind = WeightKind(codes, 32, has_zeros=True)
    draw = torch.Generator().manual_seed(4)
    one, other = (random_codes(replace(kind, has_zeros=has), 6, 64, draw) for has in (True, False))
    whole = joined(
        kind, 2, 6, 64, iter([(0, dict(one.named_buffers()), one.kind), (6, dict(other.named_buffers()), other.kind)])
    )
    assert torch.equal(whole.numbers(torch.float32), torch.cat([numbers_of(one), numbers_of(other)]))
    assert whole.zeros is not None
    assert bool((whole.zeros[6:] == middle).all())
    with pytest.raises(ValueError, match="stored in several ways"):
        joined(other.kind, 1, 6, 64, iter([(0, dict(one.named_buffers()), one.kind)]))


WIDTH = {"vocab_size": 512, "hidden_size": 192, "num_hidden_layers": 2}
PUBLISHED = [
    *(("qwen3-moe", form) for form in ("w4a16", "fp8-blocks", "nvfp4", "awq")),
    ("deepseek-v3", "fp8-blocks"),
    ("minimax-m2", "w4a16"),
]


def saved(folder: Path, family: str, **changes: Any) -> Path:
    width = "intermediate_size" if family == "minimax-m2" else "moe_intermediate_size"
    torch.manual_seed(1)
    hybrid_model(family, **{**WIDTH, width: 192, **changes}).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def load(folder: Path, **settings: Any) -> LoadedModel:
    return load_model(LoadConfig(str(folder), folder.parent / "cache", **settings))


def same_logits(coded: Any, plain: Any) -> None:
    ids = torch.arange(1, 40)[None]
    with torch.inference_mode():
        torch.testing.assert_close(coded(ids).logits, plain(ids).logits, atol=2e-4, rtol=1e-4)


def coded_in(model: Any) -> dict[str, QuantisedExperts]:
    return {name: part for name, part in model.named_modules() if isinstance(part, QuantisedExperts)}


@pytest.mark.parametrize(("family", "name"), PUBLISHED)
def test_a_checkpoint_with_a_layer_for_each_expert(family: str, name: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", family)
    plain = saved(tmp_path / "plain", family)
    means = publish(folder, FORMATS[name])
    experts = {name for name in means if ".experts." in name}
    loaded = load(folder)
    layers = 1 if family == "deepseek-v3" else 2
    assert len(experts) == 3 * EXPERTS * layers
    assert len(coded_in(loaded.model)) == layers
    tensors = load_file(plain / "model.safetensors")
    save_file(tensors | means, plain / "model.safetensors", metadata={"format": "pt"})
    same_logits(loaded.model, load(plain).model)
    # The account, made of the configuration alone, has these sizes.
    planned = plan_model(str(folder), EngineConfig(("cpu",), context_tokens=64))
    held = {t.data_ptr(): t.nbytes for t in (*loaded.model.parameters(), *_codes(loaded.model))}
    assert abs(dict(planned.memory[0].lines(64))["weights"] - sum(held.values())) < 0.03 * sum(held.values())


DEEPSEEK = Published(
    {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
    fp8("weight_scale_inv", (128, 128)),
)
"""As the configuration of DeepSeek-V3 has it: what is in full precision, only the files say."""


EVEN = {"hidden_size": 256, "moe_intermediate_size": 128}
"""Whole blocks in a row of experts."""


def test_deepseek_v3_as_it_is_published(tmp_path: Path) -> None:
    """Blocks of 128 that divide neither latents nor heads. A decoded token is multiplied by what the codes of the
    projection to keys and values mean (`forward.latents`), and what is restored has its bits."""
    folder, plain = (saved(tmp_path / name, "deepseek-v3", **EVEN) for name in ("model", "plain"))
    means = publish(folder, DEEPSEEK)
    save_file(load_file(plain / "model.safetensors") | means, plain / "model.safetensors", metadata={"format": "pt"})
    loaded = load(folder).model
    attention = loaded.model.layers[1].self_attn
    assert all(
        isinstance(attention.get_submodule(part), QuantisedLinear)
        for part in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    )
    assert len(coded_in(loaded)) == 1
    assert not isinstance(loaded.lm_head, QuantisedLinear)
    ids = token_ids(94)
    session, other = (tiny_session(2, model) for model in (loaded, load(plain).model))
    mine = read_and_decode(session, ids, decoded=3)
    for one, theirs in zip(mine, read_and_decode(other, ids, decoded=3), strict=True):
        torch.testing.assert_close(one, theirs, atol=2e-4, rtol=1e-4)
    session.truncate(91)
    plan = parked(session, (), 91)
    session.reset()
    session.extend(token_ids(80, seed=4))
    session.reset()
    restore(session, plan)
    assert all(torch.equal(one, session.step(int(token))) for one, token in zip(mine, ids[91:], strict=True))


def _codes(model: Any) -> list[torch.Tensor]:
    return [each for part in model.modules() if isinstance(part, QuantisedLinear) for each in part.buffers()]


def write_mxfp4(folder: Path) -> dict[str, torch.Tensor]:
    """Rewrites the experts of a gpt-oss checkpoint as they are published; returns what they mean."""
    file = folder / "model.safetensors"
    tensors, means = load_file(file), {}
    draw = torch.Generator().manual_seed(6)
    for name in [each for each in tensors if each.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, columns, rows = tensors.pop(name).shape
        codes = torch.randint(0, 16, (count, rows, columns), generator=draw)
        exponents = torch.randint(-8, -3, (count, rows, columns // 32), generator=draw)
        means[name] = (e2m1(codes) * 2.0 ** exponents.repeat_interleave(32, 2)).transpose(1, 2).contiguous()
        pairs = codes[..., ::2] | codes[..., 1::2] << 4
        tensors[f"{name}_blocks"] = pairs.view(count, rows, columns // 32, 16).to(torch.uint8)
        tensors[f"{name}_scales"] = (exponents + 127).to(torch.uint8)
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    alone = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": alone}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return means


GPT_OSS = {"intermediate_size": 64, "layer_types": ["sliding_attention", "full_attention"]}


def test_gpt_oss_as_it_is_published(tmp_path: Path) -> None:
    folder, plain = (saved(tmp_path / name, "gpt-oss", **GPT_OSS) for name in ("model", "plain"))
    means = write_mxfp4(folder)
    loaded = load(folder).model
    assert len(coded_in(loaded)) == 2
    assert not any(
        isinstance(loaded.get_submodule(f"model.layers.0.self_attn.{part}_proj"), QuantisedLinear) for part in "qkvo"
    )
    for name, experts in coded_in(loaded).items():
        for matrix in ("gate_up_proj", "down_proj"):
            stored = experts.get_submodule(matrix)
            assert isinstance(stored, QuantisedLinear)
            expected = means[f"{name}.{matrix}"].transpose(1, 2).reshape(stored.out_features, -1)
            assert torch.equal(stored.numbers(torch.float32), expected)
    save_file(load_file(plain / "model.safetensors") | means, plain / "model.safetensors", metadata={"format": "pt"})
    same_logits(loaded, load(plain).model)


@pytest.mark.parametrize("lost", ["gate_up_proj_blocks", "down_proj_scales"])
def test_an_expert_tensor_that_is_missing_is_named(lost: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "gpt-oss", **GPT_OSS)
    write_mxfp4(folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"model.layers.1.mlp.experts.{lost}"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"model\.layers\.1\.mlp\.experts.*{lost} should be .* missing"):
        load(folder)


def test_experts_in_several_kinds_of_files_are_refused(tmp_path: Path) -> None:
    """One that is in full precision although the configuration says otherwise, one with another group."""
    folder = saved(tmp_path / "model", "qwen3-moe")
    publish(folder, FORMATS["w4a16"])
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.2.down_proj"
    wider = {**tensors, f"{name}.weight_scale": tensors[f"{name}.weight_scale"].float()}
    save_file(wider, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.experts .*stored in several ways"):
        load(folder)
    del tensors[f"{name}.weight_scale"], tensors[f"{name}.weight_packed"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"down_proj of expert 2 is missing"):
        load(folder)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (FORMATS["gptq-order"].settings, "experts have columns in an order of their own"),
        ({**FORMATS["fp8-blocks"].settings, "weight_block_size": [128, 24]}, "experts have 384 rows stored as fp8"),
        ({**FORMATS["w4a16"].settings, "ignore": ["re:.*experts.*down_proj"]}, "quantised in part .gate_up_proj"),
        ({**FORMATS["w4a16"].settings, "ignore": ["re:.*experts.*gate_proj"]}, "quantised in part .gate_up_proj"),
    ],
)
def test_experts_are_refused_by_name_before_weights_are_read(settings: Any, message: str, tmp_path: Path) -> None:
    config = hybrid_config("qwen3-moe", **WIDTH, moe_intermediate_size=192)
    config.quantization_config = settings
    with pytest.raises(UnsupportedModel, match=message):
        ModelMemory(config, torch.float32, EngineConfig(("cpu",)))


def test_experts_that_are_left_alone_stay() -> None:
    config = hybrid_config("qwen3-moe", **WIDTH, moe_intermediate_size=192)
    config.quantization_config = {**FORMATS["w4a16"].settings, "ignore": ["lm_head", "re:.*experts.*"]}
    assert scheme_of(config) is not None
    memory = ModelMemory(config, torch.float32, EngineConfig(("cpu",)))
    assert memory.expert_layers == (0, 1)
    assert not memory.has_coded_experts


def test_codes_do_not_stay_in_main_memory() -> None:
    """`--cpu-experts` is for experts in full precision."""
    config = hybrid_config("qwen3-moe", **WIDTH, moe_intermediate_size=192)
    config.quantization_config = FORMATS["w4a16"].settings
    layout = EngineConfig(("cuda:0",), cpu_experts=2)
    memory = ModelMemory(config, torch.bfloat16, layout, lambda _: 0)
    with pytest.raises(ModelError, match="this model's are codes"):
        choose_host_layers(config, torch.bfloat16, layout, lambda _: 1 << 30, memory)
    assert (
        choose_host_layers(config, torch.bfloat16, EngineConfig(("cuda:0",), cpu_experts=None), lambda _: 1, memory)
        == ()
    )
