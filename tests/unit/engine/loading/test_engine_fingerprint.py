"""What changes the key and what must not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parkd_engine import EngineConfig, open_session
from parkd_engine.families.presets.shapes import preset_config
from parkd_engine.loading.fingerprint import FINGERPRINT_BYTES, fingerprint, kernels_of

from tests.unit.engine.kit.hybrid_models import hybrid_model
from tests.unit.engine.kit.quantised_models import quantised_model

WEIGHTS = b"w" * 16


def of(config: dict[str, Any], weights: bytes = WEIGHTS, dtype: torch.dtype = torch.float32) -> bytes:
    return fingerprint(weights, config, dtype, torch.float32)


def plain() -> dict[str, Any]:
    config: dict[str, Any] = preset_config("random:tiny-qwen3").to_dict()
    return config


def test_it_is_stable_and_of_fixed_length() -> None:
    assert of(plain()) == of(dict(reversed(plain().items())))
    assert len(of(plain())) == FINGERPRINT_BYTES


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("_name_or_path", "/elsewhere"),
        ("transformers_version", "9"),
        ("dtype", "bfloat16"),
        ("use_cache", False),
        ("eos_token_id", 9),
    ],
)
def test_what_state_does_not_feel_is_left_out(name: str, value: object) -> None:
    assert of({**plain(), name: value}) == of(plain())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_hidden_layers", 5),
        ("rms_norm_eps", 1e-5),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 5.0}),
        ("something_new", 1),
    ],
)
def test_what_shapes_state_is_in(name: str, value: object) -> None:
    assert of({**plain(), name: value}) != of(plain())


def test_weights_and_dtypes_are_in() -> None:
    kinds = {
        of(plain()),
        of(plain(), weights=b"v" * 16),
        of(plain(), dtype=torch.bfloat16),
        fingerprint(WEIGHTS, plain(), torch.float32, torch.bfloat16),
    }
    assert len(kinds) == 4


def test_kernels_that_round_otherwise_are_in() -> None:
    kinds = {
        fingerprint(WEIGHTS, plain(), torch.float32, torch.float32, kernels)
        for kernels in ((), ("one 1",), ("one 2",), ("one 1", "two 1"))
    }
    assert len(kinds) == 4
    assert of(plain()) in kinds


def test_a_cpu_has_the_usual_kernels() -> None:
    model = quantised_model("qwen3", "int8")
    session = open_session(model, EngineConfig(("cpu", "cpu"), context_tokens=64))
    assert kernels_of(session.stages, model.config) == ()


def test_what_reads_prompts_is_named_once_for_all_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each head size that a layer has is asked for; layers with windows go through another kernel."""
    asked: list[int] = []

    def named(_device: torch.device, _dtype: torch.dtype, dim: int) -> str:
        asked.append(dim)
        return "reader 1"

    monkeypatch.setattr("parkd_engine.loading.fingerprint.kernel_name", named)
    model = quantised_model("qwen3", "int8")
    session = open_session(model, EngineConfig(("cpu", "cpu"), context_tokens=64))
    assert kernels_of(session.stages, model.config) == ("reader 1",)
    assert asked == [model.config.head_dim] * 2
    sliding = hybrid_model("gemma3")
    other = open_session(sliding, EngineConfig(("cpu",), context_tokens=64))
    asked.clear()
    kinds = sliding.config.layer_types
    assert kernels_of(other.stages, sliding.config) == (("reader 1",) if "full_attention" in kinds else ())
    assert len(asked) == int("full_attention" in kinds)
