"""The perplexity benchmark's sums, against the library's own loss."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from parkd_engine.arenas.kv_format import KV_FORMATS
from parkd_engine.forward.stages import place
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.perplexity import FORMATS, Reader, Tally, compare_chunks, read_window


@pytest.fixture
def tiny() -> tuple[SimpleNamespace, LlamaForCausalLM]:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    model = LlamaForCausalLM(config).eval()
    return SimpleNamespace(config=config), model


def test_the_loss_is_the_librarys(tiny: tuple[SimpleNamespace, LlamaForCausalLM]) -> None:
    loaded, model = tiny
    window = torch.randint(0, 97, (101,), generator=torch.Generator().manual_seed(2))
    (stage,) = place(model, [(0, 2)], ["cpu"])
    readers = {name: Reader(loaded, stage, KV_FORMATS[name], 100) for name in FORMATS}
    tallies = {name: Tally() for name in FORMATS}
    with torch.inference_mode():
        read_window(readers, tallies, window, 32)
        logits = model(window[None, :-1]).logits[0]
        compare_chunks(loaded, stage, tallies, window, 32)
    expected = float(torch.nn.functional.cross_entropy(logits, window[1:]))
    full, codes = tallies["f32"], tallies["int8"]
    assert full.positions == codes.positions == 100
    assert math.isclose(full.loss / 100, expected, rel_tol=1e-5)
    assert full.window_losses == [full.loss / 100]
    assert (full.divergence, full.same_top) == (0.0, 100)
    assert 0 < codes.divergence / 100 < 1e-3
    assert codes.loss != full.loss
    assert full.chunk_difference < 1e-5
    assert readers["int8"].row_bytes < readers["f16"].row_bytes < readers["f32"].row_bytes
