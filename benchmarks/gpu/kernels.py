"""Matrix-vector products with the shapes of an 8B model: the best tiling, and the speed of the vendor's library.

python -m benchmarks.gpu.kernels [--out FILE]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from parkd_engine.kernels.attend import DecodeAttention
from parkd_engine.kernels.matvec import gated, matvec
from parkd_engine.kernels.prompt_attention import kernel_for
from parkd_engine.kernels.sums import block_sums
from parkd_engine.kernels.tiling import Tiling
from torch import nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

HIDDEN, WIDE, KV, VOCAB = 4096, 12288, 1024, 151_936
TILINGS = [
    Tiling(rows, columns, warps)
    for rows, columns, warps in ((8, 512, 4), (4, 2048, 8), (4, 512, 4), (2, 1024, 4), (4, 1024, 8), (2, 4096, 8))
]
MORE = (
    *((10_240, 5120), (6144, 5120), (5120, 6144), (5120, 17_408)),
    *((4096, 2560), (2560, 2048), (20_480, 2560), (2560, 10_240), (262_208, 2560)),
)
"""Matrices of a 27B model with gated delta nets, and of Gemma 3 4B."""
COPIES = 6
"""Sets of weights that are used in rotation, so that none is still in the cache."""


def linear(rows: int, columns: int) -> Any:
    layer = nn.Linear(columns, rows, bias=False, device="cuda", dtype=torch.bfloat16)
    layer.requires_grad_(False)
    return layer


def microseconds(actions: list[Any]) -> float:
    """Microseconds of one action. All are recorded in one graph, so that launches do not count."""
    for action in actions:
        action()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for action in actions:
            action()
    graph.replay()
    return float(triton.testing.do_bench(graph.replay, warmup=20, rep=60, return_mode="median")) * 1e3 / len(actions)


def products() -> dict[str, dict[str, float]]:
    x = torch.randn(HIDDEN, device="cuda", dtype=torch.bfloat16)
    norm = torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16)
    table: dict[str, dict[str, float]] = {}
    shapes = {
        "qkv": [tuple(linear(n, HIDDEN) for n in (HIDDEN, KV, KV)) for _ in range(COPIES)],
        "output": [(linear(HIDDEN, HIDDEN),) for _ in range(COPIES)],
        "gated": [(linear(WIDE, HIDDEN), linear(WIDE, HIDDEN)) for _ in range(COPIES)],
        "down": [(linear(HIDDEN, WIDE),) for _ in range(COPIES)],
        "head": [(linear(VOCAB, HIDDEN),) for _ in range(2)],
        **{f"{rows} x {columns}": [(linear(rows, columns),) for _ in range(COPIES)] for rows, columns in MORE},
    }
    for name, sets in shapes.items():
        size = sum(layer.weight.nbytes for layer in sets[0])
        source = torch.randn(sets[0][0].weight.shape[1], device="cuda", dtype=torch.bfloat16)
        rows = sum(layer.weight.shape[0] for layer in sets[0]) // (2 if name == "gated" else 1)
        out = torch.empty(rows, device="cuda", dtype=torch.bfloat16)
        row: dict[str, float] = {}
        actions: list[Callable[[], object]] = [
            partial(lambda group, source: [layer(source[None]) for layer in group], group, source) for group in sets
        ]
        row["library GB/s"] = size / microseconds(actions) / 1e3
        for tiling in TILINGS:
            if name == "gated":
                actions = [
                    partial(gated, x, group[0], group[1], out, norm=norm, eps=1e-6, tiling=tiling) for group in sets
                ]
            else:
                normed = norm if name in ("qkv", "head") else None
                actions = [partial(matvec, source, group, out, norm=normed, eps=1e-6, tiling=tiling) for group in sets]
            try:
                row[f"{tiling.rows}x{tiling.columns}/{tiling.warps}"] = size / microseconds(actions) / 1e3
            except Exception as error:  # a tiling that does not fit the card is a result too
                print(name, tiling, type(error).__name__, error)
        table[name] = row
    return table


def attention() -> dict[str, float]:
    layers, context, heads, dim = 8, 88_064, 8, 128
    rows = torch.empty((context, layers * 2 * heads * dim), device="cuda", dtype=torch.bfloat16).normal_()
    query = torch.randn(4096, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(query)
    table = {}
    for parts in (16, 32, 64):
        attend = DecodeAttention(32, heads, dim, torch.device("cuda"), parts)
        for length in (4096, 86_343):
            position = torch.tensor([length - 1], device="cuda")
            actions = []
            for layer in range(layers):
                at = layer * 2 * heads * dim
                keys = rows[:, at : at + heads * dim].view(context, heads, dim)
                values = rows[:, at + heads * dim : at + 2 * heads * dim].view(context, heads, dim)
                actions.append(lambda k=keys, v=values, p=position, a=attend: a(query, k, v, p, out, dim**-0.5))
            took = microseconds(actions)
            table[f"{parts} parts, {length}: us"] = took
            table[f"{parts} parts, {length}: GB/s"] = length * 2 * heads * dim * 2 / took / 1e3
    return table


def prompts() -> dict[str, float]:
    """Milliseconds of a chunk's attention over rows of an arena, by head size, queries and keys: torch's kernel, and
    the one for prompts if there is one."""
    table: dict[str, float] = {}
    card = torch.device("cuda:0")
    for heads, kv_heads, dim, layers in ((32, 8, 128, 36), (24, 4, 256, 16)):
        width = kv_heads * dim
        rows = torch.empty((86_343, layers * 2 * width), device=card, dtype=torch.bfloat16).normal_()
        kernel = kernel_for(card, torch.bfloat16, dim)
        for tokens, length in ((2048, 8192), (2048, 86_343), (16, 86_343)):
            query = torch.randn((1, heads, tokens, dim), device=card, dtype=torch.bfloat16)
            keys, values = (
                rows[:length, part * width : (part + 1) * width].view(1, length, kv_heads, dim).transpose(1, 2)
                for part in (0, 1)
            )
            bias = causal_lower_right(tokens, length)
            name = f"{heads}/{kv_heads} of {dim}, {tokens} of {length}"
            usual = partial(scaled_dot_product_attention, query, keys, values, attn_mask=bias, enable_gqa=True)
            table[f"{name}, torch"] = milliseconds(usual)
            if kernel is not None:
                mine, seen, told = (each[0].transpose(0, 1) for each in (query, keys, values))
                table[f"{name}, for prompts"] = milliseconds(partial(kernel, mine, seen, told, dim**-0.5))
        del rows
    return table


def milliseconds(action: Any) -> float:
    return float(triton.testing.do_bench(action, warmup=5, rep=25, return_mode="median"))


def sums() -> dict[str, float]:
    words = torch.empty(1 << 29, dtype=torch.int64, device="cuda").random_()
    took = microseconds([lambda: block_sums(words, 256 * 73_728 // 8)])
    return {"GB/s": words.nbytes / took / 1e3}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    table = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    table |= {"products": products(), "attention": attention(), "prompts": prompts(), "sums": sums()}
    text = json.dumps(table, indent=1)
    print(text)
    if asked.out:
        asked.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
