"""The kernel over codes on tensor cores, on a CPU: its source in C++, with PTX's tables of which thread holds what in
place of the instructions. What it gives on a card is `tests/gpu/test_gpu_weights.py`."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from parkd_engine.kernels import coded
from parkd_engine.kernels.coded import Division, Launch, planned
from parkd_engine.weights.kinds import Codes, WeightKind
from parkd_engine.weights.linear import QuantisedLinear
from torch.nn.functional import gelu, silu

from tests.unit.engine.kit.quantised_models import numbers_of, random_codes

COMPILER = shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

KIT = Path(__file__).parents[1] / "kit"
BF16, F16 = torch.bfloat16, torch.float16
KINDS = {
    "int4": WeightKind(Codes.INT4, 128),
    "int4-zeros": WeightKind(Codes.INT4, 256, has_zeros=True, scale_dtype=F16),
    "int4-rows": WeightKind(Codes.INT4),
    "int8": WeightKind(Codes.INT8),
    "int8-zeros": WeightKind(Codes.INT8, 128, has_zeros=True),
    "int8-row-zeros": WeightKind(Codes.INT8, has_zeros=True),
    "fp8": WeightKind(Codes.FP8, scale_dtype=torch.float32),
    "fp8-blocks": WeightKind(Codes.FP8, 128, 20, scale_dtype=torch.float32),
}
QUICK = ("int4", "int8", "fp8")
TOLERANCE = {BF16: 6e-3, F16: 8e-4}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs a launch; compiles each set of settings once."""
    folder, libraries = tmp_path_factory.mktemp("emulated"), {}

    def run(launch: Launch | None) -> None:
        assert launch is not None, "the kernel knows it"
        if launch.settings not in libraries:
            library = folder / f"{len(libraries)}.so"
            macros = [f"-D{name}={value}" for name, value in launch.settings]
            source = f'-DSOURCE="{Path(coded.__file__).parent / coded.FILE}"'
            options = ["-std=c++17", "-O0", "-w", "-shared", "-fPIC", "-x", "c++"]
            command = [str(COMPILER), *options, *macros, source, str(KIT / "emulated_cuda.h"), "-o", str(library)]
            subprocess.run(command, check=True)
            libraries[launch.settings] = ctypes.CDLL(str(library))
        libraries[launch.settings].run(ctypes.byref(launch.work), launch.programs)

    return run


def layer(kind: str, rows: int, columns: int, seed: int = 0) -> QuantisedLinear:
    return random_codes(KINDS[kind], rows, columns, torch.Generator().manual_seed(seed + rows))


def close(mine: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    error = float((mine.float() - expected).norm() / expected.norm())
    assert error < TOLERANCE[dtype], f"relative error {error:.2e}"


def plan(x: torch.Tensor, linears: Any, out: torch.Tensor, **named: Any) -> Launch | None:
    given = {"norm": None, "residual": None, "offset": False, "eps": 0.0, **named}
    return planned(x, linears, out, **given)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, BF16) for kind in QUICK),
        *(pytest.param(kind, BF16, marks=pytest.mark.slow) for kind in KINDS if kind not in QUICK),
        *(pytest.param(kind, F16, marks=pytest.mark.slow) for kind in ("int4-zeros", "int8", "fp8")),
    ],
)
def test_a_token_has_the_same_bits_alone_and_among_others(kind: str, dtype: torch.dtype, built: Any) -> None:
    """And they are those of the numbers that the codes mean. Rows that fill no program, more columns for one warp than
    for the other; vectors in shared memory and not."""
    torch.manual_seed(1)
    each = layer(kind, 21, 640 if KINDS[kind].group != 256 else 768)
    x = torch.randn((9, each.in_features)).to(dtype)
    together, alone = torch.full((2, 9, 21), float("nan"), dtype=dtype)
    divided = Division(2, 2)
    built(plan(x, (each,), together, division=divided, is_staged=False))
    for token in (0, 8):
        built(plan(x[token], (each,), alone[token], division=divided))
    close(together, x.float() @ numbers_of(each).T, dtype)
    assert torch.equal(alone[0], together[0])
    assert torch.equal(alone[8], together[8])


