"""The kernels against the same sums in float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention, silu

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 8e-4}
DTYPES = list(TOLERANCE)
LAST = f"cuda:{max(0, torch.cuda.device_count() - 1)}"


def close(mine: torch.Tensor, reference: torch.Tensor, dtype: torch.dtype) -> None:
    error = (mine.float() - reference.float()).norm() / reference.float().norm()
    assert error < TOLERANCE[dtype], f"relative error {error:.2e}"


def linear(rows: int, columns: int, dtype: torch.dtype, *, bias: bool = False) -> Any:
    layer = nn.Linear(columns, rows, bias=bias, device=LAST, dtype=dtype)
    return layer.requires_grad_(False)


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean() + 1e-6) * weight.float()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(7)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [96, 1024, 4096, 5000])
@pytest.mark.parametrize("bias", [True, False])
def test_three_matrices_at_once(dtype: torch.dtype, width: int, bias: bool) -> None:
    from engine.kernels.matvec import matvec

    layers = tuple(linear(rows, width, dtype, bias=bias) for rows in (530, 128, 72))
    x = torch.randn(width, device=LAST).to(dtype)
    weight = torch.rand(width, device=LAST).to(dtype) + 0.5
    out = torch.full((730,), float("nan"), device=LAST, dtype=dtype)
    with torch.cuda.device(LAST):
        matvec(x, layers, out, norm=weight, eps=1e-6)
    biases = [layer.bias.float() if bias else 0.0 for layer in layers]
    products = [layer.weight.float() @ normed(x, weight) + b for layer, b in zip(layers, biases, strict=True)]
    close(out, torch.cat(products), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sum_with_the_residual_in_place(dtype: torch.dtype) -> None:
    from engine.kernels.matvec import matvec

    layer = linear(300, 4096, dtype)
    x, residual = torch.randn(4096, device=LAST).to(dtype), torch.randn(300, device=LAST).to(dtype)
    expected = layer.weight.float() @ x.float() + residual.float()
    with torch.cuda.device(LAST):
        matvec(x, (layer,), residual, residual=residual)
    close(residual, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gated_product(dtype: torch.dtype) -> None:
    from engine.kernels.matvec import gated

    gate, up = linear(333, 4096, dtype), linear(333, 4096, dtype)
    x = torch.randn(4096, device=LAST).to(dtype)
    weight = torch.rand(4096, device=LAST).to(dtype) + 0.5
    out = torch.empty(333, device=LAST, dtype=dtype)
    with torch.cuda.device(LAST):
        gated(x, gate, up, out, norm=weight, eps=1e-6)
    vector = normed(x, weight)
    close(out, silu(gate.weight.float() @ vector) * (up.weight.float() @ vector), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 64, 65, 2047, 2048, 2049, 9000])
@pytest.mark.parametrize(("q_heads", "kv_heads", "dim"), [(32, 8, 128), (6, 2, 16), (5, 1, 80), (4, 4, 64)])
def test_attention_over_strided_rows(dtype: torch.dtype, length: int, q_heads: int, kv_heads: int, dim: int) -> None:
    from engine.kernels.attend import DecodeAttention

    width = kv_heads * dim
    rows = torch.randn((9001, 4 * width), device=LAST).to(dtype)
    rows[length:] = float("nan")  # What lies behind the position is never read into a result.
    keys, values = (rows[:, at * width : (at + 1) * width].view(9001, kv_heads, dim) for at in (1, 2))
    query = torch.randn(q_heads * dim, device=LAST).to(dtype)
    out = torch.empty_like(query)
    with torch.cuda.device(LAST):
        attend = DecodeAttention(q_heads, kv_heads, dim, torch.device(LAST))
        attend(query, keys, values, torch.tensor([length - 1], device=LAST), out, dim**-0.5)
    expected = scaled_dot_product_attention(
        query.view(1, q_heads, 1, dim).float(),
        keys[:length].transpose(0, 1)[None].float(),
        values[:length].transpose(0, 1)[None].float(),
        enable_gqa=True,
    )
    close(out, expected.flatten(), dtype)


@pytest.mark.parametrize("length", [1, 65, 2049, 9000])
@pytest.mark.parametrize(("q_heads", "kv_heads", "dim"), [(32, 8, 128), (24, 4, 256), (6, 2, 16), (5, 1, 80)])
def test_attention_over_codes(length: int, q_heads: int, kv_heads: int, dim: int) -> None:
    """Heads of very different scales, and values that are all zero in some rows."""
    from engine.kernels.attend import DecodeAttention
    from engine.kv_format import quantise

    sizes = torch.logspace(-4, 2, kv_heads, device=LAST)[:, None]
    states = [torch.randn((9001, kv_heads, dim), device=LAST) * sizes for _ in range(2)]
    states[1][1::3] = 0.0
    (keys, key_scales), (values, value_scales) = (quantise(each) for each in states)
    scales = torch.stack([key_scales, value_scales], dim=1)
    scales[length:] = float("nan")
    query = (torch.randn((kv_heads, q_heads // kv_heads, dim), device=LAST) / sizes[:, None]).flatten().bfloat16()
    out = torch.empty_like(query)
    with torch.cuda.device(LAST):
        attend = DecodeAttention(q_heads, kv_heads, dim, torch.device(LAST), codes=True)
        attend(query, keys, values, torch.tensor([length - 1], device=LAST), out, dim**-0.5, scales)
    numbers = [codes[:length] * scales[:length, part, :, None].float() for part, codes in enumerate((keys, values))]
    expected = scaled_dot_product_attention(
        query.view(1, q_heads, 1, dim).float(), *(each.transpose(0, 1)[None] for each in numbers), enable_gqa=True
    )
    for head in range(q_heads):
        close(out.view(q_heads, dim)[head], expected[0, head, 0], torch.bfloat16)


@pytest.mark.parametrize("window", [1, 64, 1000])
def test_attention_sees_a_window_only(window: int) -> None:
    from engine.kernels.attend import DecodeAttention

    rows = torch.randn((3000, 2, 2, 64), device=LAST).bfloat16()
    query = torch.randn(4 * 64, device=LAST).bfloat16()
    out = torch.empty_like(query)
    rows[: 2500 - window] = float("nan")
    with torch.cuda.device(LAST):
        attend = DecodeAttention(4, 2, 64, torch.device(LAST))
        attend(query, rows[:, 0], rows[:, 1], torch.tensor([2499], device=LAST), out, 0.125, window=window)
    seen = rows[2500 - window : 2500].float()
    keys, values = (seen[:, part].transpose(0, 1)[None] for part in (0, 1))
    expected = scaled_dot_product_attention(query.view(1, 4, 1, 64).float(), keys, values, enable_gqa=True)
    close(out, expected.flatten(), torch.bfloat16)


@pytest.mark.parametrize("words", [7, 40_000, 100_001])
def test_sums_of_blocks_are_those_of_the_definition(words: int) -> None:
    from engine.kernels.sums import block_sums

    data = torch.randint(-(2**63), 2**63 - 1, (words,), device=LAST)
    with torch.cuda.device(LAST):
        sums = block_sums(data, 40_000).cpu().numpy().view(np.uint64)
    unsigned = data.cpu().numpy().view(np.uint64)
    for index, start in enumerate(range(0, words, 40_000)):
        part = unsigned[start : start + 40_000]
        with np.errstate(over="ignore"):
            expected = (part * np.arange(1, 2 * len(part) + 1, 2, dtype=np.uint64)).sum(dtype=np.uint64)
        assert sums[index] == expected
