"""Latent attention of few tokens goes over the latents themselves, and gives what keys and values of all would give."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from parkd_engine.forward.attention import ATTENTION_NAME, arena_attention
from parkd_engine.forward.latents import MOST_TOKENS, LatentStates
from parkd_engine.weights.linear import matrix_of
from torch import nn
from transformers import DynamicCache

from tests.unit.engine.kit.core_models import read_and_decode, tiny_session, token_ids
from tests.unit.engine.kit.hybrid_models import hybrid_model
from tests.unit.engine.kit.quantised_models import KINDS, numbers_of, random_codes

HEADS, RANK, PLAIN, ROTARY, VALUE, TOKENS = 3, 24, 12, 8, 10, 37
SCALE = 0.3
FAMILIES = pytest.mark.parametrize("family", ["deepseek-v2", "deepseek-v3", "glm4-lite"])


def never(*_: Any) -> Any:
    raise AssertionError("keys and values were computed")


def made(dtype: torch.dtype = torch.float32, expand: Any = never) -> LatentStates:
    torch.manual_seed(0)
    projection = nn.Linear(RANK, HEADS * (PLAIN + VALUE), bias=False).to(dtype)
    module = SimpleNamespace(kv_b_proj=projection, qk_nope_head_dim=PLAIN, qk_rope_head_dim=ROTARY, v_head_dim=VALUE)
    latents, rotary = torch.randn(1, 1, TOKENS, RANK, dtype=dtype), torch.randn(1, 1, TOKENS, ROTARY, dtype=dtype)
    return LatentStates(module, latents, rotary, expand)


def plainly(states: LatentStates, query: torch.Tensor) -> torch.Tensor:
    """`[q, heads, value]` in float64, token by token and head by head, from keys and values."""
    weight = states.module.kv_b_proj.weight.double().view(HEADS, PLAIN + VALUE, RANK)
    latents, rotary = states.latents[0, 0].double(), states.rotary[0, 0].double()
    tokens = query.shape[2]
    out = torch.empty(tokens, HEADS, VALUE, dtype=torch.float64)
    for head in range(HEADS):
        keys = torch.cat([latents @ weight[head, :PLAIN].T, rotary], dim=1)
        values = latents @ weight[head, PLAIN:].T
        for token in range(tokens):
            seen = TOKENS - tokens + token + 1
            scores = keys[:seen] @ query[0, head, token].double() * SCALE
            out[token, head] = torch.softmax(scores, 0) @ values[:seen]
    return out


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("tokens", [1, 3, MOST_TOKENS])
def test_few_tokens_see_the_latents_before_them(tokens: int, dtype: torch.dtype, tolerance: float) -> None:
    states = made(dtype)
    query = torch.randn(1, HEADS, tokens, PLAIN + ROTARY).to(dtype)
    found, _ = arena_attention(nn.Identity(), query, states, states, None, scaling=SCALE)
    assert found.shape == (1, tokens, HEADS, VALUE)
    torch.testing.assert_close(found[0].double(), plainly(states, query), atol=tolerance, rtol=0)


def test_a_token_has_the_same_bits_alone_and_beside_others() -> None:
    states = made()
    query = torch.randn(1, HEADS, 4, PLAIN + ROTARY)
    together = states.attend(query, SCALE)
    for token in range(4):
        seen = TOKENS - 3 + token
        alone = LatentStates(states.module, states.latents[:, :, :seen], states.rotary[:, :, :seen], never)
        assert torch.equal(alone.attend(query[:, :, token, None], SCALE)[0, :, 0], together[0, :, token])


def test_a_chunk_computes_keys_and_values_once() -> None:
    calls = []

    def expand(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(given)
        return torch.zeros(1, HEADS, TOKENS, PLAIN + ROTARY), torch.ones(1, HEADS, TOKENS, VALUE)

    states = made(expand=expand)
    query = torch.randn(1, HEADS, MOST_TOKENS + 1, PLAIN + ROTARY)
    found, _ = arena_attention(nn.Identity(), query, states, states, None, scaling=SCALE)
    assert calls == [(states.module, states.latents, states.rotary)]
    torch.testing.assert_close(found, torch.ones_like(found))


@FAMILIES
def test_decoded_logits_agree_with_the_librarys_own_attention(family: str) -> None:
    """Which the model runs before a session changes its attention: keys and values of all tokens in every step."""
    ids = token_ids(100)
    model = hybrid_model(family)
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        assert model.config._attn_implementation == "sdpa"
        model(torch.from_numpy(ids)[None, :95], cache=cache, use_cache=True)
        steps = (model(torch.tensor([[token]]), cache=cache, use_cache=True) for token in ids[95:])
        expected = [step.logits[0, -1] for step in steps]
    for one, other in zip(read_and_decode(tiny_session(2, model), ids, decoded=5), expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=0)


@FAMILIES
def test_a_decoded_token_computes_no_keys_of_earlier_ones(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    session = tiny_session(2, hybrid_model(family))
    session.extend(token_ids(60))
    attention: Any = session.stages[0].layers[0].self_attn
    assert attention.config._attn_implementation == ATTENTION_NAME
    seen: list[int] = []
    attention.kv_b_proj.register_forward_pre_hook(lambda _module, given: seen.append(given[0].shape[-2]))
    session.step(1)
    assert seen == []
    session.extend(token_ids(40))  # Three tokens to the end of the batch, and a chunk.
    assert seen == [60 + 1 + 40]


@pytest.mark.parametrize("kind", ["int4-order", "int8", "fp8-blocks"])
def test_the_matrix_of_codes_has_the_columns_in_the_order_of_vectors(kind: str) -> None:
    """`int4-order`: as gptq stores them with `desc_act`."""
    layer = random_codes(KINDS[kind], 24, 192, torch.Generator().manual_seed(0))
    torch.testing.assert_close(matrix_of(layer, torch.float32), numbers_of(layer), atol=1e-6, rtol=0)