def test_how_far_ahead_codes_are_read_changes_no_bit(built: Any) -> None:
    torch.manual_seed(2)
    each, x = layer("int4", 16, 1280), torch.randn(1280).to(BF16)
    outs = torch.full((2, 16), float("nan"), dtype=BF16)
    for ahead, out in zip((1, 4), outs, strict=True):
        built(plan(x, (each,), out, division=Division(2, ahead)))
    assert torch.equal(outs[0], outs[1])
    close(outs[0], x.float() @ numbers_of(each).T, BF16)


@pytest.mark.parametrize("kind", ["int4", "fp8-blocks"])
def test_three_matrices_norm_bias_and_residual(kind: str, built: Any) -> None:
    torch.manual_seed(3)
    layers = [layer(kind, rows, 256, seed) for seed, rows in enumerate((33, 16, 8))]
    for each in layers:
        each.bias = torch.nn.Parameter(torch.randn(each.out_features).to(BF16), requires_grad=False)
    x, norm, residual = torch.randn(256).to(BF16), torch.rand(256).to(BF16), torch.randn(57).to(BF16)
    out, logits = torch.full((57,), float("nan"), dtype=BF16), torch.full((57,), float("nan"))
    settings: dict[str, Any] = {"norm": norm, "offset": True, "eps": 1e-6, "division": Division(2, 2)}
    built(plan(x, layers, out, residual=residual, **settings))
    built(plan(x, layers, logits, **settings))
    vector = x.float() * torch.rsqrt(x.float().square().mean() + 1e-6) * (norm.float() + 1)
    products = torch.cat([numbers_of(each) @ vector + each.bias.float() for each in layers])
    close(out, products + residual.float(), BF16)
    close(logits, products, BF16)
    assert torch.equal(logits, logits.to(BF16).float())


@pytest.mark.parametrize(("kind", "is_gelu"), [("int4-zeros", True), ("int4-zeros", False), ("int8", False)])
def test_gates(kind: str, is_gelu: bool, built: Any) -> None:
    torch.manual_seed(4)
    gate, up = (layer(kind, 40, 256, seed) for seed in (1, 2))
    x, norm = torch.randn(256).to(F16), torch.rand(256).to(F16)
    out = torch.full((40,), float("nan"), dtype=F16)
    division = Division(2, 4)
    built(plan(x, (gate, up), out, norm=norm, eps=1e-6, division=division, is_gated=True, gelu=is_gelu))
    vector = x.float() * torch.rsqrt(x.float().square().mean() + 1e-6) * norm.float()
    one, two = numbers_of(gate) @ vector, numbers_of(up) @ vector
    close(out, (gelu(one, approximate="tanh") if is_gelu else silu(one)) * two, F16)


def test_what_a_kernel_is_tried_on_finds_a_wrong_one(built: Any) -> None:
    """Before it is used: results that are off, and results that differ from one run to the next."""
    kind, columns = KINDS["int4"], 256
    out, x = torch.empty((1, 8), dtype=BF16), torch.randn(256).to(BF16)
    launch = plan(x, (layer("int4", 8, 256),), out, division=Division(2, 2))
    assert launch is not None
    given: tuple[Any, ...] = (dict(launch.settings), kind, columns, BF16, torch.device("cpu"))

    def without_scales(launch: Launch) -> None:
        launch.work.matrices[0].scales = launch.work.matrices[0].codes
        built(launch)

    assert coded._error(built, *given) < 5e-3
    assert not coded._error(without_scales, *given) < coded.WRONG
    assert coded._error(lambda _: None, *given) == float("inf")


@pytest.mark.parametrize(
    ("kind", "columns", "is_known"),
    [
        (WeightKind(Codes.INT4, 128), 384, True),
        (WeightKind(Codes.INT4, 64), 384, False),
        (WeightKind(Codes.INT8), 320, False),
        (WeightKind(Codes.FP8, 0, 20, scale_dtype=torch.float32), 256, False),
    ],
    ids=str,
)
def test_other_kinds_are_left_to_other_kernels(kind: WeightKind, columns: int, is_known: bool) -> None:
    each = random_codes(kind, 40, columns, torch.Generator().manual_seed(1))
    out = torch.empty(40, dtype=BF16)
    assert (plan(torch.zeros(columns, dtype=BF16), (each,), out) is not None) == is_known
    assert plan(torch.zeros(columns), (each,), torch.empty(40)) is None
    each.bias = torch.nn.Parameter(torch.zeros(40))
    assert plan(torch.zeros(columns, dtype=BF16), (each,), out) is None
    assert not coded.product(torch.zeros(columns, dtype=BF16), (each,), out)
