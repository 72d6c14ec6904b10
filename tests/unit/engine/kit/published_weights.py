"""Writes weights in the formats of published checkpoints, code by code: a model of the formats of the tests' own.

Each writer takes random codes and scales and returns what they mean beside the tensors of the file, so that nothing
that is tested is used to make what it is compared with.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Written = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""The numbers, float32 `[rows, columns]`, and the tensors of the file."""
GROUP = 32


def words(codes: np.ndarray[Any, Any], bits: int) -> torch.Tensor:
    """int32 `[rows, columns * bits / 32]` of codes `[rows, columns]`; the first is in the lowest bits."""
    each = 32 // bits
    out = np.zeros((len(codes), codes.shape[1] // each), dtype=np.uint32)
    for column in range(codes.shape[1]):
        out[:, column // each] |= codes[:, column].astype(np.uint32) << np.uint32(bits * (column % each))
    return torch.from_numpy(out.view(np.int32))


def meaning(
    codes: np.ndarray[Any, Any], zeros: np.ndarray[Any, Any], scales: torch.Tensor, groups: np.ndarray[Any, Any]
) -> torch.Tensor:
    """`(code - zero) * scale`; `groups` says which zero and scale a column has."""
    scale = scales.float().numpy()[:, groups]
    return torch.from_numpy(
        ((codes.astype(np.float32) - zeros.astype(np.float32)[:, groups]) * scale).astype(np.float32)
    )


def some_scales(shape: tuple[int, ...], dtype: torch.dtype, random: np.random.Generator, size: float) -> torch.Tensor:
    return torch.from_numpy(random.uniform(0.5, 1.5, shape) * size).to(dtype)


def packed(bits: int, group: int, *, symmetric: bool, order: bool = False, dtype: torch.dtype = torch.bfloat16) -> Any:
    """compressed-tensors' pack-quantized: the zero of a symmetric code is the middle."""

    def write(rows: int, columns: int, random: np.random.Generator) -> Written:
        count = columns // group if group else 1
        middle = 2 ** (bits - 1)
        codes = random.integers(0, 2 * middle, (rows, columns))
        zeros = random.integers(0, 2 * middle, (rows, count))
        if symmetric:
            zeros[:] = middle
        scales = some_scales((rows, count), dtype, random, 0.5 / middle / columns**0.5)
        groups = np.arange(columns) // (group or columns)
        tensors = {
            "weight_packed": words(codes, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor([rows, columns]),
        }
        if order:
            groups = random.permutation(groups)
            tensors["weight_g_idx"] = torch.from_numpy(groups.astype(np.int32))
        if not symmetric:
            tensors["weight_zero_point"] = words(zeros.T, bits).T.contiguous()
        return meaning(codes, zeros, scales, groups), tensors

    return write


def plain_int8(rows: int, columns: int, random: np.random.Generator) -> Written:
    """compressed-tensors' int-quantized, by channels."""
    codes = random.integers(-128, 128, (rows, columns))
    scales = some_scales((rows, 1), torch.float32, random, 1 / 128 / columns**0.5)
    tensors = {"weight": torch.from_numpy(codes.astype(np.int8)), "weight_scale": scales}
    return meaning(codes, np.zeros((rows, 1)), scales, np.zeros(columns, dtype=int)), tensors


def fp8(name: str, block: tuple[int, int] | str) -> Any:
    """Codes of eight bits with one scale for the matrix, each row or each block; also of activations, not used here."""

    def write(rows: int, columns: int, random: np.random.Generator) -> Written:
        codes = torch.from_numpy(random.normal(0, 100, (rows, columns))).clamp(-448, 448).to(torch.float8_e4m3fn)
        size = 0.01 / columns**0.5
        if block == "tensor":
            scales = some_scales((1,), torch.float32, random, size)
            each = scales.expand(rows, columns)
        elif block == "channel":
            scales = some_scales((rows, 1), torch.bfloat16, random, size)
            each = scales.expand(rows, columns)
        else:
            high, wide = block
            scales = some_scales((-(-rows // high), -(-columns // wide)), torch.float32, random, size)
            each = scales.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
        tensors = {"weight": codes, name: scales, "input_scale": torch.tensor([0.5])}
        return codes.float() * each.float(), tensors

    return write


def nvfp4(rows: int, columns: int, random: np.random.Generator) -> Written:
    """ModelOpt's: two codes in a byte, the first in the lower bits; a scale for 16 columns and one for the matrix."""
    codes = random.integers(0, 16, (rows, columns))
    meant = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)[codes & 7] * np.where(codes & 8, -1, 1)
    scales = some_scales((rows, columns // 16), torch.float8_e4m3fn, random, 100)
    whole = torch.tensor(0.003 / columns**0.5)
    each = (scales.float() * whole).repeat_interleave(16, 1)
    tensors = {
        "weight": torch.from_numpy((codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)),
        "weight_scale": scales,
        "weight_scale_2": whole,
        "input_scale": torch.tensor(0.5),
    }
    return torch.from_numpy(meant.astype(np.float32)) * each, tensors


def awq(rows: int, columns: int, random: np.random.Generator) -> Written:
    """Eight columns of the output in a word: bits 4 i hold column `(0, 2, 4, 6, 1, 3, 5, 7)[i]`."""
    codes = random.integers(0, 16, (rows, columns))
    zeros = random.integers(0, 16, (rows, columns // GROUP))
    scales = some_scales((columns // GROUP, rows), torch.float16, random, 0.1 / columns**0.5)

    def shuffled(each: np.ndarray[Any, Any]) -> torch.Tensor:
        turned = each.T.reshape(each.shape[1], -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]]
        return words(turned.reshape(each.shape[1], -1), 4)

    tensors = {"qweight": shuffled(codes), "qzeros": shuffled(zeros), "scales": scales}
    return meaning(codes, zeros, scales.T, np.arange(columns) // GROUP), tensors


def gptq(bits: int, *, order: bool, version: int) -> Any:
    """Eight (or four) columns of the input in a word; zeros are stored less one in version 1."""

    def write(rows: int, columns: int, random: np.random.Generator) -> Written:
        codes = random.integers(0, 2**bits, (rows, columns))
        zeros = random.integers(1, 2**bits, (rows, columns // GROUP))
        scales = some_scales((columns // GROUP, rows), torch.float16, random, 1.6 / 2**bits / columns**0.5)
        groups = np.arange(columns) // GROUP
        if order:
            groups = random.permutation(groups)
        stored = zeros - 1 if version == 1 else zeros
        tensors = {
            "qweight": words(codes, bits).T.contiguous(),
            "qzeros": words(stored.T, bits),
            "scales": scales,
            "g_idx": torch.from_numpy(groups.astype(np.int32)),
        }
        return meaning(codes, zeros, scales.T, groups), tensors

    return write


def _compressed(packing: str, weights: dict[str, Any], **settings: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": packing,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        **settings,
    }


def _integers(bits: int, group: int, *, symmetric: bool, actorder: str | None = None) -> dict[str, Any]:
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel", "group_size": None}
    return {"num_bits": bits, "type": "int", "symmetric": symmetric, "actorder": actorder, **strategy}


@dataclass(frozen=True)
class Published:
    """A format: how a configuration names it, and how it is written."""

    settings: dict[str, Any]
    write: Callable[[int, int, np.random.Generator], Written]
    alone: frozenset[str] = field(default=frozenset({"lm_head"}))
    """Parts of names of layers in full precision."""


_FLOATS = {"num_bits": 8, "type": "float", "symmetric": True}
FORMATS: dict[str, Published] = {
    "w4a16": Published(_compressed("pack-quantized", _integers(4, 32, symmetric=True)), packed(4, 32, symmetric=True)),
    "w4a16-zeros": Published(
        _compressed("pack-quantized", _integers(4, 64, symmetric=False)), packed(4, 64, symmetric=False)
    ),
    "w4a16-order": Published(
        _compressed("pack-quantized", _integers(4, 32, symmetric=False, actorder="group")),
        packed(4, 32, symmetric=False, order=True, dtype=torch.float16),
    ),
    "w8a16": Published(_compressed("pack-quantized", _integers(8, 0, symmetric=True)), packed(8, 0, symmetric=True)),
    "w8a16-groups": Published(
        _compressed("pack-quantized", _integers(8, 32, symmetric=False)), packed(8, 32, symmetric=False)
    ),
    "int8": Published(_compressed("int-quantized", _integers(8, 0, symmetric=True)), plain_int8),
    "fp8-static": Published(
        _compressed("float-quantized", {**_FLOATS, "strategy": "tensor"}), fp8("weight_scale", "tensor")
    ),
    "fp8-dynamic": Published(
        _compressed("float-quantized", {**_FLOATS, "strategy": "channel"}), fp8("weight_scale", "channel")
    ),
    "fp8-blocks": Published(
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [48, 24]}
        | {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate_proj"]},
        fp8("weight_scale_inv", (48, 24)),
        frozenset({"lm_head", "layers.0.mlp.gate_proj"}),
    ),
    "nvfp4": Published(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "model.layers.0.self_attn*"]}
        | {"config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}}},
        nvfp4,
        frozenset({"lm_head", "layers.0.self_attn"}),
    ),
    "modelopt-fp8": Published(
        {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]}, fp8("weight_scale", "tensor")
    ),
    "awq": Published(
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, awq
    ),
    "gptq": Published(
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False},
        gptq(4, order=False, version=1),
    ),
    "gptq-order": Published(
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "checkpoint_format": "gptq_v2"},
        gptq(4, order=True, version=2),
    ),
    "gptq8": Published(
        {"quant_method": "gptq", "bits": 8, "group_size": GROUP, "desc_act": False}, gptq(8, order=False, version=1)
    ),
}
"""Name -> format, with blocks that do not divide the matrices."""


def publish(folder: Path, form: Published, *, seed: int = 3) -> dict[str, torch.Tensor]:
    """Rewrites a full-precision checkpoint of one file in `folder`: random codes in place of the weights of its linear
    layers. Returns the numbers that those mean, by the names of the weights."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    random = np.random.default_rng(seed)
    means: dict[str, torch.Tensor] = {}
    for name in sorted(tensors):
        module = name.removesuffix(".weight")
        ending = module.rpartition(".")[2]
        is_linear = name.endswith(("_proj.weight", "_proj_with_mqa.weight")) or module == "lm_head"
        is_linear = is_linear or ending in ("w1", "w2", "w3")
        if not is_linear or any(part in module for part in form.alone):
            continue
        rows, columns = tensors[name].shape
        means[name], written = form.write(rows, columns, random)
        del tensors[name]
        tensors |= {f"{module}.{tensor}": value.contiguous() for tensor, value in written.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": form.settings}))
    return means
