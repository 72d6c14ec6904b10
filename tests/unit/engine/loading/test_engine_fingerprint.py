"""What changes the key and what must not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parkd_engine.families.presets.shapes import preset_config
from parkd_engine.loading.fingerprint import FINGERPRINT_BYTES, fingerprint

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
