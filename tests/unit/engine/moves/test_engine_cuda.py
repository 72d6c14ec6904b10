"""The same proofs on cards: bit-equal logits, restored equals never parked, damage reads cold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from parkd_engine import EngineConfig, Session, capture, host_transfer, open_session, restore
from parkd_engine.forward.graphs import recorded
from parkd_engine.moves.transfer import CopySteps, copy_on_device
from transformers import DynamicCache

from parkd.errors import SnapshotDamaged, StageFailed
from tests.unit.engine.kit.core_models import CONTEXT, FAMILIES, assert_same, read_and_decode, tiny_model, token_ids

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SPLITS = [("cuda:0",), ("cuda:0", "cuda:0"), ("cuda:0", "cuda:last"), ("cuda:0", "cpu"), ("cpu", "cuda:0", "cuda:last")]
ALICE, BOB = token_ids(700), token_ids(900, seed=2)


def opened(model: Any, devices: tuple[str, ...]) -> Session:
    last = f"cuda:{torch.cuda.device_count() - 1}"
    names = tuple(last if name == "cuda:last" else name for name in devices)
    return open_session(model, EngineConfig(devices=names, context_tokens=CONTEXT, batch_tokens=256))


def model_of(family: str, dtype: torch.dtype) -> Any:
    """Heads of 64, so that the flash kernels take them."""
    return tiny_model(family, head_dim=64, hidden_size=96).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("family", list(FAMILIES))
def test_logits_equal_the_librarys_cache_on_a_card(family: str, dtype: torch.dtype) -> None:
    model = model_of(family, dtype).to("cuda:0")
    session = opened(model, ("cuda:0", "cuda:0"))
    cache = DynamicCache(config=model.config)
    expected = []
    with torch.inference_mode():
        for start, stop in [(0, 256), (256, 512), (512, 695), *((at, at + 1) for at in range(695, 700))]:
            chunk = torch.from_numpy(ALICE[start:stop]).to("cuda:0")
            expected.append(model(chunk[None], cache=cache, use_cache=True, logits_to_keep=1).logits[0, -1].float())
    assert_same(read_and_decode(session, ALICE, decoded=5), expected[3:])


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("devices", SPLITS, ids=",".join)
def test_restored_equals_never_parked_on_cards(devices: tuple[str, ...], pinned: bool) -> None:
    session = opened(model_of("qwen3", torch.bfloat16), devices)
    assert session.checksum.name == "weighted-sum-64"
    session.extend(ALICE[:650])
    plan = host_transfer(session, 650)
    if pinned:
        plan = replace(plan, stages=tuple(replace(s, rows=(pinned_run(s.rows[0]),)) for s in plan.stages))
    plan = replace(plan, checksums=capture(session, plan).rows)
    staying = read_and_decode(session, ALICE, decoded=3)
    session.reset()
    session.extend(BOB)
    restore(session, plan)
    assert_same(read_and_decode(session, ALICE, decoded=3), staying)


def pinned_run(run: Any) -> Any:
    return replace(run, buffer=torch.empty(run.buffer.nbytes, dtype=torch.uint8, pin_memory=True).numpy())


@pytest.mark.parametrize("stage", [0, 1])
def test_a_damaged_byte_on_a_card_reads_cold(stage: int) -> None:
    session = opened(model_of("llama", torch.bfloat16), ("cuda:0", "cuda:last"))
    staying = read_and_decode(session, ALICE)
    plan = host_transfer(session, 600)
    plan = replace(plan, checksums=capture(session, plan).rows)
    plan.stages[stage].rows[0].buffer[-1] ^= 1
    session.reset()
    with pytest.raises(SnapshotDamaged, match=f"stage {stage}: the block at row 512 "):
        restore(session, plan)
    assert session.position == 0
    assert_same(read_and_decode(session, ALICE), staying)


def test_a_copy_that_fails_on_a_card_is_survived() -> None:
    session = opened(model_of("llama", torch.bfloat16), ("cuda:0", "cuda:0", "cpu"))
    staying = read_and_decode(session, ALICE)
    plan = host_transfer(session, 600)
    checksums = capture(session, plan)
    calls = 0

    def second_fails(destination: torch.Tensor, source: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError("injected")
        copy_on_device(destination, source)

    with pytest.raises(StageFailed, match="injected"):
        capture(session, plan, steps=CopySteps(device=second_fails))
    assert session.position == 700
    calls = 0
    with pytest.raises(SnapshotDamaged, match="injected"):
        restore(session, replace(plan, checksums=checksums.rows), steps=CopySteps(device=second_fails))
    assert session.position == 0
    assert_same(read_and_decode(session, ALICE), staying)


def test_the_device_checksum_is_the_one_the_cpu_computes() -> None:
    session = opened(model_of("llama", torch.bfloat16), ("cuda:0",))
    session.extend(ALICE[:300])
    plan = host_transfer(session, 300)
    sums = capture(session, plan).rows
    words = plan.stages[0].rows[0].buffer.view(np.uint64)
    row_words = session.arenas[0].layout.row_bytes // 8
    for block, (start, stop) in enumerate(((0, 256), (256, 300))):
        part = words[start * row_words : stop * row_words]
        with np.errstate(over="ignore"):
            expected = (part * np.arange(1, 2 * len(part) + 1, 2, dtype=np.uint64)).sum(dtype=np.uint64)
        assert sums[block, 0] == expected


def test_graphs_of_one_pool_use_the_same_memory() -> None:
    """The work takes `size` bytes and no more: a sum of bytes would make a copy of them in 64 bits each."""
    device, size = torch.device("cuda:0"), 64 << 20
    source, out = (torch.full((size,), value, dtype=torch.uint8, device=device) for value in (1, 0))
    pool = torch.cuda.graph_pool_handle()

    def run() -> None:
        out.copy_(source.clone().add_(1))

    recorded(run, device)  # What is kept for the first recording is none of the pool's memory.
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    graphs = [recorded(run, device, pool) for _ in range(8)]
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved(device) - before < 2 * size
    for graph in graphs:
        out.zero_()
        graph.replay()
        assert bool((out == 2).all())
