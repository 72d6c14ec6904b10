"""A layout told from the configuration alone is the one that loading the model gives."""

from __future__ import annotations

from pathlib import Path

import pytest
from parkd_engine.plan import plan_model

from parkd.state import EngineConfig
from tests.unit.engine.kit.core_models import tiny_session
from tests.unit.engine.kit.hybrid_models import HYBRIDS, hybrid_config, hybrid_model


@pytest.mark.parametrize("kv_format", [None, "bf16", "int8"], ids=str)
@pytest.mark.parametrize("family", list(HYBRIDS))
def test_the_layout_is_that_of_the_loaded_model(family: str, kv_format: str | None, tmp_path: Path) -> None:
    config = hybrid_config(family)
    config.architectures = [type(hybrid_model(family)).__name__]
    config.save_pretrained(tmp_path)
    layout = EngineConfig(devices=("cpu", "cpu"), kv_format=kv_format, draft_tokens=2)
    planned = plan_model(str(tmp_path), layout)
    session = tiny_session(2, hybrid_model(family), kv_format=kv_format)
    assert planned.stages == tuple(arena.layout for arena in session.arenas)
