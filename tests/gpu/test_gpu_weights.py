"""Kernels over codes against the numbers that the codes mean, and engines whose weights are codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parkd_engine.weights.kinds import Codes, WeightKind
from parkd_engine.weights.linear import QuantisedLinear
from torch import nn
from torch.nn.functional import gelu, silu

from benchmarks.gpu.lane import GpuLane, following
from tests.gpu.gpu_kit import MIB, assert_same, ids, opened, state_of, use_shapes
from tests.unit.engine.kit.quantised_models import KINDS, coded_experts, numbers_of, random_codes

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 8e-4}
CARD = "cuda:0"
WIDE = {
    "wide int4": WeightKind(Codes.INT4, 128),
    "wide int4-zeros": WeightKind(Codes.INT4, 256, has_zeros=True, scale_dtype=torch.float16),
    "wide int4-order": WeightKind(Codes.INT4, 128, has_zeros=True, is_ordered=True),
    "wide int8-zeros": WeightKind(Codes.INT8, 128, has_zeros=True),
    "int8-row-zeros": WeightKind(Codes.INT8, has_zeros=True),
    "wide fp8-blocks": WeightKind(Codes.FP8, 128, 128, scale_dtype=torch.float32),
}
"""Kinds that only the kernels on tensor cores read in groups; they read int8 and fp8 by rows too."""
EVERY = {**KINDS, **WIDE}
EVERY_KIND = pytest.mark.parametrize("kind", list(EVERY))
ON_TENSOR_CORES = [*WIDE, "int8", "fp8"]
EVERY_DTYPE = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)


def layer(
    kind: WeightKind, rows: int, columns: int, *, bias: torch.dtype | None = None, seed: int = 0
) -> QuantisedLinear:
    made = random_codes(kind, rows, columns, torch.Generator().manual_seed(seed + rows), CARD)
    if bias is not None:
        made.bias = nn.Parameter(torch.randn(rows, device=CARD).to(bias), requires_grad=False)
    return made


def needs_whole_groups(kind: WeightKind, columns: int) -> None:
    if not kind.fits(columns) or (kind.rows > 1 and kind.group > columns):
        pytest.skip("groups are wider")


def close(mine: torch.Tensor, reference: torch.Tensor, dtype: torch.dtype) -> None:
    error = (mine.float() - reference.float()).norm() / reference.float().norm()
    assert error < TOLERANCE[dtype], f"relative error {error:.2e}"


def normed(x: torch.Tensor, weight: torch.Tensor, plus: float = 0.0) -> torch.Tensor:
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean() + 1e-6) * (weight.float() + plus)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(7)


@EVERY_DTYPE
@EVERY_KIND
@pytest.mark.parametrize("columns", [192, 768, 5120])
@pytest.mark.parametrize("bias", [True, False])
def test_three_matrices_at_once(kind: str, dtype: torch.dtype, columns: int, bias: bool) -> None:
    """One of them is in full precision in the second product, so that each has its own launch."""
    needs_whole_groups(EVERY[kind], columns)
    from parkd_engine.kernels.matvec import matvec

    layers: list[Any] = [layer(EVERY[kind], rows, columns, bias=dtype if bias else None) for rows in (530, 128, 72)]
    x, weight = torch.randn(columns, device=CARD).to(dtype), (torch.rand(columns, device=CARD) + 0.5).to(dtype)
    matrices = [numbers_of(each) for each in layers]
    vector = normed(x, weight)
    biases = [each.bias if bias else torch.zeros(len(each.codes), device=CARD) for each in layers]
    expected = torch.cat([m @ vector + b for m, b in zip(matrices, biases, strict=True)])
    out = torch.full((730,), float("nan"), device=CARD, dtype=dtype)
    with torch.cuda.device(CARD):
        matvec(x, tuple(layers), out, norm=weight, eps=1e-6)
        close(out, expected, dtype)
        full = nn.Linear(columns, 128, bias=bias, device=CARD, dtype=dtype).requires_grad_(False)
        full.weight.copy_(matrices[1])
        if bias:
            full.bias.copy_(biases[1])
        out.fill_(float("nan"))
        matvec(x, (layers[0], full, layers[2]), out, norm=weight, eps=1e-6)
    close(out, expected, dtype)


@EVERY_DTYPE
@EVERY_KIND
def test_the_gated_product_and_a_sum_with_the_residual(kind: str, dtype: torch.dtype) -> None:
    from parkd_engine.kernels.matvec import gated, matvec

    gate, up = (layer(EVERY[kind], 333, 2560, seed=seed) for seed in (1, 2))
    x, weight = torch.randn(2560, device=CARD).to(dtype), (torch.randn(2560, device=CARD) / 4).to(dtype)
    residual = torch.randn(333, device=CARD).to(dtype)
    out, other = torch.full((2, 333), float("nan"), device=CARD, dtype=dtype)
    one, two = numbers_of(gate), numbers_of(up)
    added = one @ x.float() + residual.float()
    with torch.cuda.device(CARD):
        gated(x, gate, up, out, norm=weight, offset=True, eps=1e-6, gelu=True)
        gated(x, gate, up, other)
        matvec(x, (gate,), residual, residual=residual)
    vector = normed(x, weight, 1.0)
    close(out, gelu(one @ vector, approximate="tanh") * (two @ vector), dtype)
    close(other, silu(one @ x.float()) * (two @ x.float()), dtype)
    close(residual, added, dtype)


@EVERY_DTYPE
@EVERY_KIND
@pytest.mark.parametrize("tokens", [2, 3, 16])
@pytest.mark.parametrize("columns", [192, 256, 5120])
def test_a_few_tokens_give_what_each_gives_alone(kind: str, dtype: torch.dtype, columns: int, tokens: int) -> None:
    """To the bit; and so does the layer itself."""
    needs_whole_groups(EVERY[kind], columns)
    from parkd_engine.kernels.few_tokens import products

    each = layer(EVERY[kind], 333, columns, bias=dtype)
    x = torch.randn((tokens, columns), device=CARD).to(dtype)
    together, alone = torch.full((2, tokens, 333), float("nan"), device=CARD, dtype=dtype)
    with torch.cuda.device(CARD):
        products(x, each, together)
        for token in range(tokens):
            products(x[token][None], each, alone[token][None])
    assert torch.equal(together, alone)
    assert torch.equal(each(x), together)
    close(together, x.float() @ numbers_of(each).T + each.bias, dtype)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0), reason="no such tensor cores"
)
@EVERY_DTYPE
@pytest.mark.parametrize("kind", ON_TENSOR_CORES)
@pytest.mark.parametrize("columns", [640, 17_408])
def test_tensor_cores_take_them_and_agree_with_the_other_kernels(kind: str, dtype: torch.dtype, columns: int) -> None:
    """Up to the order of sums; whether the vectors lie in shared memory or not changes no bit, nor does a division that
    reads further ahead."""
    from parkd_engine.kernels import coded, codes

    kind_of_weights = EVERY[kind]
    needs_whole_groups(kind_of_weights, columns)
    each = layer(kind_of_weights, 70, columns, bias=dtype)
    x = torch.randn((16, columns), device=CARD).to(dtype)
    mine, direct, further, other = torch.full((4, 16, 70), float("nan"), device=CARD, dtype=dtype)
    warps = coded.division_of(each).warps
    with torch.cuda.device(CARD):
        for token in range(16):
            assert coded.product(x[token], (each,), mine[token])
            assert coded.product(x[token], (each,), further[token], division=coded.Division(warps, 1))
            codes.matvec(x[token], (each,), other[token], tiling=codes.BYTES)
        assert coded.product(x, (each,), direct)
    assert torch.equal(mine, direct)
    assert torch.equal(mine, further)
    close(mine, other, dtype)


@EVERY_DTYPE
@EVERY_KIND
def test_a_prompt_multiplies_by_the_numbers(kind: str, dtype: torch.dtype) -> None:
    each = layer(EVERY[kind], 333, 1280)
    x = torch.randn((1, 40, 1280), device=CARD).to(dtype)
    stored = each.numbers(torch.float32, 5, 300)
    expected = numbers_of(each)
    in_order = expected if each.order is None else expected[:, each.order.long()]
    assert torch.equal(stored, in_order[5:300])
    assert torch.equal(each(x), each.in_order(x) @ in_order.to(dtype).T)
    close(each(x), x.float() @ expected.T, dtype)


class _Silu(nn.Module):
    """A library's module of experts, as far as it is used: `[experts, 2 * inner, hidden]` and the way down."""

    is_transposed, has_gate, num_experts = False, True, 5

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(self.num_experts, 2 * inner, hidden, device="meta"))
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, hidden, inner, device="meta"))
        for name, rows in (("gate_up_proj_bias", 2 * inner), ("down_proj_bias", hidden)):
            setattr(self, name, nn.Parameter(torch.randn(self.num_experts, rows, device=CARD)))

    @staticmethod
    def _apply_gate(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return silu(gate) * up


EXPERT_KINDS = {
    **{name: kind for name, kind in EVERY.items() if not kind.is_ordered and kind.rows == 1},
    "fp8-blocks": WeightKind(Codes.FP8, 64, 32, scale_dtype=torch.float32),
}


@EVERY_DTYPE
@pytest.mark.parametrize("kind", list(EXPERT_KINDS))
def test_experts_over_codes(kind: str, dtype: torch.dtype) -> None:
    """A token of a few has the same bits alone; a few and many are near the numbers that the codes mean."""
    library = _Silu(768, 256).to(dtype)
    draw = torch.Generator().manual_seed(3)
    coded = coded_experts(library, EXPERT_KINDS[kind], draw)
    if coded is None:
        pytest.skip("groups are wider")
    coded = coded.to(CARD)
    wide, down = (numbers_of(each).view(5, -1, each.in_features) for each in (coded.gate_up_proj, coded.down_proj))
    for tokens in (9, 70):
        hidden = torch.randn((tokens, 768), device=CARD).to(dtype)
        index = torch.rand((tokens, 4), generator=draw).topk(2).indices.to(CARD)
        weights = torch.rand((tokens, 2), device=CARD).to(dtype)
        expected = torch.zeros((tokens, 768), device=CARD)
        for token in range(tokens):
            for place in range(2):
                expert = int(index[token, place])
                inner = library._apply_gate(wide[expert] @ hidden[token].float() + coded.gate_up_proj_bias[expert])
                expected[token] += weights[token, place] * (down[expert] @ inner + coded.down_proj_bias[expert])
        with torch.inference_mode():
            out = coded(hidden, index, weights)
            again = coded(hidden, index, weights)
            alone = coded(hidden[3:4], index[3:4], weights[3:4])
        assert torch.equal(out, again)
        assert tokens > 16 or torch.equal(out[3:4], alone)
        error = (out.float() - expected).norm() / expected.norm()
        assert error < 2 * TOLERANCE[dtype], f"relative error {error:.2e}"  # Two products and a gate, each rounded.


@pytest.mark.anyio
@pytest.mark.parametrize("weights", ["int4", "int8", "fp8"])
@pytest.mark.parametrize("kind", ["dense", "sliding", "hybrid", "drafting-echo", "experts", "sinks"])
async def test_a2_after_b_is_a2_never_interrupted(
    kind: str, weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of int8; decoding and chunks are recorded."""
    use_shapes(monkeypatch)
    layout = {"draft_tokens": 2} if kind == "drafting-echo" else {}
    engine = opened(kind, (CARD,), tmp_path, weights=weights, kv_format="int8", context_tokens=16_384, **layout)
    assert any(isinstance(module, QuantisedLinear) for module in engine.session.stages[0].inner.modules())
    assert engine.session.forward.decode_graph is not None
    lane = GpuLane(engine, 512 * MIB)
    a1, b1 = ids(5000, 1), ids(3000, 2)
    first = await lane.turn(lane.prompt("whole", a1), 12)
    a2 = following(a1, first, ids(20, 3))
    whole = await lane.turn(lane.prompt("whole", a2), 12)
    await lane.live.settle()
    expected = state_of(engine)
    await lane.live.reset()
    again = await lane.turn(lane.prompt("parted", a1), 12)
    await lane.turn(lane.prompt("parted", b1), 12)
    back = await lane.turn(lane.prompt("parted", a2), 12)
    assert back.outcome == "restored-ram"
    assert (again.tokens, back.tokens) == (first.tokens, whole.tokens)
    assert_same(state_of(engine), expected)
    await lane.live.settle()
    lane.close()
