"""Where layers are cut when devices have different room: by weights and state together, without any device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from parkd_engine import EngineConfig
from parkd_engine.account import Part, StageMemory
from parkd_engine.balance import balanced_split, choose_split
from parkd_engine.families.presets.shapes import preset_config

from parkd.errors import InvalidSplit

GIB = 1 << 30


def stages(layers: Sequence[tuple[int, int]], ends: int = 0) -> Callable[[int, int, int], StageMemory]:
    """Stages of layers that take (bytes, bytes a token) each; the first and the last layer `ends` more."""

    def stage(index: int, first: int, end: int) -> StageMemory:
        constant = sum(weight for weight, _ in layers[first:end]) + ends * ((first == 0) + (end == len(layers)))
        rows = sum(row for _, row in layers[first:end])
        return StageMemory(f"cuda:{index}", first, end, (Part("weights", constant), Part("rows", 0, rows)))

    return stage


def split(
    layers: Sequence[tuple[int, int]], free: Sequence[int], tokens: int, *, ends: int = 0, forbidden: range = range(0)
) -> tuple[int, ...]:
    return balanced_split(stages(layers, ends), len(layers), free, tokens, forbidden)


def test_equal_devices_share_equal_layers_equally() -> None:
    assert split([(100, 1)] * 36, [100_000, 100_000], 100, ends=300) == (18,)
    assert split([(100, 1)] * 36, [100_000] * 4, 100) == (9, 18, 27)


def test_a_device_with_more_room_gets_more() -> None:
    assert split([(100, 1)] * 30, [20_000, 10_000], 100) == (20,)
    assert split([(100, 1)] * 30, [10_000, 20_000], 100) == (10,)


def test_rows_count_as_well_as_weights() -> None:
    """Of six layers the last two hold all the rows: at a long context they weigh as much as the others together."""
    layers = [(100, 0)] * 4 + [(100, 1)] * 2
    assert split(layers, [10_000, 10_000], 0) == (3,)
    assert split(layers, [10_000, 10_000], 200) == (4,)
    assert split(layers, [10_000, 10_000], 1000) == (5,)


def test_the_longest_context_that_fits_comes_first() -> None:
    """Cut after the second layer the fuller device is less full, but then no token fits beside the first two."""
    layers = [(500, 0), (490, 10), (100, 10), (100, 10)]
    assert split(layers, [1000, 1000], 100) == (1,)
    assert split(layers, [10_000, 10_000], 1) == (1,)
    assert split([*layers[:2], *[(300, 0)] * 2], [1000, 1000], 1) == (2,)


def test_layers_that_share_are_not_parted() -> None:
    assert split([(100, 1)] * 8, [1000, 1000], 1, forbidden=range(3, 6)) in {(2,), (6,)}
    with pytest.raises(InvalidSplit, match="stay together"):
        split([(100, 1)] * 3, [1000, 1000], 1, forbidden=range(1, 3))


def test_a_device_without_room_gets_as_little_as_it_can() -> None:
    """What other programs hold can leave less than the margin, even less than nothing."""
    assert split([(100, 1)] * 8, [10_000, 0], 10) == (7,)
    assert split([(100, 1)] * 8, [-50, 10_000], 10) == (1,)


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
