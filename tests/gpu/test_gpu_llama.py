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
from tests.integration.llama.test_llama_cpp_bits import NEVER, compare, converse, logits_of, some_tokens, whole_state

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
low = pytest.importorskip("llama_cpp.llama_cpp", reason="llama-cpp-python is not installed")
if not low.llama_supports_gpu_offload():
    pytest.skip("this llama-cpp-python was built for the CPU only", allow_module_level=True)

LENGTHS = (700, 2500)
"""Tokens: inside the first block of a card, and beyond it."""
PLACEMENTS = {
    "all": {},
    "half": {"gpu_layers": 2},
    "none": {"gpu_layers": 0},
}
SHAPES = ("tiny-dense", "tiny-sliding", "tiny", "tiny-experts")
TYPES = (("f16", "on"), ("f16", "off"), ("q8_0", "on"), ("q4_0", "on"))
CASES = [
    (shape, cache_type, flash_attn, placement)
    for shape, (cache_type, flash_attn), placement in itertools.product(SHAPES, TYPES, PLACEMENTS)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llama-cpp-card")


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_restored_on_a_card_goes_on_as_if_it_had_never_left(
    case: tuple[str, str, str, str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, cache_type, flash_attn, placement = case
    monkeypatch.setattr(tiny_gguf, "HEAD_DIM", 64)
    options = {"cache_type_k": cache_type, "cache_type_v": cache_type, "flash_attn": flash_attn}
    with loaded(name, folder, context_tokens=8192, **options, **PLACEMENTS[placement]) as engine:
        assert engine.uses_cards == (placement != "none")
        # On cards values of one row that are not adjacent are not copied number by number.
        is_whole = flash_attn == "off" and placement != "none"
        assert (engine.info.layout.grain is Grain.OPAQUE) == is_whole
        for length in LENGTHS:
            if is_whole:
                compare_whole(engine, length)
            else:
                compare(engine, length, 70)
                compare(engine, length, 2, length // 2)


def compare_whole(engine, length: int) -> None:
    """A state that is moved whole: a conversation that stayed, and one that left in between."""
    seen = []
    for leaves in (False, True):
        converse(engine, length, None)
        engine.checkpoint()
        if leaves:
            run = RowRun(0, engine.position, np.empty(engine.state_sizes(()).whole, dtype=np.uint8))
            parked = Transfer(engine.info.layout.digest, 0, run.stop, BLOCK_TOKENS, (StageTransfer((run,), ()),))
            sums = engine.capture(parked)
            engine.reset()
            engine.extend(some_tokens(8, length + 61), cancel=NEVER)
            engine.restore(replace(parked, checksums=sums.rows, fixed_checksums=sums.fixed))
        engine.extend(some_tokens(7, 70), cancel=NEVER)
        engine.checkpoint()
        seen.append((logits_of(engine, [40, 41]), whole_state(engine)))
    assert all(np.array_equal(here, there) for here, there in zip(*seen, strict=True))
