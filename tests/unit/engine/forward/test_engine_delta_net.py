"""Gated delta nets where kernels that only cards can run are installed: a stage on a CPU computes by the reference."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from parkd_engine.forward.delta_net import FUNCTIONS, choose_by_device
from transformers.models.qwen3_5 import modeling_qwen3_5 as library

from tests.unit.engine.kit.hybrid_models import hybrid_model


@pytest.mark.filterwarnings("ignore:.*falling back to its reference")
def test_a_cpu_never_meets_the_kernels_of_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hybrid_model("qwen3.5")
    ids = torch.arange(40)[None]
    with torch.inference_mode():
        expected = model(ids).logits
    for name in FUNCTIONS:
        reference = getattr(library, name)
        while hasattr(reference, "__wrapped__"):
            reference = reference.__wrapped__
        monkeypatch.setattr(library, name, for_cards(reference))
    with torch.inference_mode(), pytest.raises(RuntimeError, match="cards only"):
        model(ids)
    for _ in range(2):
        choose_by_device(model.model.layers)
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, expected)
    meta = torch.empty(1, device="meta")
    with pytest.raises(RuntimeError, match="cards only"):
        library.causal_conv1d_fn(meta)


def for_cards(reference: Any) -> Any:
    """What the library makes of a function for which a package has a kernel."""

    @functools.wraps(reference)
    def kernel(*_: Any, **__: Any) -> Any:
        raise RuntimeError("cards only")

    return kernel
