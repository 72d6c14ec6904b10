"""llama.cpp in process: going on after a restore gives the bits of a conversation that never left.

Both read the same tokens in the same batches. Compared are the whole state, before and after, and the logits.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from parkd.state import BLOCK_TOKENS, Bytes, FixedPart, RowRun, StageTransfer, Transfer
from parkd.types import TokenIds
from tests.integration.llama.llama_cpp_kit import BATCH, loaded

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed (pip install parkd[llama-cpp])")

WHOLE = 0
"""llama.h: LLAMA_STATE_SEQ_FLAGS_NONE."""

WINDOW_CELLS = 256
"""A tiny model's windows are kept in that many cells, which are reused beyond them."""
LENGTHS = [BATCH - 1, BATCH + 1, WINDOW_CELLS - 1, WINDOW_CELLS + 1, 2 * WINDOW_CELLS + 72]
DECODED = 9
"""Tokens of an answer, each computed alone."""
NEVER = threading.Event()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llama-cpp-bits")


@pytest.fixture(
    scope="module",
    params=[("tiny", "f16", 1), ("tiny-sliding", "f16", 1), ("tiny-sliding", "q8_0", 2)],
    ids=lambda case: "-".join(map(str, case)),
)
def loaded_engine(request: pytest.FixtureRequest, folder: Path):
    name, cache_type, threads = request.param
    with loaded(name, folder, threads=threads, cache_type_k=cache_type, cache_type_v=cache_type) as engine:
        yield engine


@pytest.fixture(scope="module", params=["f16", "q8_0"])
def smollm2(request: pytest.FixtureRequest, folder: Path):
    with loaded("smollm2", folder, threads=2, cache_type_k=request.param, cache_type_v=request.param) as engine:
        yield engine


@pytest.mark.parametrize("tail", [1, 2, 70])
@pytest.mark.parametrize("length", LENGTHS)
def test_restored_goes_on_as_if_it_had_never_left(loaded_engine, length: int, tail: int) -> None:
    compare(loaded_engine, length, tail)


@pytest.mark.parametrize("tail", [1, 70])
@pytest.mark.parametrize("length", LENGTHS)
def test_restored_at_an_earlier_checkpoint(loaded_engine, length: int, tail: int) -> None:
    for place in (length // 2, length - DECODED):
        compare(loaded_engine, length, tail, place)


@pytest.mark.model
def test_full_attention_too(smollm2) -> None:
    compare(smollm2, BATCH + 1, 2)
    compare(smollm2, BATCH + 1, 70, BATCH // 2)


@pytest.mark.parametrize("length", LENGTHS)
def test_with_nothing_parked_it_goes_on_with_the_same_bits(loaded_engine, length: int) -> None:
    """Then no checkpoint is taken at the end of the answer, and reading takes it."""
    engine, rest, seen = loaded_engine, some_tokens(7, 70), []
    for is_parked in (False, True):
        converse(engine, length, None)
        if is_parked:
            engine.checkpoint()
            parked = capture(engine, None)
            engine.reset()
            engine.restore(parked)
        engine.extend(rest, cancel=NEVER)
        seen.append(logits_of(engine, [40, 41]))
    assert np.array_equal(*seen)


def compare(engine, length: int, tail: int, place: int | None = None) -> None:
    """Reads a conversation of `length` tokens and goes on from `place` (its end) with `tail` tokens: at once, and after
    it was parked, another one ran and it was restored."""
    rest = some_tokens(7, tail)

    def go_on() -> tuple[Bytes, Bytes, np.ndarray]:
        before = whole_state(engine)
        engine.extend(rest[:-1], cancel=NEVER)
        engine.checkpoint()
        logits = logits_of(engine, [*rest[-1:], 40, 41])
        return before, whole_state(engine), logits

    converse(engine, length, place)
    engine.checkpoint()
    parked = capture(engine, place)
    if place is not None:
        engine.truncate(place)
    stayed = go_on()
    engine.reset()
    engine.extend(some_tokens(8, length + 61), cancel=NEVER)
    engine.restore(parked)
    returned = go_on()
    for here, there in zip(stayed, returned, strict=True):
        assert np.array_equal(here, there)


def some_tokens(seed: int, count: int) -> TokenIds:
    return np.random.default_rng(seed).integers(33, 120, count).astype(np.int64)


def converse(engine, length: int, place: int | None) -> None:
    """A prompt read in batches and an answer computed token by token, with a checkpoint at `place`."""
    tokens = some_tokens(3, length)
    engine.reset()
    engine.extend(tokens[:-DECODED], cancel=NEVER, checkpoint_at=() if place is None else (place,))
    logits_of(engine, tokens[-DECODED:])


def logits_of(engine, tokens) -> np.ndarray:
    """`[tokens, vocab]`, each token computed alone."""
    rows = []
    for token in tokens:
        engine.timeline.decode(np.array([token], dtype=np.int64), None)
        rows.append(engine.sequence.logits().copy())
    return np.array(rows)


def whole_state(engine) -> Bytes:
    """As the library writes it."""
    state = np.empty(engine.sequence.state_size(WHOLE), dtype=np.uint8)
    assert engine.sequence.read_state(state, WHOLE)
    return state


def capture(engine, place: int | None, start: int = 0) -> Transfer:
    """The rows from `start` on, and the partial state at `place` (the end, if None), to be restored there."""
    [stage] = engine.info.layout.stages
    stop = engine.position
    at = stop if place is None else place
    rows = stop - start
    run = RowRun(start, stop, np.empty(stage.block_bytes(rows, -(-rows // BLOCK_TOKENS)), dtype=np.uint8))
    parts = (FixedPart(at, np.empty(stage.fixed_bytes, dtype=np.uint8)),) if stage.fixed_bytes else ()
    transfer = Transfer(engine.info.layout.digest, start, stop, BLOCK_TOKENS, (StageTransfer((run,), parts),))
    sums = engine.capture(transfer)
    return replace(transfer, checksums=sums.rows, fixed_checksums=sums.fixed, resume_at=place)
