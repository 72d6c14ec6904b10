"""When a kernel for prompts is used. That it is right on a card is `tests/gpu/test_gpu_kernels.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parkd_engine.forward.attention import of_chunk
from parkd_engine.kernels import prompt_attention
from parkd_engine.kernels.prompt_attention import PromptAttention, is_worth_it, kernel_for, kernel_name
from torch.nn.functional import scaled_dot_product_attention

CPU = torch.device("cpu")


def right(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **settings: Any) -> torch.Tensor:
    """What flashinfer's function gives, by its own definition."""
    assert settings == {"causal": True, "kv_layout": "NHD", "sm_scale": settings["sm_scale"], "backend": "fa3"}
    assert query.is_contiguous()
    seen = torch.ones((len(query), len(key)), dtype=torch.bool).tril(len(key) - len(query))
    each = (part.transpose(0, 1)[None].float() for part in (query, key, value))
    out = scaled_dot_product_attention(*each, attn_mask=seen, scale=settings["sm_scale"], enable_gqa=True)
    return out[0].transpose(0, 1).to(query.dtype)


class Wandering:
    """A kernel that adds a little more each time."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *arguments: Any, **settings: Any) -> torch.Tensor:
        self.calls += 1
        return right(*arguments, **settings) + self.calls * 1e-2


def upside_down(*arguments: Any, **settings: Any) -> torch.Tensor:
    return right(*arguments, **settings).flip(0)


@pytest.mark.parametrize(
    ("run", "reason"), [(right, None), (Wandering(), "differ from one call"), (upside_down, "are off by")]
)
def test_a_kernel_is_tried_before_it_is_used(run: Any, reason: str | None) -> None:
    fault = prompt_attention._fault(PromptAttention(run), CPU, torch.bfloat16, 64)
    assert fault is None if reason is None else reason in str(fault)


def test_only_large_chunks_are_worth_it() -> None:
    """A quarter as many heads need four times as many queries."""
    assert is_worth_it(2048, 32)
    assert is_worth_it(256, 32)
    assert not is_worth_it(255, 32)
    assert not is_worth_it(256, 8)
    assert is_worth_it(1024, 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_there_is_none_on_a_cpu(dtype: torch.dtype) -> None:
    query, rows = torch.zeros((1, 8, 2048, 64), dtype=dtype), torch.zeros((1, 2, 2048, 64), dtype=dtype)
    assert kernel_for(CPU, dtype, 64) is None
    assert kernel_name(CPU, dtype, 64) is None
    assert of_chunk(query, rows, rows, None) is None


@pytest.mark.parametrize(("tokens", "is_taken"), [(1024, True), (1023, False)])
def test_a_chunk_goes_through_it(tokens: int, is_taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the queries of a chunk in the order in which the model has them."""
    monkeypatch.setattr("parkd_engine.forward.attention.kernel_for", lambda *_: PromptAttention(right))
    query = torch.randn((1, tokens, 8, 64)).transpose(1, 2)
    rows = torch.randn((1500, 2, 2, 64))
    keys, values = (rows[:, part].transpose(0, 1)[None] for part in (0, 1))
    out = of_chunk(query, keys, values, 0.2)
    assert (out is not None) == is_taken
    if out is not None:
        seen = torch.ones((tokens, 1500), dtype=torch.bool).tril(1500 - tokens)
        expected = scaled_dot_product_attention(query, keys, values, attn_mask=seen, scale=0.2, enable_gqa=True)
        torch.testing.assert_close(out, expected[0].transpose(0, 1))
    assert of_chunk(query, keys, values[..., :32], 0.2) is None
