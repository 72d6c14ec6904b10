"""parkd-tier inside vLLM: turns, tenants, agents, disks that fill up, kills and starts."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_kit import CHUNK_TOKENS, Answer, Engine, EngineFailed, parkd_tier, running, tokens
from parkd_tier.canary import FIRST_TOKEN, PARAMS_KEY, try_all
from parkd_tier.opening import TOKEN_NAME

SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tier") / "park"


@pytest.fixture(scope="module")
def engine(weights: tuple[Path, Path], directory: Path) -> Iterator[Engine]:
    with running(weights[0], parkd_tier(directory)) as running_engine:
        yield running_engine


def whole_chunks(count: int) -> int:
    return count // CHUNK_TOKENS * CHUNK_TOKENS


def test_the_next_turn_finds_the_answer_too(engine: Engine) -> None:
    prompt = tokens(10, 500)
    first = engine.ask(prompt, count=60)
    engine.empty_memory()
    following = [*prompt, *first.tokens, *tokens(11, 40)]
    second = engine.ask(following)
    assert second.cached == whole_chunks(len(prompt) + len(first.tokens) - 1) > whole_chunks(len(prompt))
    engine.empty_memory()
    assert engine.ask(following).tokens == second.tokens


def test_one_tenant_does_not_find_what_another_left(engine: Engine) -> None:
    prompt = tokens(20)
    mine = engine.ask(prompt, salt="mine")
    engine.empty_memory()
    assert engine.ask(prompt, salt="theirs").cached == 0
    engine.empty_memory()
    assert engine.ask(prompt).cached == 0
    engine.empty_memory()
    again = engine.ask(prompt, salt="mine")
    assert (again.tokens, again.cached) == (mine.tokens, whole_chunks(len(prompt)))


def test_a_file_that_was_cut_is_a_miss(engine: Engine, directory: Path) -> None:
    prompt = tokens(30)
    before = set(directory.glob("*.extent"))
    first = engine.ask(prompt)
    engine.empty_memory()
    [extent] = set(directory.glob("*.extent")) - before
    extent.write_bytes(extent.read_bytes()[: 3 * 4096])
    again = engine.ask(prompt)
    assert (again.tokens, again.cached) == (first.tokens, 0)
    assert any("is too short" in line for line in engine.lines())


def test_a_full_disk_costs_hits_and_nothing_else(engine: Engine) -> None:
    known, prompt = tokens(40), tokens(41)
    first = engine.ask(known)
    engine.empty_memory()
    failures = engine.counts().get("write_failures", 0)
    engine.limit_files(8192)
    try:
        cold = engine.ask(prompt)
        engine.empty_memory()
        assert engine.counts()["write_failures"] == failures + 1
        assert engine.ask(prompt).tokens == cold.tokens
        again = engine.ask(known)
        assert (again.tokens, again.cached) == (first.tokens, whole_chunks(len(known)))
    finally:
        engine.limit_files(None)


def test_five_agents_at_once_answer_as_they_do_alone(engine: Engine, weights: tuple[Path, Path]) -> None:
    system = tokens(50, 256)
    talks = [[*system, *tokens(51 + agent, 150)] for agent in range(5)]
    with running(weights[0], None) as plain:
        for turn in range(2):
            answers = engine.ask_all(talks)
            assert [each.tokens for each in answers] == [plain.ask(talk).tokens for talk in talks]
            if turn:
                assert all(each.cached >= whole_chunks(len(system)) for each in answers)
            engine.empty_memory()
            talks = [
                [*talk, *answer.tokens, *tokens(60 + agent, 20)]
                for agent, (talk, answer) in enumerate(zip(talks, answers, strict=True))
            ]


def test_nothing_is_restored_before_the_canary_has_passed(weights: tuple[Path, Path], tmp_path: Path) -> None:
    park, prompt = tmp_path / "park", tokens(90)
    with running(weights[0], parkd_tier(park, needs_canary=True)) as engine:
        cold = engine.ask(prompt)
        engine.empty_memory()
        assert engine.ask(prompt).cached == 0
        assert any("no canary has passed" in line for line in engine.lines())
        token = (park / TOKEN_NAME).read_text()
        verdict = try_all(engine.ask_as_canary, CHUNK_TOKENS, token, random.Random(5))
        assert verdict.passed, verdict.told
        engine.ask_as_canary([FIRST_TOKEN], "verdict", {PARAMS_KEY: {"token": token, "verdict": vars(verdict)}})
        engine.empty_memory()
        again = engine.ask(prompt)
        assert (again.tokens, again.cached) == (cold.tokens, whole_chunks(len(prompt)))
    with running(weights[0], parkd_tier(park, needs_canary=True)) as engine:
        again = engine.ask(prompt)
        assert (again.tokens, again.cached) == (cold.tokens, whole_chunks(len(prompt))), "it need not run again"


def segments() -> set[str]:
    return {path.name for path in SHARED_MEMORY.glob("vllm_offload_*.mmap")}


@pytest.fixture(scope="module")
def old_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the killed ones leave what they knew, for one that has other chunks."""
    return tmp_path_factory.mktemp("old") / "park"


def test_killed_again_and_again_it_answers_right_and_leaves_nothing(
    weights: tuple[Path, Path], old_directory: Path
) -> None:
    """In each life an older conversation is asked for, a new one begun, and the process killed somewhere in it."""
    others, answers = segments(), dict[int, Answer]()
    for life in range(3):
        engine = Engine(weights[0], parkd_tier(old_directory))
        assert len(segments() - others) == 1, "what the killed one left was removed"
        for seed, known in answers.items():
            again = engine.ask(tokens(seed))
            assert again.tokens == known.tokens
            assert again.cached == whole_chunks(len(tokens(seed))), "it was written before the kill"
        answers[70 + life] = engine.ask(tokens(70 + life))
        engine.empty_memory()
        engine.send(tokens(80 + life))
        time.sleep(0.05 * life)
        engine.kill()
        assert len(segments() - others) == 1
    with running(weights[0], parkd_tier(old_directory)) as engine:
        for seed, known in answers.items():
            assert engine.ask(tokens(seed)).tokens == known.tokens
    assert segments() == others


def test_chunks_of_several_blocks_are_another_layout_and_restore_too(
    weights: tuple[Path, Path], old_directory: Path
) -> None:
    size, prompt = 3 * CHUNK_TOKENS, tokens(70)
    with running(weights[0], parkd_tier(old_directory, chunk_tokens=size)) as engine:
        cold = engine.ask(prompt, count=40)
        assert cold.cached == 0
        assert any("cannot be used here" in line and "blocks in a chunk 1, here 3" in line for line in engine.lines())
        engine.empty_memory()
        again = engine.ask(prompt, count=40)
        assert (again.tokens, again.cached) == (cold.tokens, len(prompt) // size * size)
        longer = [*prompt, *cold.tokens, *tokens(95, 100)]
        first = engine.ask(longer)
        assert first.cached > len(prompt) // size * size, "the device has more than whole chunks of it"
        engine.empty_memory()
        again = engine.ask(longer)
        assert (again.tokens, again.cached) == (first.tokens, len(longer) // size * size)


def test_a_vllm_that_was_not_tested_is_refused_with_a_sentence(weights: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match=r"parkd-tier is tested with vLLM from 0\.32 up to 0\.33"):
        Engine(weights[0], parkd_tier(tmp_path / "park"), version="0.33.1")
