"""Models with quantised weights: exact where they leave and return, and as near to what their codes mean as can be."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from parkd_engine import EngineConfig, open_session, restore
from parkd_engine.forward import stages as stages_module
from parkd_engine.forward.stages import moved_twin
from parkd_engine.loading.draft_loading import declare_head
from parkd_engine.loading.fingerprint import TILES, kernels_of
from parkd_engine.weights import linear as linear_module
from parkd_engine.weights.kinds import Codes, WeightKind, packed, unpacked
from parkd_engine.weights.linear import QuantisedLinear
from parkd_engine.weights.rounding import rounded
from parkd_engine.weights.schemes import OWN_KINDS
from parkd_engine.weights.tiles import put_tiles, tile_rows
from torch.nn.functional import linear

from tests.unit.engine.kit.core_models import assert_same, step_with_guesses, tiny_session, token_ids
from tests.unit.engine.kit.hybrid_models import HYBRIDS
from tests.unit.engine.kit.parking import parked, resumed_at
from tests.unit.engine.kit.quantised_models import KINDS, NARROW, numbers_of, put_numbers, quantised_model, random_codes

EVERY_KIND = pytest.mark.parametrize("kind", list(KINDS))
HAS_TILES = pytest.mark.skipif(tile_rows() is None, reason="torch has no product over int4 codes here")
BATCH = 48
CASES = [
    *(
        (family, kind, 2, "int8" if kind.startswith("int") else None)
        for kind in KINDS
        for family in ("qwen2", "qwen3.5-mtp")
    ),
    *((family, "int8" if family in NARROW else "int4", 3, None) for family in HYBRIDS if family != "qwen3.5-mtp"),
    *((family, "int8", 1, "int8") for family in ("llama", "gemma3", "deepseek-v3")),
    ("gpt-oss", "fp4", 2, None),
    ("qwen3.5-moe", "fp4-rows", 2, "int8"),
]


def layer(kind: WeightKind, rows: int = 60, columns: int = 192, seed: int = 0) -> QuantisedLinear:
    return random_codes(kind, rows, columns, torch.Generator().manual_seed(seed))


def model_of(family: str, kind: str) -> Any:
    model = quantised_model(family.removesuffix("-mtp"), kind)
    if family.endswith("-mtp"):
        declare_head(model.config)
    return model


@pytest.mark.parametrize(("family", "kind", "stages", "kv_format"), CASES, ids=str)
def test_a_quantised_model_resumes_as_if_never_left(family: str, kind: str, stages: int, kv_format: str | None) -> None:
    """Bit for bit, at checkpoints, after another conversation was there."""
    session = tiny_session(stages, model_of(family, kind), batch_tokens=BATCH, context=256, kv_format=kv_format)
    ids, others, places = token_ids(101), token_ids(90, seed=9), (40, 75, 100)

    def read_on() -> list[torch.Tensor]:
        for place in places:
            session.extend(ids[session.position : place], checkpoint_at=places)
        return step_with_guesses(session, int(ids[100]))

    expected = read_on()
    plan = parked(session, places, 100)
    for place in places:
        session.reset()
        session.extend(others)
        session.reset()
        restore(session, resumed_at(plan, place))
        assert_same(read_on(), expected)


@EVERY_KIND
def test_codes_become_the_numbers_of_their_definition(kind: str) -> None:
    each = layer(KINDS[kind])
    stored = each.numbers(torch.float32, 7, 44)
    expected = numbers_of(each)[7:44]
    assert torch.equal(stored, expected if each.order is None else expected[:, each.order.long()])


def test_words_hold_every_code() -> None:
    codes = torch.randint(0, 16, (5, 96), dtype=torch.uint8)
    assert torch.equal(unpacked(packed(codes)), codes)
    assert packed(codes).dtype == torch.int32


@EVERY_KIND
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_a_product_is_that_of_the_numbers(kind: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, and some rows at a time."""
    each = layer(KINDS[kind])
    each.bias = torch.nn.Parameter(torch.randn(60), requires_grad=False)
    x = torch.randn(2, tokens, 192)
    expected = linear(x, numbers_of(each), each.bias)
    with torch.inference_mode():
        torch.testing.assert_close(each(x), expected, atol=2e-5, rtol=2e-5)
        monkeypatch.setattr(linear_module, "WORKSPACE_BYTES", 7 * 192 * 4)
        torch.testing.assert_close(each(x), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("family", "kind"), [("qwen3", "int4-zeros"), ("qwen3.5", "int8"), ("qwen3", "fp8-blocks")])
def test_logits_are_as_near_as_those_of_torchs_own_half_product(family: str, kind: str) -> None:
    """To a model in float32 with the numbers that the codes mean; in bf16 beside bf16 of them."""
    model = quantised_model(family, kind)
    exact = put_numbers(copy.deepcopy(model), torch.float32)
    own = put_numbers(copy.deepcopy(model), torch.bfloat16)
    mine = model.to(torch.bfloat16)
    ids = torch.from_numpy(token_ids(120))[None]
    with torch.inference_mode():
        reference = exact(ids).logits
        errors = [float((each(ids).logits.float() - reference).abs().mean()) for each in (mine, own)]
    assert errors[0] <= 1.1 * errors[1]


