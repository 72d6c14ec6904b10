"""Random models are whole: what is computed is as the library computes it, and long ago still matters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from parkd_engine.arenas.layout import build_layout
from parkd_engine.families.architectures import check_config
from parkd_engine.families.presets.shapes import ECHO, PRESETS, preset_config
from parkd_engine.families.presets.weights import layer_placement, random_model
from parkd_engine.families.records import vision_of
from parkd_engine.layer_split import split_layers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

CPU = torch.device("cpu")
TINY = [name for name in PRESETS if name.startswith("tiny")]


@pytest.mark.parametrize("name", TINY)
def test_weights_are_drawn_and_buffers_computed(name: str) -> None:
    config = preset_config(f"random:{name}")
    model = random_model(config, torch.float32, CPU)
    again = random_model(config, torch.float32, CPU)
    library = (AutoModelForImageTextToText if vision_of(config) else AutoModelForCausalLM).from_config(config)
    for (name_, mine), other in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.isfinite(mine).all(), name_
        assert mine.equal(other), name_
    for (name_, mine), (other_name, other) in zip(model.named_buffers(), library.named_buffers(), strict=True):
        assert name_ == other_name
        torch.testing.assert_close(mine, other)
    ids = torch.from_numpy(np.random.default_rng(0).integers(3, 500, (2, 150)))
    ids[1, 1:] = ids[0, 1:]
    assert ids[0, 0] != ids[1, 0]
    with torch.inference_mode():
        here, there = model(ids[:1]).logits[0, -1], model(ids[1:]).logits[0, -1]
    assert torch.isfinite(here).all()
    assert here.std() > 0.3
    if name not in ("tiny-lfm2", "tiny-gemma3", "tiny-gemma3-vl"):  # Few layers of these see far.
        assert (here - there).abs().max() > 1e-4


@pytest.mark.parametrize("name", [name for name in PRESETS if not name.startswith("tiny")])
def test_real_shapes_are_known_and_split(name: str) -> None:
    config = preset_config(f"random:{name}")
    check_config(config)
    for stages in (1, 2, 4):
        ranges = split_layers(config, stages)
        layouts = build_layout(config, ranges, torch.bfloat16, torch.bfloat16)
        assert sum(layout.row_bytes for layout in layouts) > 6_000
        assert any(layout.fixed_bytes for layout in layouts) == (name not in ("qwen3-8b", "qwen3-30b-a3b"))


def test_the_27b_shape_keeps_what_that_model_is_known_to_keep() -> None:
    config = preset_config("random:qwen3.5-27b")
    [layout] = build_layout(config, [(0, 64)], torch.bfloat16, torch.bfloat16)
    assert layout.row_bytes == 16 * 2 * 4 * 256 * 2
    assert layout.fixed_bytes == 48 * (48 * 128 * 128 * 4 + 10240 * 4 * 2)


def test_the_qwen4_exp_shape_keeps_what_that_model_is_known_to_keep() -> None:
    config = preset_config("random:qwen4-exp-small")
    ngrams = 4 * 1024 * 9 * 2 + 2 * 8
    for kv_dtype, attention in ((torch.bfloat16, 2 * 2 * 256 * 2), (torch.int8, 2 * 2 * 256 + 16)):
        [layout] = build_layout(config, [(0, 48)], kv_dtype, torch.bfloat16)
        assert layout.row_bytes == 12 * (attention + 128 * 2) + 16
        assert layout.fixed_bytes == 36 * (48 * 128 * 128 * 4 + 10240 * 4 * 2) + ngrams
        assert layout.index_bytes(8 * 1024 + 3) == 12 * 2 * 1024 * 128 * 2


def test_weights_drawn_where_they_run_are_the_same_numbers() -> None:
    config = preset_config("random:tiny-qwen3.5")
    asked: list[str] = []
    placed = layer_placement([(0, 2), (2, 4)], ["cpu", "cpu:0"])

    def place(name: str) -> torch.device:
        asked.append(name)
        return placed(name)

    whole = random_model(config, torch.float32, CPU)
    parted = random_model(config, torch.float32, CPU, place=place)
    for (name, one), (_, other) in zip(whole.named_parameters(), parted.named_parameters(), strict=True):
        assert torch.equal(one, other), name
    assert len(asked) == len(list(whole.parameters()))


def test_every_weight_belongs_to_its_layers_device() -> None:
    place = layer_placement([(0, 2), (2, 11)], ["cuda:0", "cuda:1"])
    assert str(place("model.embed_tokens.weight")) == "cuda:0"
    assert str(place("model.layers.1.mlp.up_proj.weight")) == "cuda:0"
    assert str(place("model.layers.10.mlp.up_proj.weight")) == "cuda:1"
    assert str(place("lm_head.weight")) == "cuda:1"


def test_every_random_model_is_in_the_documentation() -> None:
    told = (Path(__file__).parents[4] / "docs" / "MODELS.md").read_text()
    names = [name for name in PRESETS if not name.endswith(ECHO)]
    assert [name for name in names if f"{name.removeprefix('tiny')}`" not in told] == []
