"""The two faults that parkd-tier is there for: a byte that changed on disk, and weights that changed at one path."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engine_kit import CHUNK_TOKENS, Answer, parkd_tier, running, stock_fs_tier, tokens

A, B = tokens(1), tokens(2)
CACHED = len(A) // CHUNK_TOKENS * CHUNK_TOKENS


@dataclass(frozen=True)
class Life:
    """What one tier let vLLM answer."""

    cold: Answer
    restored: Answer
    flipped: Answer
    flipped_again: Answer
    lines: list[str]
    counts: dict[str, int]
    other_weights: Answer
    """To B, which the first weights have read."""
    other_lines: list[str]


def flip(directory: Path, suffix: str) -> None:
    """Changes what is kept of the first chunk, in every file."""
    files = sorted(path for path in directory.rglob(f"*{suffix}") if path.is_file())
    assert files
    for path in files:
        content = bytearray(path.read_bytes())
        for at in range(3, min(len(content), 1 << 15), 4):  # the exponent of each number
            content[at] ^= 0x7F
        path.write_bytes(content)


def live(tier: Callable[[Path], dict[str, Any]], suffix: str, weights: tuple[Path, Path], folder: Path) -> Life:
    model, directory = folder / "model", folder / "kept"
    shutil.copytree(weights[0], model)
    with running(model, tier(directory)) as engine:
        cold = engine.ask(A)
        engine.empty_memory()
        restored = engine.ask(A)
        engine.empty_memory()
        flip(directory, suffix)
        flipped = engine.ask(A)
        engine.empty_memory()
        again = engine.ask(A)
        engine.ask(B)
        engine.empty_memory()
        lines, counts = engine.lines(), engine.counts()
    shutil.copyfile(weights[1] / "model.safetensors", model / "model.safetensors")
    with running(model, tier(directory)) as engine:
        return Life(cold, restored, flipped, again, lines, counts, engine.ask(B), engine.lines())


@pytest.fixture(scope="module")
def cold_two(weights: tuple[Path, Path]) -> Iterator[Answer]:
    """What the second weights answer to B that have never seen anything."""
    with running(weights[1], None) as engine:
        yield engine.ask(B)


@pytest.fixture(scope="module")
def stock(weights: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Life:
    return live(stock_fs_tier, ".bin", weights, tmp_path_factory.mktemp("stock"))


@pytest.fixture(scope="module")
def ours(weights: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Life:
    return live(parkd_tier, ".extent", weights, tmp_path_factory.mktemp("ours"))


def test_vllms_own_tier_answers_from_flipped_bytes(stock: Life) -> None:
    """Why there is another one: no error, no line, another answer."""
    assert stock.cold.cached == 0
    assert (stock.restored.tokens, stock.restored.cached) == (stock.cold.tokens, CACHED)
    assert stock.flipped.cached == CACHED
    assert stock.flipped.tokens != stock.cold.tokens


def test_vllms_own_tier_serves_the_state_of_other_weights(stock: Life, cold_two: Answer) -> None:
    assert stock.other_weights.cached == CACHED
    assert stock.other_weights.tokens != cold_two.tokens


def test_what_was_stored_is_restored(ours: Life, stock: Life) -> None:
    assert (ours.cold.tokens, ours.cold.cached) == (stock.cold.tokens, 0)
    assert (ours.restored.tokens, ours.restored.cached) == (ours.cold.tokens, CACHED)


def test_flipped_bytes_are_a_miss_that_is_computed_again(ours: Life) -> None:
    assert (ours.flipped.tokens, ours.flipped.cached) == (ours.cold.tokens, 0)
    assert (ours.flipped_again.tokens, ours.flipped_again.cached) == (ours.cold.tokens, CACHED), "it was written again"


def test_a_miss_for_damage_is_counted_and_logged(ours: Life) -> None:
    assert ours.counts["read_failures"] == ours.counts["dropped"] == 1
    [line] = ours.lines
    assert "could not be used, and will be computed again" in line
    assert "is not what was written" in line


def test_state_of_other_weights_is_a_miss_and_the_log_says_so(ours: Life, cold_two: Answer) -> None:
    assert (ours.other_weights.tokens, ours.other_weights.cached) == (cold_two.tokens, 0)
    assert any(
        "2 conversations" in line and "cannot be used" in line and "weights" in line for line in ours.other_lines
    )
