"""llama.cpp on a card: what was parked and restored goes on with the state and the logits, bit for bit, of what stayed.

Needs llama-cpp-python over a library with CUDA. Small shapes whose heads the library's kernels for cards take.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from parkd.state import BLOCK_TOKENS, Grain, RowRun, StageTransfer, Transfer
from tests.integration.llama import tiny_gguf
from tests.integration.llama.llama_cpp_kit import loaded
from tests.integration.llama.test_llama_cpp_bits import NEVER, capture, converse, logits_of, some_tokens, whole_state

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
low = pytest.importorskip("llama_cpp.llama_cpp", reason="llama-cpp-python is not installed")
if not low.llama_supports_gpu_offload():
    pytest.skip("this llama-cpp-python was built for the CPU only", allow_module_level=True)

LENGTHS = (700, 2500)
"""Tokens: inside the first block of a card, and beyond it."""
ROUNDED = 0.05
"""Logits, which reach 11 here, differ by less. Seen were 0.005, from 32-bit sums against those of tensor cores."""
PLACEMENTS = {
    "all": {},
    "half": {"gpu_layers": 2},
    "none": {"gpu_layers": 0},
    "experts": {"cpu_moe": True},
}
SHAPES = ("tiny-dense", "tiny-sliding", "tiny", "tiny-experts")
TYPES = (("f16", "on"), ("f16", "off"), ("q8_0", "on"), ("q4_0", "on"))
CASES = [
    (shape, cache_type, flash_attn, placement)
    for shape, (cache_type, flash_attn), placement in itertools.product(SHAPES, TYPES, PLACEMENTS)
    if placement != "experts" or shape == "tiny-experts"
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llama-cpp-card")


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_restored_on_a_card_goes_on_as_if_it_had_never_left(
    case: tuple[str, str, str, str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes back is what was parked, and it goes on with the bits of what stayed: where experts are on both sides,
    which is told at start, with logits that differ by rounding at most."""
    name, cache_type, flash_attn, placement = case
    monkeypatch.setattr(tiny_gguf, "HEAD_DIM", 64)
    options = {"cache_type_k": cache_type, "cache_type_v": cache_type, "flash_attn": flash_attn}
    with loaded(name, folder, context_tokens=8192, **options, **PLACEMENTS[placement]) as engine:
        assert engine.uses_cards == (placement != "none")
        # On cards values of one row that are not adjacent are not copied number by number.
        is_whole = flash_attn == "off" and placement != "none"
        assert (engine.info.layout.grain is Grain.OPAQUE) == is_whole
        for length in LENGTHS:
            places = [None] if is_whole and engine.info.layout.fixed_bytes else [None, length // 2]
            for place in places:
                once, again = stayed(engine, length, place), stayed(engine, length, place)
                returned = left(engine, length, place)
                if engine.model.splits_experts:
                    assert np.abs(once[0] - returned[0]).max() < ROUNDED, (length, place)
                else:
                    assert same(once, again), (length, place)
                    assert same(once, returned), (length, place)


def stayed(engine, length: int, place: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Logits and the whole state of a conversation that went on from `place`, or its end."""
    converse(engine, length, place)
    engine.checkpoint()
    if place is not None:
        engine.truncate(place)
    return go_on(engine, place)


def left(engine, length: int, place: int | None) -> tuple[np.ndarray, np.ndarray]:
    """The same of one that was parked, while another one ran."""
    converse(engine, length, place)
    engine.checkpoint()
    if engine.info.layout.grain is Grain.ROWS:
        parked = capture(engine, place)
    else:
        run = RowRun(0, engine.position, np.empty(engine.state_sizes(()).whole, dtype=np.uint8))
        parked = Transfer(engine.info.layout.digest, 0, run.stop, BLOCK_TOKENS, (StageTransfer((run,), ()),))
        sums = engine.capture(parked)
        parked = replace(parked, checksums=sums.rows, fixed_checksums=sums.fixed, resume_at=place)
    if place is not None:
        engine.truncate(place)
    before = whole_state(engine)
    engine.reset()
    engine.extend(some_tokens(8, length + 61), cancel=NEVER)
    engine.restore(parked)
    assert np.array_equal(whole_state(engine), before), (length, place)
    return go_on(engine, place)


def go_on(engine, place: int | None) -> tuple[np.ndarray, np.ndarray]:
    rest = some_tokens(7, 70 if place is None else 2)
    engine.extend(rest[:-1], cancel=NEVER)
    engine.checkpoint()
    return logits_of(engine, [*rest[-1:], 40, 41]), whole_state(engine)


def same(one: tuple[np.ndarray, ...], other: tuple[np.ndarray, ...]) -> bool:
    return all(np.array_equal(here, there) for here, there in zip(one, other, strict=True))
