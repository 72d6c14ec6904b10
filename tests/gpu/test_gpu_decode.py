"""Decoding as recorded graphs: the tokens of the library's forward, and a state that can be parked like any other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from parkd_engine import EngineConfig, Session, capture, host_transfer, open_session, restore
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
VOCABULARY, CONTEXT = 997, 2048
LAST = f"cuda:{max(0, torch.cuda.device_count() - 1)}"
SPLITS = [("cuda:0",), ("cuda:0", LAST), ("cuda:0", LAST, "cuda:0")]
LOGIT_TOLERANCE = {torch.bfloat16: 0.06, torch.float16: 0.01}
"""Of the largest logit: what another order of rounding may make of four layers."""
CODES_TOLERANCE = 0.06
"""With 8-bit rows: a rounding near an edge changes a code, which is 1/254 of a head's largest number."""


def model(family: str, dtype: torch.dtype) -> Any:
    config, kind = FAMILIES[family]
    torch.manual_seed(3)
    shape = {"hidden_size": 384, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 6}
    made = kind(
        config(
            vocab_size=VOCABULARY,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=False,
            **shape,
        )
    )
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 1.5 / parameter.shape[-1] ** 0.5)
    return made.to(dtype).to("cuda:0").eval()


def opened(made: Any, devices: tuple[str, ...], *, recorded: bool, kv_format: str | None = None) -> Session:
    layout = EngineConfig(devices=devices, context_tokens=CONTEXT, batch_tokens=256, kv_format=kv_format)
    session = open_session(made, layout)
    if recorded:
        assert session.use_kernels(), "these models decode as recorded graphs"
    return session


def ids(count: int, seed: int = 1) -> Any:
    return torch.randint(0, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).numpy()


def forced(session: Session, prompt: Any, answer: Any) -> list[torch.Tensor]:
    """The logits at each token of `answer`, behind `prompt`."""
    session.extend(prompt[session.position :])
    return [session.step(int(token)).clone() for token in answer]


@pytest.mark.parametrize("devices", SPLITS, ids=",".join)
@pytest.mark.parametrize("kv_format", [None, "int8"], ids=str)
@pytest.mark.parametrize("dtype", list(LOGIT_TOLERANCE), ids=str)
@pytest.mark.parametrize("family", list(FAMILIES))
def test_logits_are_the_librarys_but_for_rounding(
    family: str, dtype: torch.dtype, kv_format: str | None, devices: tuple[str, ...]
) -> None:
    """Of a prompt read and tokens decoded by the kernels, against the library's forward over rows of the same kind."""
    made = model(family, dtype)
    prompt, answer = ids(700), ids(24, seed=2)
    expected = forced(opened(made, devices, recorded=False, kv_format=kv_format), prompt, answer)
    recorded = forced(opened(made, devices, recorded=True, kv_format=kv_format), prompt, answer)
    tolerance = LOGIT_TOLERANCE[dtype] if kv_format is None else CODES_TOLERANCE
    agreeing = 0
    for mine, theirs in zip(recorded, expected, strict=True):
        assert (mine - theirs).abs().max() < tolerance * theirs.abs().max()
        agreeing += int(mine.argmax() == theirs.argmax())
    assert agreeing >= 22, f"{agreeing} of 24 greedy choices are those of the library's forward"


@pytest.mark.parametrize("devices", SPLITS, ids=",".join)
@pytest.mark.parametrize("kv_format", [None, "int8"], ids=str)
def test_restored_equals_never_parked(devices: tuple[str, ...], kv_format: str | None) -> None:
    session = opened(model("qwen3", torch.bfloat16), devices, recorded=True, kv_format=kv_format)
    prompt, answer = ids(600), ids(40, seed=2)
    forced(session, prompt, answer[:20])
    plan = host_transfer(session, session.position)
    plan = replace(plan, checksums=capture(session, plan).rows)
    staying = [session.step(int(token)).clone() for token in answer[20:]]
    rows = [arena.rows[: session.position].clone() for arena in session.arenas]
    session.reset()
    forced(session, ids(900, seed=5), ids(3, seed=6))
    restore(session, plan)
    for token, expected in zip(answer[20:], staying, strict=True):
        assert torch.equal(session.step(int(token)), expected)
    for arena, expected in zip(session.arenas, rows, strict=True):
        assert torch.equal(arena.rows[: session.position], expected)


def test_logits_stay_when_the_next_token_is_run() -> None:
    session = opened(model("qwen3", torch.bfloat16), ("cuda:0",), recorded=True)
    session.extend(ids(50))
    first = session.step(1)
    before = first.clone()
    session.step(2)
    assert torch.equal(first, before)


def test_what_hooks_add_to_a_layer_is_not_lost() -> None:
    session = opened(model("llama", torch.bfloat16), ("cuda:0", LAST), recorded=True)
    prompt = ids(300)
    session.extend(prompt)
    plain = session.step(3)
    layer: Any = session.stages[1].inner.layers[2]
    hook = layer.register_forward_hook(lambda _module, _inputs, output: output + 1.0)
    session.truncate(300)
    steered = session.step(3)
    hook.remove()
    session.truncate(300)
    assert not torch.allclose(plain, steered, atol=0.1)
    assert torch.equal(session.step(3), plain)


def test_rows_of_codes_are_those_the_library_path_writes() -> None:
    made = model("qwen3", torch.bfloat16)
    read = []
    for recorded in (False, True):
        session = opened(made, ("cuda:0",), recorded=recorded, kv_format="int8")
        session.extend(ids(700))
        first = session.arenas[0].layout.row_fields[0]
        read.append(session.arenas[0].field_view(first)[:700].int())
    # The first layer's keys come out of the same sums: a code differs where a rounding before it did, by one.
    difference = (read[0] - read[1]).abs()
    assert difference.max() <= 1
    assert (difference > 0).float().mean() < 0.02
