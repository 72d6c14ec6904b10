"""What a decoded token costs behind a long conversation in latent attention: with its projections absorbed, and with
the keys and values of all earlier tokens computed from their latents.

    python -m benchmarks.latents [--repeats 20]

One attention layer with the sizes of DeepSeek-V2-Lite, fp32, in one process, both ways in turns. First, both are
checked to give the same output.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from parkd_engine.forward.attention import arena_attention
from parkd_engine.forward.latents import LatentStates
from transformers import DeepseekV2Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Attention

from benchmarks.common import Result, Table, finish, machine, progress

CONTEXTS = (1_024, 2_048, 4_096, 8_192)
SHAPE: dict[str, Any] = {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_hidden_layers": 1,
}
TOLERANCE = 1e-3


def both(context: int, repeats: int) -> tuple[float, float]:
    """Milliseconds of a token's attention, absorbed and over keys and values, both medians. Raises AssertionError if
    they differ by more than `TOLERANCE`."""
    torch.manual_seed(context)
    module = DeepseekV2Attention(DeepseekV2Config(**SHAPE), 0).eval()
    expand = getattr(type(module).expand_kv, "__wrapped__", type(module).expand_kv)
    latents, rotary = torch.randn(1, 1, context, 512), torch.randn(1, 1, context, 64)
    query = torch.randn(1, 16, 1, 192)
    states = LatentStates(module, latents, rotary, expand)

    def absorbed() -> torch.Tensor:
        return arena_attention(module, query, states, states, None, scaling=module.scaling)[0]

    def over_keys() -> torch.Tensor:
        keys, values = expand(module, latents, rotary)
        return arena_attention(module, query, keys, values, None, scaling=module.scaling)[0]

    torch.testing.assert_close(absorbed(), over_keys(), atol=TOLERANCE, rtol=0)
    taken: dict[Any, list[float]] = {absorbed: [], over_keys: []}
    for _ in range(repeats):
        for way, times in taken.items():
            started = time.perf_counter()
            way()
            times.append(1000 * (time.perf_counter() - started))
    return statistics.median(taken[absorbed]), statistics.median(taken[over_keys])


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    repeats = parser.parse_args().repeats
    started, measured = machine(), {}
    for context in CONTEXTS:
        progress(f"context of {context:,} tokens")
        measured[context] = both(context, repeats)
    rows = tuple(
        (f"{context:,}", f"{one:.2f}", f"{other:.2f}", f"{other / one:.0f}x")
        for context, (one, other) in measured.items()
    )
    columns = ("context", "absorbed, ms a token", "keys and values computed, ms a token", "")
    result = Result(
        "latents",
        "Decoding through latent attention",
        "One attention layer with the sizes of DeepSeek-V2-Lite (16 heads, latents of 512, rotary keys of 64), fp32: "
        "what one token takes from its query to the sum of values.",
        [Table("Attention of one token, median", columns, rows)],
        [],
        [f"Before the measurement, both were checked to give the same output to {TOLERANCE:g}."],
        {"ms": {str(context): each for context, each in measured.items()}},
    )
    finish(result, started)


if __name__ == "__main__":
    main()
