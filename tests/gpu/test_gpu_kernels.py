"""The kernels against the same sums in float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention, silu

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
    from parkd_engine.kernels.matvec import matvec

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
    from parkd_engine.kernels.matvec import matvec

    layer = linear(300, 4096, dtype)
    x, residual = torch.randn(4096, device=LAST).to(dtype), torch.randn(300, device=LAST).to(dtype)
    expected = layer.weight.float() @ x.float() + residual.float()
    with torch.cuda.device(LAST):
        matvec(x, (layer,), residual, residual=residual)
    close(residual, expected, dtype)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one card")
def test_a_kernel_is_never_launched_on_another_card() -> None:
    from parkd_engine.kernels.pointwise import offset_norm

    x = torch.randn((4, 64), device="cuda:1")
    with torch.cuda.device("cuda:0"), pytest.raises(RuntimeError, match="tensors on cuda:1 would run on cuda:0"):
        offset_norm(x, x[0], torch.empty_like(x), 1e-6)


def test_products_launched_early_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain of products, each of which reads what the one before wrote, as a graph and one by one."""
    from parkd_engine.forward.graphs import recorded
    from parkd_engine.kernels import matvec as products

    layers = [linear(rows, columns, torch.bfloat16) for rows, columns in [(1500, 600), (600, 1500)] * 20]
    outputs = [torch.empty(len(layer.weight), device=LAST, dtype=torch.bfloat16) for layer in layers]
    x = torch.randn(600, device=LAST).to(torch.bfloat16)

    def chain() -> None:
        for layer, source, out in zip(layers, [x, *outputs], outputs, strict=False):
            products.matvec(source, (layer,), out)

    graph = recorded(chain, torch.device(LAST))
    for _ in range(10):
        for out in outputs:
            out.fill_(float("nan"))
        graph.replay()
        early = outputs[-1].clone()
        assert not early.isnan().any()
    monkeypatch.setattr(products, "overlap", lambda _: {"EARLY": False})
    with torch.cuda.device(LAST):
        for layer, source, out in zip(layers, [x, *outputs], outputs, strict=False):
            products.matvec(source, (layer,), out)
            torch.cuda.synchronize()
    assert torch.equal(outputs[-1], early)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gated_product(dtype: torch.dtype) -> None:
    from parkd_engine.kernels.matvec import gated

    gate, up = linear(333, 4096, dtype), linear(333, 4096, dtype)
    x = torch.randn(4096, device=LAST).to(dtype)
    weight = torch.rand(4096, device=LAST).to(dtype) + 0.5
    out = torch.empty(333, device=LAST, dtype=dtype)
    with torch.cuda.device(LAST):
        gated(x, gate, up, out, norm=weight, eps=1e-6)
    vector = normed(x, weight)
    close(out, silu(gate.weight.float() @ vector) * (up.weight.float() @ vector), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [96, 2048, 5120, 10_240])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tokens", [2, 3, 16])
def test_a_few_tokens_give_what_each_gives_alone(dtype: torch.dtype, width: int, bias: bool, tokens: int) -> None:
    """To the bit."""
    from parkd_engine.kernels.few_tokens import products

    layer = linear(333, width, dtype, bias=bias)
    x = torch.randn((tokens, width), device=LAST).to(dtype)
    together, alone = torch.full((2, tokens, 333), float("nan"), device=LAST, dtype=dtype)
    with torch.cuda.device(LAST):
        products(x, layer, together)
        for token in range(tokens):
            products(x[token][None], layer, alone[token][None])
    assert torch.equal(together, alone)
    close(together, x.float() @ layer.weight.float().T + (layer.bias.float() if bias else 0.0), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_by_weights_plus_one_and_gelu(dtype: torch.dtype) -> None:
    from parkd_engine.kernels.matvec import gated, matvec
    from parkd_engine.kernels.pointwise import add_offset_norm

    gate, up = linear(333, 2560, dtype), linear(333, 2560, dtype)
    x, hidden = torch.randn((2, 2560), device=LAST).to(dtype)
    weight = torch.randn(2560, device=LAST).to(dtype) / 4
    vector = normed(x, 1.0 + weight.float())
    product, gates = torch.empty((2, 333), device=LAST, dtype=dtype)
    added = torch.empty_like(hidden)
    with torch.cuda.device(LAST):
        matvec(x, (gate,), product, norm=weight, offset=True, eps=1e-6)
        gated(x, gate, up, gates, norm=weight, offset=True, eps=1e-6, gelu=True)
        add_offset_norm(hidden, x, weight, added, 1e-6)
    close(product, gate.weight.float() @ vector, dtype)
    close(gates, gelu(gate.weight.float() @ vector, approximate="tanh") * (up.weight.float() @ vector), dtype)
    close(added, hidden.float() + vector, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 64, 65, 2047, 2048, 2049, 9000])
