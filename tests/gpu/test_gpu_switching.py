"""A1 -> B1 -> A2 and many switches, on cards, through engine, store and parking."""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parkd_engine.families.presets import shapes
from parkd_engine.families.presets.shapes import Preset

from benchmarks.gpu.lane import NEVER, GpuLane, following
from parkd.engine_adapter.torch_engine.engine import TorchEngine
from parkd.errors import EngineFailure, ModelError
from tests.gpu import gpu_kit
from tests.gpu.gpu_kit import COMMON, CONTEXT, MIB, SPLITS, assert_same, ids, state_of, use_shapes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(autouse=True)
def _shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    use_shapes(monkeypatch)


def opened(devices: tuple[str, ...], tmp_path: Path, **layout: Any) -> TorchEngine:
    return gpu_kit.opened("dense", devices, tmp_path, **{"context_tokens": CONTEXT, **layout})


@pytest.mark.anyio
@pytest.mark.parametrize("devices", SPLITS, ids=",".join)
@pytest.mark.parametrize("kv_format", [None, "int8"], ids=str)
@pytest.mark.parametrize("lengths", [(8192, 3000), (8193, 9000), (2047, 2049), (300, 20_000)], ids=str)
async def test_a2_after_b_is_a2_never_interrupted(
    devices: tuple[str, ...], kv_format: str | None, lengths: tuple[int, int], tmp_path: Path
) -> None:
    lane = GpuLane(opened(devices, tmp_path, kv_format=kv_format), 512 * MIB)
    a1, b1 = ids(lengths[0], 1), ids(lengths[1], 2)
    first = await lane.turn(lane.prompt("whole", a1), 12)
    a2 = following(a1, first, ids(20, 3))
    whole = await lane.turn(lane.prompt("whole", a2), 12)
    await lane.live.settle()
    expected = state_of(lane.engine)
    await lane.live.reset()
    again = await lane.turn(lane.prompt("parted", a1), 12)
    between = await lane.turn(lane.prompt("parted", b1), 12)
    back = await lane.turn(lane.prompt("parted", a2), 12)
    assert (again.outcome, between.outcome, back.outcome) == ("cold", "cold", "restored-ram")
    assert back.reused == lengths[0] + 11
    assert (again.tokens, back.tokens) == (first.tokens, whole.tokens)
    assert_same(state_of(lane.engine), expected)
    await lane.live.settle()
    lane.close()


@pytest.mark.anyio
@pytest.mark.parametrize("devices", SPLITS, ids=",".join)
async def test_a_flipped_byte_of_one_stage_reads_cold(devices: tuple[str, ...], tmp_path: Path) -> None:
    lane = GpuLane(opened(devices, tmp_path), 512 * MIB)
    a1 = ids(3000, 1)
    first = await lane.turn(lane.prompt("a", a1), 8)
    await lane.live.settle()
    parked_id = lane.live.rows.parked_id
    assert parked_id is not None
    await lane.turn(lane.prompt("a", ids(500, 2)), 2)
    await lane.live.settle()
    with lane.store.lease(parked_id, 2999) as lease:
        last = lease.transfer.stages[-1].rows[-1].buffer
        last.flags.writeable = True
        last[len(last) // 2] ^= 1
    back = await lane.turn(lane.prompt("a", a1), 8)
    assert lane.store.get(parked_id) is None
    assert (back.outcome, back.tokens) == ("cold", first.tokens)
    await lane.live.settle()
    lane.close()


@pytest.mark.anyio
@pytest.mark.parametrize("devices", SPLITS, ids=",".join)
async def test_a_capture_holds_no_byte_of_what_overwrites_it(devices: tuple[str, ...], tmp_path: Path) -> None:
    """B is read while A's rows are still being copied; what was captured must be A's to the last byte."""
    lane = GpuLane(opened(devices, tmp_path), 512 * MIB)
    assert lane.hooks is not None
    assert lane.hooks.settle(60)
    a1 = ids(30_000, 1)
    for round_ in range(4):
        name = f"round {round_}"
        await lane.turn(lane.prompt(name, a1), 3)
        expected = state_of(lane.engine)
        assert lane.store.stats().captures_in_flight == 1, "the capture goes on behind the reply"
        await lane.turn(lane.prompt(name, ids(20_000 + round_, 9)), 2)
        await lane.live.settle()
        await lane.live.reset()
        back = await lane.turn(lane.prompt(name, a1[:-1]), 1)
        assert back.outcome == "restored-ram"
        for mine, theirs in zip(state_of(lane.engine), expected, strict=True):
            shared = back.reused
            assert torch.equal(mine[:shared], theirs[:shared])
        await lane.live.settle()
        await lane.live.reset()
    lane.close()


@pytest.mark.anyio
@pytest.mark.timeout(400)
async def test_200_random_switches_among_six_conversations(tmp_path: Path) -> None:
    """Under a budget that holds about three: no wrong token, memory flat, budget held."""
    engine = opened(SPLITS[-1], tmp_path)
    budget = int(3.2 * 20_000 * engine.info.layout.row_bytes)
    lane = GpuLane(engine, budget)
    lengths = [1000, 4000, 9000, 16_000, 30_000, 60_000]
    prompts = [ids(length, seed) for seed, length in enumerate(lengths)]
    expected: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts):
        await lane.live.reset()
        expected[index] = lane.cold(prompt, 4)
        engine.reset()
    chooser = random.Random(5)
    used = []
    outcomes: dict[str, int] = {}
    for switch in range(200):
        index = chooser.randrange(6)
        figures = await lane.turn(lane.prompt("six", prompts[index]), 4)
        assert figures.tokens == expected[index], f"switch {switch} to conversation {index}"
        outcomes[figures.outcome] = outcomes.get(figures.outcome, 0) + 1
        stats = lane.store.stats()
        assert stats.bytes_in_use <= stats.budget_bytes
        used.append(sum(torch.cuda.memory_allocated(device) for device in range(torch.cuda.device_count())))
    assert outcomes["restored-ram"] > 20
    assert max(used[20:]) - min(used[20:]) < 64 * MIB
    await lane.live.settle()
    lane.close()


