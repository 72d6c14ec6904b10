"""The speed of the index for sparse attention, compared with the library's own.

    python -m benchmarks.indexer [--repeats 5]

Measured are the index alone, with the published shape, for queries at the end of long contexts; and whole prompts of a
tiny model, with the library and its own cache and with the engine. First, both are checked to select the same keys.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from parkd_engine import EngineConfig, open_session
from parkd_engine.arenas.indexed_layers import IndexPositions, LayerIndex
from parkd_engine.families.presets.shapes import preset_config
from parkd_engine.families.presets.weights import random_model
from parkd_engine.forward.indexer import BlockIndexer, CausalOrder
from transformers import Cache, DynamicCache, Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextQSAIndexer, Qwen4ExpTextRotaryEmbedding

from benchmarks.common import Goal, Result, Table, finish, machine, progress

CONTEXTS = (4_096, 16_384, 32_768)
REFERENCE_QUERIES, QUERIES = 16, 512
PROMPT, LONG_PROMPT, CHUNK = 2_048, 32_768, 512
MODEL = "random:tiny-qwen4-exp"
GOAL_LONG_S = 60.0
SHAPE = {
    "hidden_size": 2560,
    "head_dim": 256,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
    "num_hidden_layers": 1,
    "layer_types": ["indexed_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}


class Kept:
    """A cache with the indexer keys of a context, to which the following chunk's keys can be added repeatedly."""

    def __init__(self, keys: torch.Tensor, count: int) -> None:
        self.keys, self.start = keys, len(keys) - count

    def update_indexer(self, states: torch.Tensor, _layer: int) -> torch.Tensor:
        self.keys[self.start :] = states[0]
        return self.keys.unsqueeze(0)


