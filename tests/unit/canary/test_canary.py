"""The canary passes where state comes back, and names what did not, for each kind of state, when that is broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from parkd_engine import EngineConfig
from parkd_engine.arenas.cache import StageCache
from parkd_engine.arenas.layout import OFFSET_FIELD, build_layout
from parkd_engine.families.multimodal import language_config
from parkd_engine.families.presets.shapes import PRESETS, preset_config
from parkd_engine.vision.chunks import PositionOffset

from parkd.canary.exercise import THE_ANSWER, Difference, Verdict, examine, sentences
from parkd.canary.remembered import PassedCanaries, canary_key
from parkd.config import ModelConfig
from parkd.engine_adapter.torch_engine.engine import TorchEngine
from parkd.state import Transfer
from tests.fakes.engine import FakeEngine

CONTEXT = 256
KINDS = {
    "tiny-qwen3": ("layer 2 key", "layer 3 value"),
    "tiny-qwen3.5": ("layer 0 conv_0", "layer 2 recurrent_0", "layer 3 key"),
    "tiny-qwen4-exp": ("layer 1 index_key", "layer 0 conv_1", "layer 0 conv_2"),
    "tiny-qwen4-exp-vl": ("layer 1 index_position",),
    "tiny-falcon-h1": ("layer 1 value", "layer 0 recurrent_0"),
    "tiny-llama int8": ("layer 2 key", "layer 1 scale"),
    "tiny-gemma3": ("layer 1 window_key", "layer 3 window_value"),
    "tiny-deepseek-v3": ("layer 1 latent", "layer 2 rotary_key"),
    "tiny-qwen3.5-vl": ("layer 1 recurrent_0", "position offset of images"),
    "tiny-qwen3-vl": ("layer 1 key", "position offset of images"),
    "tiny-qwen3.5-mtp": ("draft head key", "draft head hidden"),
}
"""Model -> parts of its state, of every kind."""


Opened = Callable[[str], TorchEngine]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    """Engines, each loaded once: a canary leaves its engine empty, also a broken one."""
    folder = tmp_path_factory.mktemp("canary")

    @cache
    def load(name: str) -> TorchEngine:
        model, _, kv_format = name.partition(" ")
        guesses = 2 if model.endswith("-mtp") else 0
        layout = EngineConfig(
            devices=("cpu", "cpu"), context_tokens=CONTEXT, draft_tokens=guesses, kv_format=kv_format or None
        )
        return TorchEngine.load(ModelConfig(f"random:{model}", folder, layout=layout))

    return load


@contextmanager
def part_left_out(engine: TorchEngine, part: str) -> Iterator[None]:
    """Inside, restores leave this part of the state as it was before."""
    restore = engine.restore

    def broken(transfer: Transfer) -> None:
        held = [tensor.clone() for tensor in views(engine, part)]
        restore(transfer)
        for tensor, before in zip(views(engine, part), held, strict=True):
            tensor.copy_(before)

    engine.restore = broken  # type: ignore[method-assign]
    try:
        yield
    finally:
        engine.restore = restore  # type: ignore[method-assign]


def views(engine: TorchEngine, part: str) -> list[torch.Tensor]:
    """The memory of a part, over the whole context."""
    session, found = engine.session, []
    place, field = part.rsplit(" ", 1)
    layer = session.stages[0].num_layers if place == "draft head" else int(place.split()[1])
    for arena in session.arenas:
        found += [
            arena.field_view(each) for each in arena.layout.row_fields if (each.layer, each.name) == (layer, field)
        ]
        found += [
            arena.fixed_view(each)
            for each in arena.layout.fixed_fields
            if (each.layer, each.name) == (layer, field) and not field.startswith("window")
        ]
        if field.startswith("window") and layer in arena.windows:
            found.append(arena.windows[layer][["window_key", "window_value"].index(field)])
    assert found, part
    return found


def named(verdict: Verdict) -> set[str]:
    return {part for each in verdict.differences for part in each.parts}


@pytest.mark.parametrize("name", [*KINDS, "tiny-gpt-oss", "tiny-nemotron-h"])
def test_state_that_comes_back_passes(name: str, opened: Opened) -> None:
    engine = opened(name)
    verdict = examine(engine)
    assert verdict.differences == ()
    # Of a window that was left behind, no earlier position is held.
    assert verdict.steps == 4
    assert engine.position == 0
    assert sentences(verdict)[0].startswith("state came back bit for bit in 4 trials")


@pytest.mark.parametrize(
    ("name", "part"),
    [(name, part) for name, parts in KINDS.items() for part in parts if part != "position offset of images"],
)
def test_a_part_that_is_left_out_is_named(name: str, part: str, opened: Opened) -> None:
    engine = opened(name)
    with part_left_out(engine, part):
        verdict = examine(engine)
    assert part in named(verdict)
    assert named(verdict) <= {part, THE_ANSWER}
    assert any(part in line for line in sentences(verdict))


def test_every_kind_of_state_is_left_out_in_some_trial() -> None:
    """Of all families: who adds a field adds a canary of it."""
    fields: set[str] = set()
    for name in PRESETS:
        config = preset_config(f"random:{name}")
        layers = int(language_config(config).num_hidden_layers)
        for kv_dtype in (torch.float32, torch.int8):
            [layout] = build_layout(config, [(0, layers)], kv_dtype, torch.float32)
            fields |= {field.name for field in (*layout.row_fields, *layout.fixed_fields)}
    left_out = {part.rsplit(" ", 1)[1] for parts in KINDS.values() for part in parts}
    assert fields <= left_out | {OFFSET_FIELD}  # Which has a test of its own.


def test_a_window_off_by_one_is_named(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = opened("tiny-gemma3")
    unpack = StageCache.unpack

    def late(cache: StageCache, position: int) -> None:
        unpack(cache, position)
        for _, windows in cache.live_windows(position):
            for live in windows:
                live.copy_(live.roll(1, 0))

    monkeypatch.setattr(StageCache, "unpack", late)
    windows = {f"layer {layer} window_{half}" for layer in (0, 1, 3) for half in ("key", "value")}
    assert named(examine(engine)) == windows | {THE_ANSWER}


@pytest.mark.parametrize("name", ["tiny-qwen3.5-vl", "tiny-qwen3-vl"])
def test_a_lost_position_offset_is_named(name: str, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = opened(name)
    monkeypatch.setattr(PositionOffset, "reload", lambda _: None)
    assert "position offset of images" in named(examine(engine))


def test_state_that_no_part_tells_of_shows_in_the_answer(opened: Opened) -> None:
    """A model that counts how often it ran, beside its cache."""
    engine = opened("tiny-qwen3")
    calls = [0]

    def drift(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return output * (1.0 + 1e-3 * calls[0])

    handle = engine.session.stages[-1].inner.norm.register_forward_hook(drift)  # type: ignore[union-attr, operator]
    verdict = examine(engine)
    handle.remove()
    assert named(verdict) == {THE_ANSWER}
    assert "no part of the state that the engine names did" in sentences(verdict)[0]


def test_an_index_that_a_restore_leaves_stale_shows_in_the_answer(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block keys are computed from rows: they are no part of the state, and have to be forgotten with it."""
    engine = opened("tiny-qwen4-exp")
    restore = engine.restore

    def forgetful(transfer: Transfer) -> None:
        with monkeypatch.context() as broken:
            broken.setattr(StageCache, "rows_changed_from", lambda *_: None)
            restore(transfer)

    monkeypatch.setattr(engine, "restore", forgetful)
    assert named(examine(engine)) == {THE_ANSWER}


