"""What the tests on cards share: small shapes of every kind of state, the splits of this machine, engines of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from parkd_engine.families.presets import shapes
from parkd_engine.families.presets.shapes import TINY_VOCABULARY, Preset

from benchmarks.gpu.lane import Ids, load, random_ids
from parkd.engine_adapter.torch_engine.engine import TorchEngine

MIB = 1 << 20
CONTEXT = 65_536
CARDS = torch.cuda.device_count()
SPLITS = [("cuda:0",), ("cuda:0", "cuda:1") if CARDS > 1 else ("cuda:0", "cuda:0")]
SPLIT_IDS = [",".join(devices) for devices in SPLITS]
COMMON: Mapping[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": TINY_VOCABULARY,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
}
_DELTA_NET: Mapping[str, Any] = {
    **COMMON,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
_HYBRID: Mapping[str, Any] = {
    **_DELTA_NET,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
}
SHAPES: Mapping[str, Preset] = {
    "dense": Preset("qwen3", COMMON),
    "sliding": Preset(
        "gemma3_text",
        {
            **COMMON,
            "query_pre_attn_scalar": 64,
            "sliding_window": 512,
            "layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 3, "full_attention"],
        },
    ),
    "hybrid": Preset("qwen3_5_text", _HYBRID),
    "experts": Preset(
        "qwen3_moe",
        {**COMMON, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True},
    ),
    "sinks": Preset(
        "gpt_oss",
        {
            **COMMON,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
        },
    ),
    "drafting-echo": Preset("qwen3_5_text", {**_HYBRID, "num_mtp_layers": 1, "mtp_layer_types": ["full_attention"]}),
    "indexed": Preset(
        "qwen4_exp_text",
        {
            **_DELTA_NET,
            "layer_types": ["linear_attention", "linear_attention", "indexed_attention"] * 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 128,
            "hc_count": 2,
            "hc_lowrank": 32,
            "ple_layer_ids": [1, 5],
            "ple_embed_dim": 64,
            "heads_per_ngram": 4,
            "ngram_vocab_size_base": 500,
            "indexer_n_heads": 8,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 64,
            "indexer_budget": 256,
            "indexer_compress_ratio": 4,
        },
    ),
}
"""Name -> shape; `random:NAME` once `use_shapes` has run."""


def use_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "PRESETS", {**shapes.PRESETS, **SHAPES})


def opened(kind: str, devices: tuple[str, ...], cache_dir: Path, **layout: Any) -> TorchEngine:
    return load(f"random:{kind}", devices, cache_dir, **{"context_tokens": 32_768, "batch_tokens": 2048, **layout})


def ids(count: int, seed: int) -> Ids:
    return random_ids(count, TINY_VOCABULARY, seed)


def state_of(engine: TorchEngine) -> list[torch.Tensor]:
    """Rows of every stage at the present position, and fixed state if the model has any."""
    session = engine.session
    state = [arena.rows[: engine.position].clone() for arena in session.arenas]
    if session.fixed_state.exists:
        state += [fixed.clone() for fixed in session.fixed_state.live(engine.position)]
    return state


def assert_same(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert len(mine) == len(theirs)
    for one, other in zip(mine, theirs, strict=True):
        assert torch.equal(one, other)
