"""Models with experts, and attention with sinks, on cards: recorded decoding, and A1 -> B1 -> A2."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parkd_engine import EngineConfig, open_session, restore
from parkd_engine.families.presets import shapes
from parkd_engine.families.presets.shapes import Preset, preset_config
from parkd_engine.families.presets.weights import random_model
from parkd_engine.weights.host_experts import Way

from benchmarks.gpu.lane import GpuLane, following
from tests.gpu.gpu_kit import COMMON, MIB, SPLITS, assert_same, ids, opened, state_of
from tests.unit.engine.kit.parking import parked, resumed_at

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore:.*falling back to its reference"),
]
EXPERTS: dict[str, Preset] = {
    "experts": Preset(
        "qwen3_moe", {**COMMON, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256}
    ),
    "sinks": Preset(
        "gpt_oss",
        {
            **COMMON,
            "intermediate_size": 256,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
        },
    ),
}
EXPERT_COUNTS = {"experts": 16, "sinks": 8}
EVERY_KIND = pytest.mark.parametrize("kind", list(EXPERTS))
EVERY_SPLIT = pytest.mark.parametrize("devices", SPLITS, ids=",".join)
EVERY_FORMAT = pytest.mark.parametrize("kv_format", [None, "int8"], ids=str)
MOST_ERROR = 1.25
"""Of the mean error of the library's forward in bf16, against float32."""


@pytest.fixture(autouse=True)
def _shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "PRESETS", {**shapes.PRESETS, **EXPERTS})


@pytest.mark.anyio
@EVERY_SPLIT
@EVERY_FORMAT
@EVERY_KIND
async def test_a2_after_b_is_a2_never_interrupted(
    kind: str, devices: tuple[str, ...], kv_format: str | None, tmp_path: Path
) -> None:
    lane = GpuLane(opened(kind, devices, tmp_path, kv_format=kv_format), 512 * MIB)
    assert lane.engine.session.forward.decode_graph is not None, "decoding is recorded"
    a1, b1 = ids(3000, 1), ids(2049, 2)
    first = await lane.turn(lane.prompt("whole", a1), 12)
    a2 = following(a1, first, ids(20, 3))
    whole = await lane.turn(lane.prompt("whole", a2), 12)
    await lane.live.settle()
    expected = state_of(lane.engine)
    await lane.live.reset()
    again = await lane.turn(lane.prompt("parted", a1), 12)
    await lane.turn(lane.prompt("parted", b1), 12)
    back = await lane.turn(lane.prompt("parted", a2), 12)
    assert back.outcome == "restored-ram"
    assert (again.tokens, back.tokens) == (first.tokens, whole.tokens)
    assert_same(state_of(lane.engine), expected)
    await lane.live.settle()
    lane.close()


