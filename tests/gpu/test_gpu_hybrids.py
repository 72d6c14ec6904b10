"""Models with fixed state on cards: sliding windows and gated delta nets, with rows of numbers and of codes."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from pathlib import Path
from statistics import mean

import numpy as np
import pytest
import torch
from parkd_engine import EngineConfig, open_session
from parkd_engine.families.presets.shapes import preset_config
from parkd_engine.families.presets.weights import random_model
from parkd_engine.forward.chunk_graphs import record_chunks

from benchmarks.gpu.lane import NEVER, GpuLane, following
from parkd.errors import EngineFailure
from tests.gpu.gpu_kit import CONTEXT, MIB, SPLITS, assert_same, ids, opened, state_of, use_shapes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore:.*falling back to its reference"),
]

KINDS = ["sliding", "hybrid"]


@pytest.fixture(autouse=True)
def _shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    use_shapes(monkeypatch)


@pytest.mark.anyio
@pytest.mark.parametrize("devices", SPLITS, ids=",".join)
@pytest.mark.parametrize("kv_format", [None, "int8"], ids=str)
@pytest.mark.parametrize("lengths", [(8192, 3000), (5001, 9000), (300, 2049)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
async def test_a2_after_b_is_a2_never_interrupted(
    kind: str, devices: tuple[str, ...], kv_format: str | None, lengths: tuple[int, int], tmp_path: Path
) -> None:
    lane = GpuLane(opened(kind, devices, tmp_path, kv_format=kv_format), 512 * MIB)
    assert lane.engine.session.forward.decode_graph is not None, "decoding is recorded"
    a1, b1 = ids(lengths[0], 1), ids(lengths[1], 2)
    first = await lane.turn(lane.prompt("whole", a1), 12)
    a2 = following(a1, first, ids(20, 3))
    whole = await lane.turn(lane.prompt("whole", a2), 12)
    await lane.live.settle()
    expected = state_of(lane.engine)
    await lane.live.reset()
    again = await lane.turn(lane.prompt("parted", a1), 12)
    assert lane.store.stats().captures_in_flight == 1, "the capture goes on behind the reply"
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
@pytest.mark.parametrize("part", ["rows", "fixed"])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_flipped_byte_reads_cold(kind: str, part: str, devices: tuple[str, ...], tmp_path: Path) -> None:
    lane = GpuLane(opened(kind, devices, tmp_path, kv_format="int8"), 512 * MIB)
    a1 = ids(3000, 1)
    first = await lane.turn(lane.prompt("a", a1), 8)
    await lane.live.settle()
    parked_id = lane.live.rows.parked_id
    assert parked_id is not None
    await lane.turn(lane.prompt("a", ids(500, 2)), 2)
    await lane.live.settle()
    with lane.store.lease(parked_id, 3007) as lease:
        stage = lease.transfer.stages[-1]
        buffer = stage.rows[-1].buffer if part == "rows" else stage.fixed[-1].buffer
        buffer.flags.writeable = True
        buffer[len(buffer) // 2] ^= 1
    a2 = following(a1, first, ids(9, 3))
    back = await lane.turn(lane.prompt("a", a2), 8)
    assert lane.store.get(parked_id) is None
    assert back.outcome == "cold"
    await lane.live.reset()
    assert (await lane.turn(lane.prompt("other", a2), 8)).tokens == back.tokens
    await lane.live.settle()
    lane.close()


@pytest.mark.anyio
@pytest.mark.parametrize("devices", SPLITS, ids=",".join)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_capture_holds_no_byte_of_what_comes_next(kind: str, devices: tuple[str, ...], tmp_path: Path) -> None:
    """B is read, and takes checkpoints of its own in the memory of A's, while A's state is still being copied."""
    lane = GpuLane(opened(kind, devices, tmp_path, ctx_checkpoints=2), 1024 * MIB)
    assert lane.hooks is not None
    assert lane.hooks.settle(60)
    a1 = ids(20_000, 1)
    for round_ in range(3):
        name = f"round {round_}"
        first = await lane.turn(lane.prompt(name, a1), 3)
        expected = state_of(lane.engine)
        assert lane.store.stats().captures_in_flight == 1
        b1 = ids(9000 + round_, 9)
        await lane.live.reset()
        lane.engine.extend(b1, cancel=NEVER, checkpoint_at=(1000, 2000, 3000, 4000, 5000))
        await lane.live.settle()
        await lane.live.reset()
        back = await lane.turn(lane.prompt(name, following(a1, first, ids(1, 4))), 1)
        assert (back.outcome, back.reused) == ("restored-ram", 20_002)
        mine = [arena.rows[:20_002] for arena in lane.engine.session.arenas]
        assert_same(mine, [rows[:20_002] for rows in expected[: len(mine)]])
        kept = lane.engine.session.fixed_state.at(20_002)
        assert kept is not None
        assert_same(kept, expected[len(mine) :])
        await lane.live.settle()
        await lane.live.reset()
    lane.close()


@pytest.mark.parametrize("devices", SPLITS, ids=",".join)
@pytest.mark.parametrize("kv_format", [None, "int8"], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_recorded_decoding_errs_no_more_than_the_librarys(
    kind: str, kv_format: str | None, devices: tuple[str, ...]
) -> None:
    """Both round over 300 tokens, each in the state it left itself, and are held to the same weights in float32."""
    model = random_model(preset_config(f"random:{kind}"), torch.bfloat16, torch.device("cuda:0"))
    prompt, answer = ids(3000, 1), ids(300, 2)  # Long enough that a window's buffer is full on the way.
    layout = EngineConfig(devices=devices, context_tokens=CONTEXT, batch_tokens=256)
    exact = open_session(copy.deepcopy(model).float(), layout)
    session = open_session(model, replace(layout, kv_format=kv_format))
    assert session.use_kernels()
    for reading in (exact, session):
        reading.extend(prompt)
    session.checkpoint()
    recorded = [session.step(int(token)).clone() for token in answer]
    session.truncate(len(prompt))
    session.forward.decode_graph = None
    errors, theirs = [], []
    for token, mine in zip(answer, recorded, strict=True):
        right, library = exact.step(int(token)), session.step(int(token))
        errors.append(float((mine - right).norm() / right.norm()))
        theirs.append(float((library - right).norm() / right.norm()))
    assert mean(errors) < 1.1 * mean(theirs)
    assert max(errors) < 1.5 * max(theirs)


@pytest.mark.parametrize("devices", SPLITS, ids=",".join)
def test_whole_chunks_are_read_by_graphs_in_the_same_bits(
    devices: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    model = random_model(preset_config("random:hybrid"), torch.bfloat16, torch.device("cuda:0"))
    layout = EngineConfig(devices=devices, context_tokens=CONTEXT, batch_tokens=256)
    states = []
    for is_recorded in (False, True):
        session = open_session(model, layout)
        if is_recorded:
            for stage, cache in zip(session.stages, session.caches, strict=True):
                record_chunks(stage, cache, 256)
            session.reset()
        session.extend(ids(1300, 1))
        fields = [(arena, field) for arena in session.arenas for field in arena.layout.row_fields]
        states.append([arena.field_view(field)[: session.position].clone() for arena, field in fields])
        states[-1] += session.fixed_state.copies_at(session.position)
        states[-1].append(session.step(7))
    assert "recording failed" not in caplog.text
    assert_same(*states)


@pytest.mark.anyio
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
async def test_random_switches_between_conversations(kind: str, tmp_path: Path) -> None:
    """Under a budget that holds about three of six: no wrong token, memory flat, budget held."""
    engine = opened(kind, SPLITS[-1], tmp_path)
    layout = engine.info.layout
    lane = GpuLane(engine, 3 * (9000 * layout.row_bytes + 3 * layout.fixed_bytes))
    prompts = [ids(length, seed) for seed, length in enumerate([1000, 2000, 4000, 9000, 16_000, 20_000])]
    expected = {}
    for index, prompt in enumerate(prompts):
        await lane.live.reset()
        expected[index] = lane.cold(prompt, 4)
        engine.reset()
    chooser = random.Random(5)
    outcomes: dict[str, int] = {}
    used = []
    for switch in range(40):
        index = chooser.randrange(6)
        figures = await lane.turn(lane.prompt("six", prompts[index]), 4)
        assert figures.tokens == expected[index], f"switch {switch} to conversation {index}"
        outcomes[figures.outcome] = outcomes.get(figures.outcome, 0) + 1
        stats = lane.store.stats()
        assert stats.bytes_in_use <= stats.budget_bytes
        used.append(sum(torch.cuda.memory_allocated(device) for device in range(torch.cuda.device_count())))
    assert outcomes["cold"] < 40
    assert max(used[10:]) - min(used[10:]) < 96 * MIB
    await lane.live.settle()
    lane.close()


@pytest.mark.anyio
@pytest.mark.parametrize("kind", KINDS)
async def test_out_of_memory_in_a_prompt_ends_that_request_alone(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = GpuLane(opened(kind, ("cuda:0",), tmp_path), 0)
    a1 = ids(6000, 1)
    expected = (await lane.turn(lane.prompt("a", a1), 5)).tokens
    await lane.live.reset()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(0)
    hog = torch.empty(free - 6 * MIB, dtype=torch.uint8, device="cuda:0")
    try:
        with pytest.raises(EngineFailure, match="too little free memory"):
            await lane.live.call(lane.engine.extend, ids(30_000, 2), cancel=NEVER)
    finally:
        del hog
        torch.cuda.empty_cache()
    await lane.live.reset()
    assert (await lane.turn(lane.prompt("a", a1), 5)).tokens == expected
    lane.close()


def test_a_model_larger_than_the_first_card_is_drawn_where_it_runs(tmp_path: Path) -> None:
    """The split's devices hold their own layers only, and the numbers do not depend on the split."""
    torch.cuda.empty_cache()
    one = opened("hybrid", ("cuda:0",), tmp_path)
    one.extend(ids(500, 1), cancel=NEVER)
    logits = one.session.step(5).cpu()
    two = opened("hybrid", SPLITS[-1], tmp_path)
    two.extend(ids(500, 1), cancel=NEVER)
    assert torch.equal(two.session.step(5).cpu(), logits)
    for stage in two.session.stages:
        assert {parameter.device for parameter in stage.inner.parameters()} == {stage.device}