class KeptBlocks(Kept):
    """The same, with the context's blocks computed once, as in a timeline, and the chunk's each time."""

    def __init__(self, keys: torch.Tensor, count: int, block_tokens: int) -> None:
        super().__init__(keys, count)
        positions = torch.arange(len(keys), dtype=torch.int32).unsqueeze(1).expand(-1, 3)
        blocks = torch.empty(len(keys) // block_tokens, keys.shape[1])
        self.index = LayerIndex(keys, blocks, IndexPositions(positions), block_tokens)

    def index_blocks(self, _layer: int, count: int, make: Any) -> torch.Tensor:
        self.index.forget_from(self.start)
        return self.index.blocks(count, make)


def taken_s(run: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each run, except for the first, which is a warm-up."""
    taken = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        run()
        taken.append(time.perf_counter() - started)
    return taken[1:]


def alone(context: int, repeats: int) -> dict[str, float]:
    """Milliseconds per query of both. Raises AssertionError if they select different keys."""
    torch.manual_seed(context)
    config = Qwen4ExpTextConfig(**SHAPE)
    original = Qwen4ExpTextQSAIndexer(config, 0)
    rotary = Qwen4ExpTextRotaryEmbedding(config)
    mine = BlockIndexer(original, rotary)
    keys, states = torch.randn(context, 128), torch.randn(1, QUERIES, 2560)
    tables = rotary(states, torch.arange(context).expand(3, 1, -1))
    last = tuple(table[:, -QUERIES:] for table in tables)
    few = REFERENCE_QUERIES
    causal = torch.ones(few, context, dtype=torch.bool).tril(context - few)[None, None]
    blocks = KeptBlocks(keys.clone(), QUERIES, 4)
    chosen = mine(states, last, CausalOrder(), blocks)
    # The library's index gets the keys of the whole chunk as its past, and the chunk's last queries.
    theirs = Kept(blocks.keys.clone(), few)
    expected = original(states[:, -few:], tables, causal, theirs)[0, 0]
    assert torch.equal(chosen.mask(QUERIES - few, QUERIES), expected), "they choose different keys"
    reference = taken_s(lambda: original(states[:, -few:], tables, causal, theirs), repeats)
    ours = taken_s(lambda: mine(states, last, CausalOrder(), blocks), repeats)
    one = taken_s(
        lambda: mine(states[:, -1:], tuple(t[:, -1:] for t in last), CausalOrder(), KeptBlocksOfOne(blocks)), repeats
    )
    return {
        "reference": 1000 * statistics.median(reference) / few,
        "chunk": 1000 * statistics.median(ours) / QUERIES,
        "single": 1000 * statistics.median(one),
    }


class KeptBlocksOfOne:
    """A view of kept blocks in which only the last token is new."""

    def __init__(self, blocks: KeptBlocks) -> None:
        self._blocks = blocks

    def update_indexer(self, states: torch.Tensor, _layer: int) -> torch.Tensor:
        self._blocks.keys[-1:] = states[0]
        return self._blocks.keys.unsqueeze(0)

    def index_blocks(self, _layer: int, count: int, make: Any) -> torch.Tensor:
        self._blocks.index.forget_from(len(self._blocks.keys) - 1)
        return self._blocks.index.blocks(count, make)


def prompts() -> dict[str, float]:
    """Seconds to read prompts of the tiny model, with the library and with the engine."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 500, (LONG_PROMPT,), generator=generator)
    model = random_model(preset_config(MODEL), torch.float32, torch.device("cpu"))
    seconds = {}

    def through_library() -> None:
        cache: Cache = DynamicCache(config=model.config)
        for start in range(0, PROMPT, CHUNK):
            model(ids[None, start : start + CHUNK], cache=cache, use_cache=True, logits_to_keep=1)

    started = time.perf_counter()
    through_library()
    seconds["library"] = time.perf_counter() - started
    session = open_session(model, EngineConfig(context_tokens=LONG_PROMPT, batch_tokens=CHUNK))
    for name, count in (("engine", PROMPT), ("engine, long", LONG_PROMPT)):
        session.reset()
        session.extend(ids[:CHUNK].numpy())
        session.reset()
        started = time.perf_counter()
        session.extend(ids[:count].numpy())
        seconds[name] = time.perf_counter() - started
    return seconds


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    started, measured = machine(), {}
    for context in CONTEXTS:
        progress(f"context of {context:,} tokens")
        measured[context] = alone(context, repeats)
    progress("whole prompts")
    seconds = prompts()
    rows = tuple(
        (
            f"{context:,}",
            f"{each['reference']:.2f}",
            f"{each['chunk']:.3f}",
            f"{each['reference'] / each['chunk']:.0f}x",
            f"{each['single']:.2f}",
        )
        for context, each in measured.items()
    )
    columns = ("context", "library, ms a query", f"engine, ms a query of {QUERIES}", "", "engine, one query, ms")
    read = tuple(
        (who, f"{count:,}", f"{seconds[name]:.2f}", f"{count / seconds[name]:,.0f}")
        for who, count, name in (
            ("library", PROMPT, "library"),
            ("engine", PROMPT, "engine"),
            ("engine", LONG_PROMPT, "engine, long"),
        )
    )
    long_s = seconds["engine, long"]
    result = Result(
        "indexer",
        "The index of sparse attention",
        "The index of one layer with the published shape (4 heads of 128, 2,048 of all tokens selected, blocks of 4), "
        "fp32, selects keys for the last queries of a context whose keys are kept: the library's index, one query at a "
        f"time, and the engine's, {QUERIES} queries at once and one alone. Then whole prompts of a tiny model are read "
        f"in chunks of {CHUNK}.",
        [
            Table("Choosing keys, median", columns, rows),
            Table(f"Reading a prompt, {MODEL}", ("", "tokens", "s", "tokens/s"), read),
        ],
        [
            Goal(
                "a prompt of 32k tokens of a tiny model",
                f"<= {GOAL_LONG_S:.0f} s",
                f"{long_s:.1f} s",
                long_s <= GOAL_LONG_S,
            ),
        ],
        ["Before the measurement, both were checked to select the same keys for these queries."],
        {"alone": measured, "prompts_s": seconds},
    )
    finish(result, started)


if __name__ == "__main__":
    main()