@pytest.mark.parametrize(("q_heads", "kv_heads", "dim"), [(32, 8, 128), (6, 2, 16), (5, 1, 80), (4, 4, 64)])
def test_attention_over_strided_rows(dtype: torch.dtype, length: int, q_heads: int, kv_heads: int, dim: int) -> None:
    from parkd_engine.kernels.attend import DecodeAttention

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
    from parkd_engine.arenas.kv_format import quantise
    from parkd_engine.kernels.attend import DecodeAttention

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
    from parkd_engine.kernels.attend import DecodeAttention

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
    from parkd_engine.kernels.sums import block_sums

    data = torch.randint(-(2**63), 2**63 - 1, (words,), device=LAST)
    with torch.cuda.device(LAST):
        sums = block_sums(data, 40_000).cpu().numpy().view(np.uint64)
    unsigned = data.cpu().numpy().view(np.uint64)
    for index, start in enumerate(range(0, words, 40_000)):
        part = unsigned[start : start + 40_000]
        with np.errstate(over="ignore"):
            expected = (part * np.arange(1, 2 * len(part) + 1, 2, dtype=np.uint64)).sum(dtype=np.uint64)
        assert sums[index] == expected


@pytest.mark.filterwarnings("ignore:.*falling back to its reference")
@pytest.mark.parametrize(("k_heads", "heads", "key", "value"), [(16, 48, 128, 128), (2, 4, 16, 16), (4, 8, 64, 32)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_gated_delta_net_moves_on_as_the_librarys(
    dtype: torch.dtype, k_heads: int, heads: int, key: int, value: int
) -> None:
    """Over several tokens: the window to the bit, the memory and what comes out but for rounding."""
    from parkd_engine.kernels.delta import move_memory, move_window
    from transformers.models.qwen3_5 import modeling_qwen3_5 as library

    channels = 2 * k_heads * key + heads * value
    made = {name: torch.randn(heads, device="cuda").to(dtype) for name in ("bias", "rate")}
    weight = (torch.randn(channels, 4, device="cuda") / 2).to(dtype)
    norm = library.Qwen3_5RMSNormGated(value).to("cuda", dtype)
    torch.nn.init.normal_(norm.weight)
    window = torch.randn(channels, 4, device="cuda").to(dtype)
    memory = torch.randn(heads, key, value, device="cuda")
    windows, memories = [window, window.clone()], [memory, memory.clone()]
    for _ in range(5):
        x, z = torch.randn(channels, device="cuda").to(dtype), torch.randn(heads, value, device="cuda").to(dtype)
        beta, decay = (torch.randn(heads, device="cuda").to(dtype) for _ in range(2))
        qkv, out = torch.empty_like(x), torch.empty_like(z)
        move_window(x, windows[0], weight, qkv)
        move_memory(qkv, z, beta, decay, made["bias"], made["rate"], norm.weight, memories[0], out, 1e-6)
        reference = library.causal_conv1d_update.__wrapped__
        theirs = reference(x[None, :, None], windows[1][None], weight, None, "silu")[0, :, 0]
        assert torch.equal(*windows)
        close(qkv, theirs, dtype)
        q, k, v = torch.split(qkv, [k_heads * key, k_heads * key, heads * value])
        forget = -made["rate"].float().exp() * torch.nn.functional.softplus(decay.float() + made["bias"])
        said, memories[1] = library.torch_recurrent_gated_delta_rule.__wrapped__(
            q.view(1, 1, k_heads, key),
            k.view(1, 1, k_heads, key),
            v.view(1, 1, heads, value),
            g=forget.view(1, 1, heads),
            beta=beta.sigmoid().view(1, 1, heads),
            initial_state=memories[1].view(1, heads, key, value),
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        assert (memories[0] - memories[1][0]).norm() < 1e-5 * memories[0].norm()
        with torch.no_grad():
            close(out, norm(said[0, 0], z), dtype)


@pytest.mark.parametrize(("rows", "width", "stride"), [(1, 5120, 5120), (24, 256, 512), (3, 80, 80)])
def test_a_norm_around_one(rows: int, width: int, stride: int) -> None:
    from parkd_engine.kernels.pointwise import offset_norm
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm

    norm = Qwen3_5RMSNorm(width).to("cuda", torch.bfloat16)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(rows, stride, device="cuda").to(torch.bfloat16)[:, :width]
    out = torch.empty(rows, width, device="cuda", dtype=torch.bfloat16)
    offset_norm(x, norm.weight, out, norm.eps)
    with torch.no_grad():
        close(out, norm(x), torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_the_kernel_for_prompts_reads_rows_where_they_are(dim: int, dtype: torch.dtype) -> None:
    """As near to float32 as torch's kernel, the same bits each time, and for a query the same in a smaller chunk. Both
    rows and queries are strided, as in an engine."""
    from parkd_engine.forward.attention import of_chunk

    rows = torch.randn((3000, 5, 2, dim), device=LAST).to(dtype)
    query = torch.randn((1, 2048, 8, dim), device=LAST).to(dtype).transpose(1, 2)
    keys, values = (rows[:, part].transpose(0, 1)[None] for part in (1, 3))
    with torch.cuda.device(LAST):
        mine = of_chunk(query, keys, values, dim**-0.5)
        if mine is None:
            pytest.skip("no kernel for prompts here")
        again = of_chunk(query, keys, values, dim**-0.5)
        fewer = of_chunk(query[:, :, :1200], keys[:, :, : 3000 - 848], values[:, :, : 3000 - 848], dim**-0.5)
    assert again is not None
    assert fewer is not None
    seen = torch.ones((2048, 3000), dtype=torch.bool, device=LAST).tril(952)
    expected = scaled_dot_product_attention(
        query.float(), keys.float(), values.float(), attn_mask=seen, scale=dim**-0.5, enable_gqa=True
    )
    close(mine, expected[0].transpose(0, 1), dtype)
    assert torch.equal(mine, again)
    assert torch.equal(mine[:1200], fewer)
