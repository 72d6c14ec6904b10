"""Where layers are cut when devices have different room: by weights and state together, without any device."""

from __future__ import annotations

import pytest
import torch
from parkd_engine import EngineConfig, InvalidSplit
from parkd_engine.balance import LayerNeed, ModelNeed, balanced_split, choose_split, model_need
from parkd_engine.families.presets.shapes import preset_config

GIB = 1 << 30


def need(layers: int, *, weights: int = 100, row: int = 1, ends: int = 0) -> ModelNeed:
    return ModelNeed((LayerNeed(weights, row),) * layers, ends, ends)


def test_equal_devices_share_equal_layers_equally() -> None:
    assert balanced_split(need(36, ends=300), [100_000, 100_000], 100) == (18,)
    assert balanced_split(need(36), [100_000] * 4, 100) == (9, 18, 27)


def test_a_device_with_more_room_gets_more() -> None:
    assert balanced_split(need(30), [20_000, 10_000], 100) == (20,)
    assert balanced_split(need(30), [10_000, 20_000], 100) == (10,)


def test_rows_count_as_well_as_weights() -> None:
    """Of six layers the last two hold all the rows: at a long context they weigh as much as the others together."""
    layers = (*[LayerNeed(100, 0)] * 4, *[LayerNeed(100, 1)] * 2)
    model = ModelNeed(layers, 0, 0)
    assert balanced_split(model, [10_000, 10_000], 0) == (3,)
    assert balanced_split(model, [10_000, 10_000], 200) == (4,)
    assert balanced_split(model, [10_000, 10_000], 1000) == (5,)


def test_the_longest_context_that_fits_comes_first() -> None:
    """Cut after the second layer the fuller device is less full, but then no token fits beside the first two."""
    layers = (LayerNeed(500, 0), LayerNeed(490, 10), LayerNeed(100, 10), LayerNeed(100, 10))
    assert balanced_split(ModelNeed(layers, 0, 0), [1000, 1000], 100) == (1,)
    assert balanced_split(ModelNeed(layers, 0, 0), [10_000, 10_000], 1) == (1,)
    assert balanced_split(ModelNeed((*layers[:2], *[LayerNeed(300, 0)] * 2), 0, 0), [1000, 1000], 1) == (2,)


def test_layers_that_share_are_not_parted() -> None:
    assert balanced_split(need(8), [1000, 1000], 1, forbidden=range(3, 6)) in {(2,), (6,)}
    with pytest.raises(InvalidSplit, match="stay together"):
        balanced_split(need(3), [1000, 1000], 1, forbidden=range(1, 3))


def test_what_a_model_needs_is_counted_without_its_weights() -> None:
    config = preset_config("random:qwen3.5-27b")
    counted = model_need(config, torch.bfloat16, EngineConfig(("cuda:0", "cuda:1"), ctx_checkpoints=4))
    weights = sum(layer.constant_bytes for layer in counted.layers) + counted.first_bytes + counted.last_bytes
    fixed = 5 * 48 * (48 * 128 * 128 * 4 + 10240 * 4 * 2)
    assert 50 * GIB < weights - fixed < 51 * GIB
    assert sum(layer.row_bytes for layer in counted.layers) == 16 * 2 * 4 * 256 * 2
    assert counted.first_bytes == counted.last_bytes == 248_320 * 5120 * 2


def test_the_memory_that_is_free_decides_on_cards_only() -> None:
    config = preset_config("random:qwen3-8b")
    free = {"cuda:0": 30 * GIB, "cuda:1": 60 * GIB, "cpu": 1}
    layout = EngineConfig(("cuda:0", "cuda:1"), context_tokens=40_000)
    (_, first), (_, last) = choose_split(config, torch.bfloat16, layout, free.__getitem__)
    assert 10 <= first <= 13
    assert last == 36
    asked = EngineConfig(("cuda:0", "cuda:1"), layer_split=(30,))
    assert choose_split(config, torch.bfloat16, asked, free.__getitem__) == ((0, 30), (30, 36))
    on_cpu = EngineConfig(("cpu", "cpu"))
    assert choose_split(config, torch.bfloat16, on_cpu, free.__getitem__) == ((0, 18), (18, 36))
    with pytest.raises(InvalidSplit, match="36 layers cannot make 40 stages"):
        choose_split(config, torch.bfloat16, EngineConfig(("cuda:0",) * 40), free.__getitem__)
