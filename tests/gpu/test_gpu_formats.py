"""Int8 rows and steering on cards: what the CPU path makes, and recorded decoding left aside where it must be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from parkd_engine import EngineConfig, Session, capture, host_transfer, open_session, restore
from transformers import Qwen3Config, Qwen3ForCausalLM

from parkd.words.steering import Steering

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

VOCABULARY, CONTEXT, HIDDEN, LAYERS = 997, 1024, 256, 4
LAST = f"cuda:{max(0, torch.cuda.device_count() - 1)}"
SPLITS = [("cuda:0",), ("cuda:0", LAST), ("cuda:0", "cpu", LAST)]
IDS = torch.randint(0, VOCABULARY, (500,), generator=torch.Generator().manual_seed(1)).numpy()


def model(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
    )
    return Qwen3ForCausalLM(config).to(dtype).eval()


def opened(made: Any, devices: tuple[str, ...], kv_format: str | None = None) -> Session:
    config = EngineConfig(devices=devices, context_tokens=CONTEXT, batch_tokens=128, kv_format=kv_format)
    return open_session(made, config)


def answers(session: Session, start: int = 0, decoded: int = 6) -> torch.Tensor:
    session.extend(IDS[start : len(IDS) - decoded])
    return torch.stack([session.step(int(token)).cpu() for token in IDS[len(IDS) - decoded :]])


def steering(scale: float) -> Steering:
    generator = torch.Generator().manual_seed(5)
    sums = {layer: (torch.randn(HIDDEN, generator=generator) * scale).numpy() for layer in range(1, LAYERS)}
    return Steering(b"any sixteen byte", sums)


@pytest.mark.parametrize("devices", SPLITS, ids=str)
def test_int8_rows_give_the_logits_they_give_on_a_cpu(devices: tuple[str, ...]) -> None:
    mine = answers(opened(model(), devices, "int8"))
    expected = answers(opened(model(), ("cpu",), "int8"))
    torch.testing.assert_close(mine, expected, atol=5e-3, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("devices", SPLITS[:2], ids=str)
def test_restored_int8_rows_are_bit_equal(devices: tuple[str, ...], dtype: torch.dtype) -> None:
    session = opened(model(dtype), devices, "int8")
    stayed = answers(session)
    plan = host_transfer(session, 400)
    plan = replace(plan, checksums=capture(session, plan).rows)
    rows = [arena.rows[:400].clone() for arena in session.arenas]
    session.reset()
    session.extend(IDS[::-1].copy())
    restore(session, plan)
    assert all(torch.equal(arena.rows[:400], kept) for arena, kept in zip(session.arenas, rows, strict=True))
    session.truncate(384)  # the chunks' edge, so that the shapes are those of the first time
    assert torch.equal(answers(session, start=384), stayed)


@pytest.mark.parametrize("devices", SPLITS, ids=str)
def test_steering_is_what_it_is_on_a_cpu(devices: tuple[str, ...]) -> None:
    session, expected = opened(model(), devices), opened(model(), ("cpu",))
    plain = answers(session)
    for each in (session, expected):
        each.reset()
        each.steer(steering(0.5))
    mine = answers(session)
    torch.testing.assert_close(mine, answers(expected), atol=5e-3, rtol=0)
    assert (mine - plain).abs().max() > 0.05


def test_recorded_decoding_steps_aside_while_steered_and_comes_back() -> None:
    pytest.importorskip("triton")
    made = model(torch.bfloat16).to("cuda:0")
    recorded, eager = opened(made, ("cuda:0",)), opened(made, ("cuda:0",))
    assert recorded.use_kernels()
    plain = answers(recorded)
    for session in (recorded, eager):
        session.reset()
        session.steer(steering(2.0))
    assert torch.equal(answers(recorded), answers(eager))
    recorded.reset()
    recorded.steer(Steering())
    assert torch.equal(answers(recorded), plain)
