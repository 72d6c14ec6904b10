"""The forward of one token as it is recorded for cards, run without a graph on the CPU: the device's numbers must put
every row where the host's would, and the logits be those of the forward that is not recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from parkd_engine import EngineConfig, Session, open_session
from parkd_engine.families.presets.shapes import preset_config
from parkd_engine.families.presets.weights import random_model
from parkd_engine.forward.decode_graph import LibraryDecoder

from parkd.errors import StageFailed
from tests.unit.engine.kit.breakages import MemoryFor, windows_move_in
from tests.unit.engine.kit.recordings import without_triton

PRESETS = ["tiny-qwen2", "tiny-gemma3", "tiny-qwen3.5", "tiny-lfm2", "tiny-granite-h", "tiny-qwen3-next"]
CONTEXT, READ, STEPS = 512, 100, 60


@pytest.fixture(autouse=True)
def _no_triton() -> Iterator[None]:
    with without_triton():
        yield


def opened(model: Any, kv_format: str | None) -> Session:
    """Windows with little room, so that their buffers are moved several times on the way."""
    layout = EngineConfig(
        devices=("cpu", "cpu"), context_tokens=CONTEXT, batch_tokens=64, window_slack_tokens=5, kv_format=kv_format
    )
    return open_session(model, layout)


@pytest.mark.filterwarnings("ignore:.*falling back to its reference")
@pytest.mark.parametrize("kv_format", [None, "int8"], ids=str)
@pytest.mark.parametrize("preset", PRESETS)
def test_a_recorded_forward_is_the_librarys(preset: str, kv_format: str | None) -> None:
    config = preset_config(f"random:{preset}")
    model = random_model(config, torch.float32, torch.device("cpu"))
    plain, placed = opened(model, kv_format), opened(model, kv_format)
    decoders = [LibraryDecoder(stage, cache, config) for stage, cache in zip(placed.stages, placed.caches, strict=True)]
    ids = np.random.default_rng(0).integers(0, config.vocab_size, READ + STEPS)
    for session in (plain, placed):
        session.extend(ids[:READ])
    for position in range(READ, READ + STEPS):
        expected = plain.step(int(ids[position]))
        logits = run(decoders, int(ids[position]), position)
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=0)
        placed._position += 1
    for mine, theirs in zip(placed.arenas, plain.arenas, strict=True):
        for field in mine.layout.row_fields:
            kept, expected = (arena.field_view(field)[: READ + STEPS].float() for arena in (mine, theirs))
            torch.testing.assert_close(kept, expected, atol=1.0 if field.dtype == torch.int8 else 2e-4, rtol=0)
    for mine, theirs in zip(
        placed.fixed_state.live(placed.position), plain.fixed_state.live(plain.position), strict=True
    ):
        torch.testing.assert_close(mine.view(torch.float32), theirs.view(torch.float32), atol=2e-4, rtol=1e-4)


def test_a_chunk_that_broke_between_two_layers_leaves_their_windows_together() -> None:
    """The device is told of one place for all layers of a window."""
    config = preset_config("random:tiny-gemma3")
    model = random_model(config, torch.float32, torch.device("cpu"))
    plain, placed = opened(model, None), opened(model, None)
    decoders = [LibraryDecoder(stage, cache, config) for stage, cache in zip(placed.stages, placed.caches, strict=True)]
    ids = np.random.default_rng(0).integers(0, config.vocab_size, CONTEXT)
    for session in (plain, placed):
        session.extend(ids[:130])
    # What follows does not fit the rest of the buffers: the first layer moves their ends, then the second fails.
    hook = placed.stages[0].layers[1].register_forward_pre_hook(_fail)
    with pytest.raises(StageFailed):
        placed.extend(ids[130:192])
    hook.remove()
    for session in (plain, placed):
        session.extend(ids[130:131])
    for position in range(131, 140):
        expected = plain.step(int(ids[position]))
        torch.testing.assert_close(run(decoders, int(ids[position]), position), expected, atol=2e-4, rtol=0)
        placed._position += 1


@pytest.mark.parametrize("tensors", range(4))
def test_windows_that_could_not_all_be_moved_are_where_they_were(tensors: int) -> None:
    config = preset_config("random:tiny-gemma3")
    model = random_model(config, torch.float32, torch.device("cpu"))
    plain, broken = opened(model, None), opened(model, None)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, CONTEXT)
    for session in (plain, broken):
        session.extend(ids[:130])
    memory = MemoryFor(tensors)
    with windows_move_in(memory), contextlib.suppress(StageFailed):
        broken.extend(ids[130:192])
    assert memory.left < tensors, "what follows did not fit the rest of the buffers"
    for session in (plain, broken):
        session.truncate(130)
        session.extend(ids[130:131])
    assert torch.equal(broken.step(int(ids[131])), plain.step(int(ids[131])))


def _fail(*_: Any) -> None:
    raise RuntimeError("out of memory")


def run(decoders: list[LibraryDecoder], token: int, position: int) -> torch.Tensor:
    with torch.inference_mode():
        for index, decoder in enumerate(decoders):
            decoder._cache.record(decoder._place)
            decoder.ready([token], position, position)
            if index:
                decoder.hidden.copy_(decoders[index - 1].hidden)
            decoder.run()
            decoder._cache.record(None)
    assert decoders[-1].logits is not None
    return decoders[-1].logits[0]