QUICK_SHAPE = (64, 192)


@pytest.mark.parametrize("tokens", [1, 3, 16, 17])
@pytest.mark.parametrize("bias", [True, False])
def test_a_few_vectors_are_multiplied_by_int8_codes_on_a_cpu(
    tokens: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To within bf16, without numbers, and each vector as if alone; more vectors through numbers."""
    made: list[int] = []
    usual = linear_module.numbers

    def noted(*arguments: Any, **named: Any) -> torch.Tensor:
        made.append(1)
        return usual(*arguments, **named)

    monkeypatch.setattr(linear_module, "numbers", noted)
    each = layer(WeightKind(Codes.INT8), *QUICK_SHAPE)
    if bias:
        each.bias = torch.nn.Parameter(torch.randn(64), requires_grad=False)
    x = torch.randn(tokens, 192)
    expected = linear(x, numbers_of(each), each.bias)
    with torch.inference_mode():
        out = each(x[None])
        alone = torch.cat([each(x[at : at + 1]) for at in range(min(tokens, 16))])
    assert out.dtype == torch.float32
    assert bool(made) == (tokens > 16)
    torch.testing.assert_close(out[0], expected, atol=2e-2, rtol=2e-2)
    if tokens <= 16:
        assert torch.equal(out[0], alone)


@pytest.mark.parametrize(
    ("kind", "rows", "columns"),
    [
        (WeightKind(Codes.INT8), 60, 192),
        (WeightKind(Codes.INT8), 64, 176),
        (WeightKind(Codes.INT8, 64), 64, 192),
        (WeightKind(Codes.INT8, has_zeros=True), 64, 192),
        (WeightKind(Codes.INT8, is_ordered=True), 64, 192),
        (WeightKind(Codes.INT8, scale_dtype=torch.float32), 64, 192),
        (WeightKind(Codes.FP8), 64, 192),
        (WeightKind(Codes.INT4, 64), 64, 192),
    ],
    ids=str,
)
def test_what_that_product_does_not_take_becomes_numbers(kind: WeightKind, rows: int, columns: int) -> None:
    """To within float32; of some shapes it would read beyond the end."""
    each = layer(kind, rows, columns)
    x = torch.randn(1, columns)
    with torch.inference_mode():
        torch.testing.assert_close(each(x), linear(x, numbers_of(each)), atol=2e-5, rtol=2e-5)


@HAS_TILES
@pytest.mark.parametrize("tokens", [1, 3, 8, 9])
@pytest.mark.parametrize("group", [32, 64])
def test_a_few_vectors_are_multiplied_by_int4_codes_in_tiles(
    tokens: int, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To within bf16, without numbers, and each vector as if alone; more vectors through numbers, to within float32."""
    made: list[int] = []
    usual = linear_module.meaning

    def noted(*arguments: Any, **named: Any) -> torch.Tensor:
        made.append(1)
        return usual(*arguments, **named)

    monkeypatch.setattr(linear_module, "meaning", noted)
    each = layer(WeightKind(Codes.INT4, group), 128, 192)
    each.bias = torch.nn.Parameter(torch.randn(128), requires_grad=False)
    matrix, size = numbers_of(each), each.nbytes
    put_tiles(torch.nn.Sequential(each))
    assert each.nbytes == size + 128 * 192 // group * 2
    x = torch.randn(tokens, 192)
    expected = linear(x, matrix, each.bias)
    with torch.inference_mode():
        out = each(x[None])[0]
        alone = torch.cat([each(x[at : at + 1]) for at in range(min(tokens, 8))])
    assert out.dtype == torch.float32
    assert bool(made) == (tokens > 8)
    loose = 2e-2 if tokens <= 8 else 2e-5
    torch.testing.assert_close(out, expected, atol=loose, rtol=loose)
    if tokens <= 8:
        assert torch.equal(out, alone)
    for first, end in ((0, 128), (7, 44), (60, 70), (64, 128)):
        assert torch.equal(each.numbers(torch.float32, first, end), matrix[first:end])


@HAS_TILES
@pytest.mark.parametrize(
    ("kind", "rows", "columns"),
    [
        (WeightKind(Codes.INT4, 64), 60, 192),
        (WeightKind(Codes.INT4, 96), 64, 192),
        (WeightKind(Codes.INT4), 64, 192),
        (WeightKind(Codes.INT4, 64, has_zeros=True), 64, 192),
        (WeightKind(Codes.INT4, 64, is_ordered=True), 64, 192),
        (WeightKind(Codes.INT4, 64, scale_dtype=torch.float16), 64, 192),
        (KINDS["fp4"], 64, 192),
    ],
    ids=str,
)
def test_codes_that_the_product_does_not_take_stay_in_words(kind: WeightKind, rows: int, columns: int) -> None:
    each = layer(kind, rows, columns)
    before = each.codes
    put_tiles(torch.nn.Sequential(each))
    assert each.codes is before
    assert each.tile_rows == 0


@HAS_TILES
def test_codes_in_tiles_are_in_the_fingerprint() -> None:
    """And only where all stages are on CPUs are codes in tiles."""
    model = quantised_model("qwen3", "int4")
    session = open_session(model, EngineConfig(("cpu",), context_tokens=64))
    assert kernels_of(session.stages, model.config) == (TILES,)
    other = quantised_model("qwen3", "int8")
    assert kernels_of(open_session(other, EngineConfig(("cpu",), context_tokens=64)).stages, other.config) == ()
    mixed = quantised_model("qwen3", "int4")
    stages_module.place(mixed, [(0, 2), (2, 4)], ("cpu", "meta"))
    assert not any(part.tile_rows for part in mixed.modules() if isinstance(part, QuantisedLinear))


@pytest.mark.parametrize("kind", ["int8", pytest.param("int4", marks=HAS_TILES)])
@pytest.mark.parametrize("family", ["qwen3", "qwen3.5"])
def test_decoding_on_a_cpu_is_as_near_as_torchs_own_half_product(family: str, kind: str) -> None:
    """Token by token in float32, beside bf16 of the numbers."""
    model = quantised_model(family, kind, hidden_size=192, intermediate_size=128)
    exact = put_numbers(copy.deepcopy(model), torch.float32)
    own = put_numbers(copy.deepcopy(model), torch.bfloat16)
    put_tiles(model)
    assert (kind == "int4") == any(part.tile_rows for part in model.modules() if isinstance(part, QuantisedLinear))
    ids = torch.from_numpy(token_ids(40))[None]

    def decoded(each: Any) -> torch.Tensor:
        cache, logits = None, []
        for at in range(ids.shape[1]):
            out = each(ids[:, at : at + 1], cache=cache, use_cache=True)
            cache = out.cache
            logits.append(out.logits[0, 0].float())
        return torch.stack(logits)

    with torch.inference_mode():
        reference = decoded(exact)
        errors = [float((decoded(each) - reference).abs().mean()) for each in (model, own)]
    assert 0 < errors[0] <= 1.1 * errors[1]


@EVERY_KIND
def test_a_change_of_dtype_leaves_codes_and_scales(kind: str) -> None:
    each = layer(KINDS[kind])
    each.bias = torch.nn.Parameter(torch.randn(60))
    before = each.numbers(torch.float32)
    each.to(torch.float16)
    assert each.bias.dtype == torch.float16
    assert torch.equal(each.numbers(torch.float32), before)
    assert each.codes.dtype == layer(KINDS[kind]).codes.dtype


@EVERY_KIND
def test_a_moved_layer_shares_what_is_there_already(kind: str) -> None:
    each = layer(KINDS[kind])
    twin = moved_twin(each, torch.device("cpu"))
    assert isinstance(twin, QuantisedLinear)
    assert {name: buffer.data_ptr() for name, buffer in twin.named_buffers()} == {
        name: buffer.data_ptr() for name, buffer in each.named_buffers()
    }
    assert twin.kind == each.kind


@pytest.mark.parametrize("name", list(OWN_KINDS))
def test_rounding_is_to_the_nearest_code(name: str) -> None:
    """No other code of the same scale is nearer to the number."""
    kind = OWN_KINDS[name]
    torch.manual_seed(2)
    matrix = torch.randn(40, 256) * torch.logspace(-3, 1, 40)[:, None]
    matrix[3] = 0.0
    each = QuantisedLinear(kind, 256, 40, rounded(matrix, kind))
    scales = each.scales.float().repeat_interleave(256 // each.scales.shape[1], dim=1)
    if kind.codes is Codes.FP8:
        every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        every = every[every.isfinite()]
    else:
        every = torch.arange(-7.0, 8.0) if kind.codes is Codes.INT4 else torch.arange(-127.0, 128.0)
    least = (every[:, None, None] * scales - matrix).abs().amin(dim=0)
    mine = (each.numbers(torch.float32) - matrix).abs()
    torch.testing.assert_close(mine, least, atol=0, rtol=1e-5)
    assert bool((each.numbers(torch.float32)[3] == 0).all())


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"codes": torch.zeros(8, 64, dtype=torch.int8)}, "scales .* missing"),
        (
            {"codes": torch.zeros(8, 32, dtype=torch.int8), "scales": torch.ones(8, 1).bfloat16()},
            "codes .*8, 64.*8, 32",
        ),
        ({"codes": torch.zeros(8, 64), "scales": torch.ones(8, 1).bfloat16()}, "float32"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tensors: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QuantisedLinear(WeightKind(Codes.INT8), 64, 8, tensors)


def test_stages_share_codes_with_their_model() -> None:
    model = quantised_model("qwen3", "int4")
    session = open_session(model, EngineConfig(("cpu", "cpu"), context_tokens=64))
    parts = [part for stage in session.stages for part in stage.inner.modules()]
    held = {part.codes.data_ptr() for part in parts if isinstance(part, QuantisedLinear)}
    assert held == {
        module.codes.data_ptr()
        for name, module in model.named_modules()
        if isinstance(module, QuantisedLinear) and name != "lm_head"
    }