@EVERY_FORMAT
@EVERY_KIND
def test_recorded_steps_are_those_of_the_librarys_forward_but_for_rounding(kind: str, kv_format: str | None) -> None:
    """Over prompts shorter and longer than a window, of one chunk and of several. All experts work on every token: with
    fewer, rounding may choose other ones, and then the answers differ by more than rounding."""
    config = preset_config(f"random:{kind}")
    config.num_experts_per_tok = EXPERT_COUNTS[kind]
    model = random_model(config, torch.bfloat16, torch.device("cuda:0"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.copy_(torch.linspace(-2.0, 4.0, parameter.numel()))
    layout = EngineConfig(devices=("cuda:0",), context_tokens=4096, batch_tokens=512, kv_format=kv_format)
    exact_model = copy.deepcopy(model).float()

    def steps(its_model: Any, prompt: list[int], *, recorded: bool) -> torch.Tensor:
        """Logits, float32 `[16, vocab]`, of tokens after the prompt."""
        session = open_session(its_model, layout)
        if recorded:
            assert session.use_kernels(), "decoding is recorded"
        session.extend(prompt)
        return torch.stack([session.step(int(token)).clone() for token in ids(16, 3)])

    for prompt in (ids(60, 1), ids(1700, 2)):
        exact = steps(exact_model, prompt, recorded=False)
        plain, graph = (steps(model, prompt, recorded=recorded) for recorded in (False, True))
        assert (graph - exact).abs().mean() < MOST_ERROR * (plain - exact).abs().mean()
        assert (plain - exact).abs().mean() < 0.25 * exact.abs().mean(), "the reference is of the same model"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_sinks_take_the_share_of_the_weights_that_the_formula_gives_them(dtype: torch.dtype) -> None:
    """Against a softmax over one more column, in float32, for prompts and single tokens, whole and windowed."""
    from parkd_engine.forward.attention import arena_attention

    generator = torch.Generator("cuda").manual_seed(4)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=dtype)

    sinks = torch.linspace(-2.0, 4.0, 8, device="cuda", dtype=dtype)
    for queries, window in ((700, None), (1, None), (700, 128), (50, 128)):
        query, key, value = drawn(1, 8, queries, 64), drawn(1, 2, 900, 64), drawn(1, 2, 900, 64)
        arguments: dict[str, Any] = {"scaling": 0.125, "sliding_window": window, "s_aux": sinks}
        mine, _ = arena_attention(torch.nn.Module(), query, key, value, None, **arguments)
        keys, values = (states.float().repeat_interleave(4, dim=1) for states in (key, value))
        scores = query.float() @ keys.transpose(2, 3) * 0.125
        at = torch.arange(900 - queries, 900, device="cuda")[:, None]
        other = torch.arange(900, device="cuda")[None]
        hidden = (other > at) | (other <= at - (window or 10_000))
        scores = scores.masked_fill(hidden, -torch.inf)
        column = sinks.float().view(1, 8, 1, 1).expand(1, 8, queries, 1)
        weights = torch.cat([scores, column], dim=-1).softmax(dim=-1)[..., :-1]
        expected = (weights @ values).transpose(1, 2)
        torch.testing.assert_close(mine.float(), expected, atol=2e-2 if dtype == torch.bfloat16 else 1e-4, rtol=0)


def test_experts_give_the_same_bits_for_the_same_shapes() -> None:
    config = preset_config("random:experts")
    model = random_model(config, torch.bfloat16, torch.device("cuda:0"))
    session = open_session(model, EngineConfig(devices=("cuda:0",), context_tokens=4096, batch_tokens=512))
    prompt = np.asarray(ids(900, 1))
    answers = []
    for _ in range(3):
        session.reset()
        session.extend(prompt[:-1])
        answers.append(session.step(int(prompt[-1])).clone())
    assert torch.equal(answers[0], answers[1])
    assert torch.equal(answers[0], answers[2])


@pytest.mark.parametrize("fetched_from", [1, 1 << 20], ids=["fetched", "computed there"])
@EVERY_KIND
def test_experts_in_main_memory_resume_bit_equal(kind: str, fetched_from: int) -> None:
    """A1, parked, B1, restored: the steps of A1. Each expert is copied once, and close to experts in place."""
    config = preset_config(f"random:{kind}")
    config.num_hidden_layers = 6
    model = random_model(config, torch.bfloat16, torch.device("cuda:0"))
    layout = EngineConfig(devices=("cuda:0",), context_tokens=4096, batch_tokens=512)
    prompt, other = ids(1500, 1), ids(900, 2)
    in_place = open_session(copy.deepcopy(model), layout)
    in_place.extend(prompt[:-1])
    nearly = in_place.step(int(prompt[-1])).clone()
    session = open_session(model, layout, host_layers=(2, 4, 5))
    hosted = session.stages[0].host_experts
    assert len(hosted) == 3
    for each in hosted:
        each.way = Way(fetched_from)
    session.extend(prompt[:-1], checkpoint_at=(len(prompt) - 1,))
    expected = [session.step(int(token)).clone() for token in (prompt[-1], 7, 8)]
    assert (expected[0] - nearly).abs().mean() < 0.05 * nearly.abs().mean()
    session.truncate(len(prompt) - 1)
    plan = parked(session, (len(prompt) - 1,), len(prompt) - 1)
    session.reset()
    session.extend(other)
    session.reset()
    restore(session, resumed_at(plan, len(prompt) - 1))
    counts = [each.fetched for each in hosted]
    again = [session.step(int(token)).clone() for token in (prompt[-1], 7, 8)]
    assert all(torch.equal(one, two) for one, two in zip(again, expected, strict=True))
    chosen = 4 if kind == "experts" else 2
    fetched = [each.fetched - before for each, before in zip(hosted, counts, strict=True)]
    assert fetched == ([3 * chosen] * 3 if fetched_from == 1 else [0] * 3)