@pytest.mark.parametrize("devices", [("cuda:0", "cuda:0"), SPLITS[-1]], ids=",".join)
@pytest.mark.parametrize("kind", ["tiny-qwen3", *KINDS])
def test_cards_that_do_not_reach_each_other_give_the_same(kind: str, devices: tuple[str, ...], tmp_path: Path) -> None:
    """Hidden states through page-locked memory: the bits of the direct way, of prompts in many chunks and of tokens."""
    read = []
    for peer_access in (True, False):
        engine = opened(kind, devices, tmp_path, batch_tokens=128, context_tokens=4096, peer_access=peer_access)
        session = engine.session
        assert all(handoff.is_staged != peer_access for handoff in session.forward._handoffs)
        engine.extend(ids(3001, 1) % 500, cancel=NEVER)
        tokens = [session.step(int(token)).clone().cpu() for token in ids(20, 2) % 500]
        read.append([*tokens, *(state.cpu() for state in state_of(engine))])
    assert_same(*read)


@pytest.mark.anyio
@pytest.mark.parametrize("kind", KINDS)
async def test_a_sampled_answer_is_the_same_after_a_restore(kind: str, tmp_path: Path) -> None:
    from parkd.types import SamplingParams

    lane = GpuLane(opened(kind, SPLITS[-1], tmp_path), 512 * MIB)
    lane.sampling = SamplingParams(temperature=0.9, top_p=0.95, top_k=50, seed=7)
    a1 = ids(3000, 1)
    first = await lane.turn(lane.prompt("whole", a1), 12)
    a2 = following(a1, first, ids(20, 3))
    whole = await lane.turn(lane.prompt("whole", a2), 12)
    await lane.live.settle()
    await lane.live.reset()
    await lane.turn(lane.prompt("parted", a1), 12)
    await lane.turn(lane.prompt("parted", ids(900, 2)), 4)
    back = await lane.turn(lane.prompt("parted", a2), 12)
    assert (back.outcome, back.tokens) == ("restored-ram", whole.tokens)
    assert len(set(whole.tokens)) > 3
    await lane.live.settle()
    lane.close()


def test_a_card_samples_what_a_cpu_samples() -> None:
    from parkd_engine.words.sampling import TensorSampler

    from parkd.types import SamplingParams

    generator = torch.Generator().manual_seed(3)
    settings = [
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.8, top_p=0.9, seed=2),
        SamplingParams(temperature=1.2, top_k=40, min_p=0.05, seed=3),
        SamplingParams(temperature=0.7, top_p=0.95, repetition_penalty=1.2, presence_penalty=0.5, seed=4),
        SamplingParams(temperature=0.7, logit_bias={5: 4.0, 900: -2.0}, frequency_penalty=0.3, seed=5),
    ]
    history = np.arange(50)
    mask = np.ones(5000, dtype=np.bool_)
    mask[::3] = False
    for setting in settings:
        here, there = (TensorSampler(setting, 5000, history) for _ in range(2))
        for step in range(40):
            logits = torch.randn(5000, generator=generator) * 4
            allowed = mask if step % 2 else None
            assert here.pick(logits, allowed) == there.pick(logits.to("cuda:0"), allowed)
