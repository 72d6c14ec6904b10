"""The account of a stage's memory is what a card measures, within 3 %.

Each test prints the account's lines beside what was measured (`pytest -s`). It needs a card with room for the preset:
about 20 GB for the dense one and 60 GB for the hybrid one; where there is less, it is skipped.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from parkd_engine.account import ARENA_PARTS, WEIGHT_PARTS, ModelMemory
from parkd_engine.families.presets.shapes import preset_config
from parkd_engine.loading.draft_loading import drop_head
from parkd_engine.memory import library_bytes

from benchmarks.gpu.lane import load, random_ids
from parkd.state import EngineConfig
from parkd.state.engine_config import CARD_BATCH
from tests.gpu.gpu_kit import CARDS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CONTEXT, GUESSES = 32_768, 4
TOLERANCE = 0.03


@dataclass(frozen=True)
class Measured:
    """Bytes on one card beyond what was there before."""

    started: int
    """Allocated when the engine was ready: weights, state, graphs, library."""
    peak: int
    """Allocated at most while a long prompt was read."""
    reserved: int
    """Reserved from the card at most meanwhile, gaps between allocations included."""
    beyond: int
    """Taken from the card and not by torch's allocator: code of kernels, instances of graphs."""


@pytest.fixture(autouse=True)
def _nothing_left_over() -> Iterator[None]:
    gc.collect()
    torch.cuda.empty_cache()
    yield
    gc.collect()
    torch.cuda.empty_cache()


def outside(card: int) -> int:
    """Bytes of the card that are in use beside torch's allocator."""
    free, total = torch.cuda.mem_get_info(card)
    return total - free - torch.cuda.memory_reserved(card)


@pytest.mark.parametrize("cards", [1, 2], ids=["one-card", "two-cards"])
@pytest.mark.parametrize(("name", "guesses"), [("qwen3-8b", 0), ("qwen3.5-27b", 0), ("qwen3.5-27b-mtp", GUESSES)])
def test_the_account_is_what_the_card_measures(name: str, guesses: int, cards: int, tmp_path: Path) -> None:
    if cards > CARDS:
        pytest.skip("needs two cards")
    devices = tuple(f"cuda:{card}" for card in range(cards))
    others = [outside(card) for card in range(cards)]  # Asking creates the contexts.
    before = [(torch.cuda.memory_allocated(card), torch.cuda.memory_reserved(card)) for card in range(cards)]
    library = {device: library_bytes(device) for device in devices}
    config = preset_config(f"random:{name}")
    if not guesses:
        drop_head(config)
    layout = EngineConfig(devices, context_tokens=CONTEXT, batch_tokens=CARD_BATCH, draft_tokens=guesses)
    account = ModelMemory(config, torch.bfloat16, layout, library.__getitem__)
    whole = account.stages(((0, config.num_hidden_layers),))[0] if cards == 1 else None
    if whole is not None and whole.total(CONTEXT) > 0.9 * torch.cuda.mem_get_info(0)[0]:
        pytest.skip("needs a larger card")
    sizes = {"context_tokens": CONTEXT, "batch_tokens": CARD_BATCH, "draft_tokens": guesses}
    engine = load(f"random:{name}", devices, tmp_path, **sizes)
    try:
        started = [torch.cuda.memory_allocated(card) for card in range(cards)]
        for card in range(cards):
            torch.cuda.reset_peak_memory_stats(card)
        prompt = random_ids(CONTEXT - 64, int(config.vocab_size), 1)
        # Checkpoints fill up, and full chunks, a short one and decoding follow each other.
        engine.session.extend(prompt, checkpoint_at=tuple(range(CARD_BATCH, len(prompt), CARD_BATCH)))
        for token in prompt[:8]:
            engine.session.step(int(token))
        torch.cuda.synchronize()
        stages = account.stages([(s.first_layer, s.end_layer) for s in engine.info.layout.stages])
        for card, stage in enumerate(stages):
            lines = stage.lines(CONTEXT)
            allocated, reserved = before[card]
            seen = Measured(
                started[card] - allocated,
                torch.cuda.max_memory_allocated(card) - allocated,
                torch.cuda.max_memory_reserved(card) - reserved,
                outside(card) - others[card],
            )
            report(name, card, lines, seen, library[devices[card]])
            arena = engine.session.arenas[card]
            held = sum(lines.get(part, 0) for part in ARENA_PARTS)
            assert held == arena.nbytes
            fixed = sum(lines.get(part, 0) for part in (*WEIGHT_PARTS, *ARENA_PARTS, "states behind guesses"))
            assert fixed <= seen.started, "weights and state are in place when the engine is ready"
            assert stage.total(CONTEXT) == pytest.approx(seen.reserved, rel=TOLERANCE)
    finally:
        engine.close()


def report(name: str, card: int, lines: Mapping[str, int], seen: Measured, library: int) -> None:
    mib = {part: f"{size / 2**20:10,.0f} MiB" for part, size in lines.items()}
    print(f"\n{name}, card {card}, context {CONTEXT:,}")
    for part, text in mib.items():
        print(f"  account   {part:24}{text}")
    total = sum(lines.values())
    print(f"  account   {'total':24}{total / 2**20:10,.0f} MiB")
    print(f"  start     {'library, a stream':24}{library / 2**20:10,.0f} MiB")
    for what, size in (("ready", seen.started), ("peak", seen.peak), ("reserved", seen.reserved)):
        print(f"  measured  {what:24}{size / 2**20:10,.0f} MiB  {size / total:6.3f} of the account")
    print(f"  measured  {'outside the allocator':24}{seen.beyond / 2**20:10,.0f} MiB, in the margin")
