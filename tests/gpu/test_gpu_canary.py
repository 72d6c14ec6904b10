"""The canary on cards: every kind of state passes on every split, and what a restore leaves out is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from parkd.canary.exercise import examine
from parkd.state import Transfer
from tests.gpu.gpu_kit import SHAPES, SPLITS, opened, use_shapes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore:.*falling back to its reference"),
]


@pytest.fixture(autouse=True)
def _shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    use_shapes(monkeypatch)


@pytest.mark.parametrize("devices", SPLITS, ids=",".join)
@pytest.mark.parametrize("kv_format", [None, "int8"], ids=str)
@pytest.mark.parametrize("kind", list(SHAPES))
def test_state_that_comes_back_passes(
    kind: str, kv_format: str | None, devices: tuple[str, ...], tmp_path: Path
) -> None:
    guesses = 2 if kind.startswith("drafting") else 0
    engine = opened(kind, devices, tmp_path, kv_format=kv_format, draft_tokens=guesses)
    verdict = examine(engine, slab_hooks=engine.host_memory_hooks())
    assert verdict.differences == ()
    assert verdict.steps == 4
    assert verdict.took_s < 10
    engine.close()


def test_a_layer_that_a_restore_leaves_out_is_named(tmp_path: Path) -> None:
    engine = opened("dense", SPLITS[0], tmp_path)
    restore = engine.restore

    def broken(transfer: Transfer) -> None:
        arena = engine.session.arenas[0]
        [key] = [
            arena.field_view(field) for field in arena.layout.row_fields if (field.layer, field.name) == (2, "key")
        ]
        before = key.clone()
        restore(transfer)
        key.copy_(before)

    engine.restore = broken  # type: ignore[method-assign]
    verdict = examine(engine, slab_hooks=engine.host_memory_hooks())
    assert "layer 2 key" in {part for each in verdict.differences for part in each.parts}
    engine.close()
