"""A layout told from the configuration alone is the one that loading the model gives."""

from __future__ import annotations

from pathlib import Path

import pytest
from parkd_engine.families.presets.shapes import preset_config
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


def test_a_sparse_model_as_wide_as_its_library_has_it_is_planned_with_experts_in_main_memory(tmp_path: Path) -> None:
    """48 layers of the published state, with the width and the 512 experts of the library's own configuration."""
    config = preset_config("random:qwen4-exp-small")
    width, experts, inner = 2048, 512, 512
    config.hidden_size, config.num_experts, config.num_experts_per_tok = width, experts, 10
    config.moe_intermediate_size = config.shared_expert_intermediate_size = inner
    config.ngram_vocab_size_base = 20_000_000
    config.architectures = ["Qwen4ExpForCausalLM"]
    config.save_pretrained(tmp_path)
    layout = EngineConfig(devices=("cuda:0",), cpu_experts=48, context_tokens=32768)
    planned = plan_model(str(tmp_path), layout)
    assert planned.host_layers == tuple(range(48))
    assert planned.host_bytes == 48 * experts * 3 * width * inner * 2
    assert sum(stage.row_bytes for stage in planned.stages) == 27_664
    linear = 36 * (48 * 128 * 128 * 4 + 10_240 * 3 * 2)
    assert 0 < sum(stage.fixed_bytes for stage in planned.stages) - linear < 1 << 20, "the rest is of n-grams"
    [stage] = planned.memory
    everything = plan_model(str(tmp_path), EngineConfig(devices=("cuda:0",), context_tokens=32768)).memory[0]
    assert everything.lines(0)["weights"] - stage.lines(0)["weights"] == planned.host_bytes