@pytest.mark.anyio
async def test_out_of_memory_in_a_prompt_ends_that_request_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = GpuLane(opened(("cuda:0",), tmp_path), 0)
    a1 = ids(6000, 1)
    expected = (await lane.turn(lane.prompt("a", a1), 5)).tokens
    await lane.live.reset()
    free, _ = torch.cuda.mem_get_info(0)
    torch.cuda.empty_cache()
    hog = torch.empty(free - 24 * MIB, dtype=torch.uint8, device="cuda:0")
    monkeypatch.setattr(lane.engine.session, "batch_tokens", 65_536)
    with pytest.raises(EngineFailure, match="too little free memory"):
        await lane.live.call(lane.engine.extend, ids(60_000, 2), cancel=NEVER)
    del hog
    monkeypatch.undo()
    torch.cuda.empty_cache()
    await lane.live.reset()
    assert (await lane.turn(lane.prompt("a", a1), 5)).tokens == expected
    lane.close()


def test_a_context_that_does_not_fit_is_refused_with_one_that_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    huge = {**COMMON, "max_position_embeddings": 1 << 28}
    monkeypatch.setattr(shapes, "PRESETS", {"dense": Preset("qwen3", huge)})
    with pytest.raises(ModelError, match=r"needs [\d,]+ MiB on cuda:0 .*: \d+ tokens fit"):
        opened(("cuda:0",), tmp_path, context_tokens=1 << 28)


LOST = """
import sys, threading
import numpy as np
from pathlib import Path
from benchmarks.gpu.lane import load
from parkd.errors import EngineLost
engine = load("random:tiny-qwen3", ("cuda:0",), Path(sys.argv[1]), context_tokens=1024, batch_tokens=128)
ids = np.full(600, 5, dtype=np.int64)
ids[300] = 10**6  # outside the embedding: an assertion on the device, which poisons its context
for attempt in range(2):
    try:
        engine.extend(ids, cancel=threading.Event())
    except EngineLost as error:
        print("lost:", error.message.splitlines()[0])
    except BaseException as error:
        print("other:", type(error).__name__, error)
"""


def test_a_poisoned_device_is_a_lost_engine(tmp_path: Path) -> None:
    """In a process of its own: nothing can be done with the device in that process afterwards."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LOST), str(tmp_path)], capture_output=True, text=True, timeout=100
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(("lost:", "other:"))]
    assert len(lines) == 2, done.stdout + done.stderr
    assert all(line.startswith("lost: The device stopped working") for line in lines), lines
    assert np.all([("device-side assert" in line or "CUDA" in line) for line in lines])
