"""Whole chunks through recorded layers, run without graphs on the CPU: the state that the code of the library gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from parkd_engine import EngineConfig, Session, open_session
from parkd_engine.families.presets.shapes import preset_config
from parkd_engine.families.presets.weights import random_model
from parkd_engine.forward import chunk_graphs

from tests.unit.engine.kit.recordings import Replay, record_chunks

CHUNK = 64
IDS = np.random.default_rng(0).integers(0, 500, 5 * CHUNK)

pytestmark = pytest.mark.filterwarnings("ignore:.*falling back to its reference")


def opened() -> Session:
    config = preset_config("random:tiny-qwen3.5")
    model = random_model(config, torch.float32, torch.device("cpu"))
    return open_session(model, EngineConfig(devices=("cpu", "cpu"), context_tokens=512, batch_tokens=CHUNK))


def recorded_session() -> tuple[Session, list[Replay]]:
    session = opened()
    return session, record_chunks(session, CHUNK)


def state_of(session: Session) -> list[torch.Tensor]:
    rows = [
        arena.field_view(field)[: session.position] for arena in session.arenas for field in arena.layout.row_fields
    ]
    return [state.clone() for state in (*rows, *session.fixed_state.live(session.position))]


@pytest.mark.parametrize("pieces", [(320,), (64, 256), (40, 24, 256), (10, 200, 110)], ids=str)
def test_state_is_that_of_the_librarys_forward(pieces: tuple[int, ...]) -> None:
    plain, (recorded, graphs) = opened(), recorded_session()
    for session in (plain, recorded):
        for start, count in zip(np.cumsum((0, *pieces)), pieces, strict=False):
            session.extend(IDS[start : start + count])
    # A replayed first chunk goes on from zeros: its convolution is longer, which a CPU rounds otherwise.
    error = 0.0 if _is_cut(0, pieces) else 1e-5
    for mine, theirs in zip(state_of(recorded), state_of(plain), strict=True):
        assert_close(mine, theirs, error)
    assert_close(recorded.step(7), plain.step(7), error)
    whole = sum(1 for start in range(0, len(IDS), CHUNK) if not _is_cut(start, pieces))
    assert graphs
    assert {graph.replays for graph in graphs} == {whole}


def assert_close(mine: torch.Tensor, theirs: torch.Tensor, error: float) -> None:
    """`error` is the largest relative to the largest value; fixed state is float32 in bytes."""
    mine, theirs = (each.view(torch.float32) if each.dtype == torch.uint8 else each for each in (mine, theirs))
    assert (mine - theirs).abs().max() <= error * theirs.abs().max()


def _is_cut(start: int, pieces: tuple[int, ...]) -> bool:
    return any(start < place < start + CHUNK for place in np.cumsum(pieces))


def test_a_first_chunk_does_not_go_on_from_what_was_there_before() -> None:
    session, graphs = recorded_session()
    session.extend(IDS)
    session.reset()
    session.extend(IDS[:CHUNK])
    fresh, _ = recorded_session()
    fresh.extend(IDS[:CHUNK])
    assert graphs[0].replays == len(IDS) // CHUNK + 1
    for mine, theirs in zip(state_of(session), state_of(fresh), strict=True):
        assert torch.equal(mine, theirs)


def test_layers_that_attend_are_not_recorded() -> None:
    session, graphs = recorded_session()
    layers = [layer for stage in session.stages for layer in stage.layers]
    assert len(graphs) == sum(layer.block_type == "linear_attention" for layer in layers) < len(layers)


def test_a_steered_layer_is_steered_in_whole_chunks_too() -> None:
    session, graphs = recorded_session()
    session.extend(IDS[:CHUNK])
    hook = session.stages[0].layers[0].register_forward_hook(lambda _module, _inputs, output: output + 1.0)
    session.extend(IDS[CHUNK:])
    hook.remove()
    steered, replays = state_of(session), graphs[0].replays
    plain, _ = recorded_session()
    plain.extend(IDS)
    assert replays
    assert not all(torch.equal(mine, theirs) for mine, theirs in zip(steered, state_of(plain), strict=True))


def test_what_cannot_be_recorded_stays_as_it_was(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(chunk_graphs, "recorded", refuse)
    session, plain = opened(), opened()
    for stage, cache in zip(session.stages, session.caches, strict=True):
        chunk_graphs.record_chunks(stage, cache, CHUNK)
    session.reset()
    assert "recording failed" in caplog.text
    for reading in (session, plain):
        reading.extend(IDS)
    for mine, theirs in zip(state_of(session), state_of(plain), strict=True):
        assert torch.equal(mine, theirs)
