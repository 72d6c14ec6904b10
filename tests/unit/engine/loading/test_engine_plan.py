"""A layout told from the configuration alone is the one that loading the model gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from parkd_engine.config import EngineConfig
from parkd_engine.plan import plan_model

from tests.unit.engine.kit.core_models import tiny_session
from tests.unit.engine.kit.hybrid_models import HYBRIDS, hybrid_config, hybrid_model


@pytest.mark.parametrize("kv_dtype", [None, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("family", list(HYBRIDS))
def test_the_layout_is_that_of_the_loaded_model(family: str, kv_dtype: torch.dtype | None, tmp_path: Path) -> None:
    config = hybrid_config(family)
    config.architectures = [type(hybrid_model(family)).__name__]
    config.save_pretrained(tmp_path)
    layout = EngineConfig(devices=("cpu", "cpu"), kv_dtype=kv_dtype, draft_tokens=2)
    planned = plan_model(str(tmp_path), layout)
    session = tiny_session(2, hybrid_model(family), kv_dtype=kv_dtype)
    assert planned.stages == tuple(arena.layout for arena in session.arenas)