def test_an_error_of_the_engine_is_a_difference(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = opened("tiny-qwen3")

    def refuse(_transfer: Transfer) -> None:
        raise ValueError("no room for it")

    monkeypatch.setattr(engine, "restore", refuse)
    verdict = examine(engine)
    assert Difference("restored at its end", ("an error: no room for it",)) in verdict.differences


def test_a_slow_model_gets_short_conversations(opened: Opened) -> None:
    engine = opened("tiny-qwen3")
    now = iter(range(10_000))
    assert examine(engine, lambda: float(next(now))).tokens == 12


def test_a_short_context_is_told() -> None:
    verdict = examine(FakeEngine(context_tokens=20))
    assert not verdict.has_failed
    assert "too short" in sentences(verdict)[0]


CHANGES: dict[str, Callable[[Any], Any]] = {
    "weights": lambda info: replace(info, fingerprint=b"other"),
    "devices": lambda info: replace(info, devices=("cpu", "cuda:0")),
    "build": lambda info: replace(info, build="another"),
}


def test_a_passed_canary_is_remembered_for_the_same_model_devices_and_build(opened: Opened, tmp_path: Path) -> None:
    info = opened("tiny-qwen3").info
    passed, key = PassedCanaries(tmp_path), canary_key(info)
    assert not passed.has(key)
    passed.note(key, info, Verdict(steps=4, tokens=300))
    assert PassedCanaries(tmp_path).has(canary_key(info))
    for change in CHANGES.values():
        assert not passed.has(canary_key(change(info)))
