"""The two faults that parkd-tier is there for: a byte that changed on disk, and weights that changed at one path."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_kit import CHUNK_TOKENS, Engine, parkd_tier, running, stock_fs_tier, tokens

A, B = tokens(1), tokens(2)
CACHED = len(A) // CHUNK_TOKENS * CHUNK_TOKENS


def flip(directory: Path, suffix: str) -> None:
    """Flips a byte in the middle of what is kept of the first chunk of each file."""
    files = sorted(path for path in directory.rglob(f"*{suffix}") if path.is_file())
    assert files
    for path in files:
        content = bytearray(path.read_bytes())
        for at in range(3, min(len(content), 1 << 15), 4):  # the exponent of each number of the first chunk
            content[at] ^= 0x7F
        path.write_bytes(content)


@pytest.fixture(scope="module")
def cold(weights: tuple[Path, Path]) -> tuple[Any, Any]:
    """What each model answers to A and B that has never seen anything."""
    answers = []
    for model in weights:
        with running(model, None) as engine:
            answers.append((engine.ask(A).tokens, engine.ask(B).tokens))
    assert answers[0] != answers[1]
    return answers[0], answers[1]


def restored(engine: Engine) -> tuple[tuple[int, ...], int]:
    engine.empty_memory()
    answer = engine.ask(A)
    return answer.tokens, answer.cached


def test_vllms_own_tier_answers_from_a_flipped_byte(weights: tuple[Path, Path], tmp_path: Path, cold: Any) -> None:
    """Why there is another one: no error, no line, another answer."""
    with running(weights[0], stock_fs_tier(tmp_path / "fs")) as engine:
        assert engine.ask(A).tokens == cold[0][0]
        assert restored(engine) == (cold[0][0], CACHED)
        engine.empty_memory()
        flip(tmp_path / "fs", ".bin")
        answer = engine.ask(A)
        assert answer.cached == CACHED
        assert answer.tokens != cold[0][0]


def test_a_flipped_byte_is_a_miss_that_is_computed_again(weights: tuple[Path, Path], tmp_path: Path, cold: Any) -> None:
    with running(weights[0], parkd_tier(tmp_path / "park")) as engine:
        assert engine.ask(A).tokens == cold[0][0]
        assert restored(engine) == (cold[0][0], CACHED)
        engine.empty_memory()
        flip(tmp_path / "park", ".extent")
        answer = engine.ask(A)
        assert (answer.tokens, answer.cached) == (cold[0][0], 0)
        assert engine.counts()["read_failures"] == engine.counts()["dropped"] == 1
        assert any("is not what was written" in line for line in engine.lines())
        assert restored(engine) == (cold[0][0], CACHED), "it was written again"


def under_other_weights(
    make: Callable[[Path], dict[str, Any]], weights: tuple[Path, Path], model: Path, directory: Path
) -> tuple[tuple[int, ...], int, list[str]]:
    """What the second model answers to A at the path where the first one has read it."""
    with running(model, make(directory)) as engine:
        engine.ask(A)
        engine.empty_memory()
    shutil.copyfile(weights[1] / "model.safetensors", model / "model.safetensors")
    with running(model, make(directory)) as engine:
        answer = engine.ask(A)
        return answer.tokens, answer.cached, engine.lines()


def test_vllms_own_tier_serves_the_state_of_other_weights(
    weights: tuple[Path, Path], model: Path, tmp_path: Path, cold: Any
) -> None:
    answer, cached, _ = under_other_weights(stock_fs_tier, weights, model, tmp_path / "fs")
    assert cached == CACHED
    assert answer != cold[1][0]


def test_state_of_other_weights_is_a_miss(weights: tuple[Path, Path], model: Path, tmp_path: Path, cold: Any) -> None:
    answer, cached, lines = under_other_weights(parkd_tier, weights, model, tmp_path / "park")
    assert (answer, cached) == (cold[1][0], 0)
    assert any("cannot be used here" in line and "weights" in line for line in lines)
