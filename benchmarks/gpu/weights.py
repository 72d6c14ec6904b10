"""A model with quantised weights on a card of which only a part may be used, and the kernels over its codes.

    python -m benchmarks.gpu.weights [--model random:qwen3.5-27b] [--cap-gib 24] [--a1 90000] [--b1 13000] [--out FILE]
                                     [--parts kernels,capped,full]

Times the products of one vector and of three, for each kind of weights, on tensor cores and through the Triton kernels
with several tilings, beside those of bf16. Then
A1 -> B1 -> A2 in int4 with rows of int8 under the cap, compared bit for bit with a run that was never interrupted, the
plain copy of the same bytes, and decoding in int4 beside bf16 (without the cap) in the same process. Prints JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from parkd_engine.kernels import codes
from parkd_engine.kernels.few_tokens import products
from parkd_engine.kernels.matvec import gated, matvec
from parkd_engine.kernels.tiling import Tiling
from parkd_engine.memory import free_bytes
from parkd_engine.weights.linear import QuantisedLinear
from parkd_engine.weights.rounding import rounded
from parkd_engine.weights.schemes import OWN_KINDS
from torch import nn

from benchmarks.gpu.figures import GIB, decoded_bytes, memory_read_bytes_per_s
from benchmarks.gpu.kernels import COPIES, linear, microseconds
from benchmarks.gpu.lane import GpuLane, following, random_ids
from parkd.config import ModelConfig
from parkd.engine_adapter.torch_engine.engine import TorchEngine
from parkd.state import EngineConfig

CARD = "cuda:0"
SHAPES = ((17_408, 5120), (5120, 17_408), (10_240, 5120), (6144, 5120), (5120, 6144))
"""Rows and columns of the matrices of a 27B model with gated delta nets."""
TILINGS = [Tiling(*sizes) for sizes in ((4, 32, 1), (8, 32, 1), (4, 64, 2), (2, 64, 2), (4, 128, 2), (4, 128, 4))]
ANSWER_TOKENS, DECODED_TOKENS = 17, 65
PARTS = ("kernels", "capped", "full")


def coded(full: nn.Linear, weights: str) -> QuantisedLinear:
    kind = OWN_KINDS[weights]
    return QuantisedLinear(kind, full.in_features, full.out_features, rounded(full.weight.detach(), kind))


def kernels() -> dict[str, Any]:
    """Microseconds of a product, by shape, kind and tiling."""
    return {f"{rows} x {columns}": of_shape(rows, columns) for rows, columns in SHAPES}


def of_shape(rows: int, columns: int) -> dict[str, float]:
    x = torch.randn(columns, device=CARD, dtype=torch.bfloat16)
    three = torch.randn((3, columns), device=CARD, dtype=torch.bfloat16)
    out = torch.empty((3, rows), device=CARD, dtype=torch.bfloat16)
    full = [linear(rows, columns) for _ in range(COPIES)]
    line = {
        "bf16": microseconds([lambda each=each: matvec(x, (each,), out[0]) for each in full]),
        "bf16, three": microseconds([lambda each=each: products(three, each, out) for each in full]),
    }
    for weights in OWN_KINDS:
        layers = [coded(each, weights) for each in full]
        for tiling in TILINGS:
            name = f"{weights} {tiling.rows}x{tiling.columns}, {tiling.warps} warps"
            line[name] = microseconds(
                [lambda each=each, to=tiling: codes.matvec(x, (each,), out[0], tiling=to) for each in layers]
            )
        line[weights] = microseconds([lambda each=each: matvec(x, (each,), out[0]) for each in layers])
        line[f"{weights}, three"] = microseconds([lambda each=each: products(three, each, out) for each in layers])
        if rows > columns:
            pairs = list(pairwise(layers))
            line[f"{weights}, gated"] = microseconds(
                [lambda gate=gate, up=up: gated(x, gate, up, out[0]) for gate, up in pairs]
            )
        line[f"{weights}, numbers"] = microseconds([lambda each=each: each.numbers(torch.bfloat16) for each in layers])
    return {name: round(value, 1) for name, value in line.items()}


def opened(model: str, cache: Path, cap_bytes: int | None, **layout: Any) -> TorchEngine:
    def free(device: str) -> int:
        there = free_bytes(device)
        if cap_bytes is None or device == "cpu":
            return there
        return min(there, cap_bytes - torch.cuda.memory_allocated(device))

    config = EngineConfig(devices=(CARD,), batch_tokens=2048, **layout)
    return TorchEngine.load(ModelConfig(model, cache, layout=config), free=free, fresh_seed=lambda: 1)


def lane_of(engine: TorchEngine) -> GpuLane:
    """With its pool page-locked."""
    lane = GpuLane(engine, 16 * GIB)
    assert lane.hooks is not None
    lane.hooks.settle(120)
    return lane


async def switching(lane: GpuLane, a1_tokens: int, b1_tokens: int) -> dict[str, Any]:
    engine = lane.engine
    vocabulary = engine.info.vocab_size
    await lane.turn(lane.prompt("warm", random_ids(4096, vocabulary, 3)), 4)
    decoded = await lane.turn(lane.prompt("warm", random_ids(4096, vocabulary, 3)), DECODED_TOKENS)
    a1, b1 = random_ids(a1_tokens, vocabulary, 1), random_ids(b1_tokens, vocabulary, 2)
    first = await lane.turn(lane.prompt("whole", a1), ANSWER_TOKENS)
    a2 = following(a1, first, random_ids(16, vocabulary, 4))
    await lane.live.settle()
    whole = await lane.turn(lane.prompt("whole", a2), ANSWER_TOKENS)
    await lane.live.settle()
    expected = state_of(engine)
    await lane.live.reset()
    cold = await lane.turn(lane.prompt("parted", a1), ANSWER_TOKENS)
    between = await lane.turn(lane.prompt("parted", b1), ANSWER_TOKENS)
    await lane.live.settle()
    back = await lane.turn(lane.prompt("parted", a2), ANSWER_TOKENS)
    await lane.live.settle()
    moved = len(a1) * engine.info.layout.row_bytes + engine.info.layout.fixed_bytes
    figures = {
        "decode_ms_at_4k": decoded.decode_s * 1e3,
        "decode_ms_at_a1": back.decode_s * 1e3,
        "decoded_bytes_at_4k": decoded_bytes(lane, 4096),
        "decoded_bytes_at_a1": decoded_bytes(lane, len(a1)),
        "state_equal": [torch.equal(*pair) for pair in zip(state_of(engine), expected, strict=True)],
        "tokens_equal": back.tokens == whole.tokens and cold.tokens == first.tokens,
        "outcomes": [cold.outcome, between.outcome, back.outcome],
        "a1_first_token_s": cold.first_token_s,
        "b1_first_token_s": between.first_token_s,
        "a2_first_token_s": back.first_token_s,
        "plain_copy_s": plain_copy(moved),
        "moved_bytes": moved,
    }
    lane.close()
    return figures


def state_of(engine: TorchEngine) -> list[torch.Tensor]:
    """Rows of every stage and fixed state, in main memory: the cap leaves no room for a copy on the card."""
    session = engine.session
    rows = [arena.rows[: session.position].cpu() for arena in session.arenas]
    return rows + [fixed.cpu() for fixed in session.fixed_state.live(session.position) if session.fixed_state.exists]


def plain_copy(size: int) -> float:
    host = torch.empty(min(size, GIB), dtype=torch.uint8, pin_memory=True)
    there = host.to(CARD)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(4):
        there.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / 4 / host.nbytes * size


async def decoding(engine: TorchEngine) -> float:
    lane = GpuLane(engine, GIB)
    vocabulary = engine.info.vocab_size
    await lane.turn(lane.prompt("warm", random_ids(4096, vocabulary, 3)), 4)
    figures = await lane.turn(lane.prompt("warm", random_ids(4096, vocabulary, 3)), DECODED_TOKENS)
    await lane.live.settle()
    lane.close()
    return figures.decode_s * 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random:qwen3.5-27b")
    parser.add_argument("--cap-gib", type=float, default=24.0)
    parser.add_argument("--context", type=int, default=100_352)
    parser.add_argument("--a1", type=int, default=90_000)
    parser.add_argument("--b1", type=int, default=13_000)
    parser.add_argument("--parts", default=",".join(PARTS), help="some of these")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    parts = args.parts.split(",")
    command = f"--model {args.model} --cap-gib {args.cap_gib} --context {args.context} --a1 {args.a1} --b1 {args.b1}"
    figures: dict[str, Any] = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "command": f"python -m benchmarks.gpu.weights {command} --parts {args.parts}",
    }

    def tell() -> None:
        text = json.dumps(figures, indent=1)
        if args.out is not None:
            args.out.write_text(text)
        print(text, flush=True)

    if "kernels" in parts:
        figures["kernels_us"] = kernels()
        tell()
    figures["memory_read_gb_s"] = memory_read_bytes_per_s(CARD) / 1e9
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    cap_bytes = int(args.cap_gib * GIB)
    with tempfile.TemporaryDirectory() as folder:
        if "capped" in parts:
            torch.cuda.set_per_process_memory_fraction(cap_bytes / total)
            began = time.perf_counter()
            engine = opened(
                args.model, Path(folder), cap_bytes, weights="int4", kv_format="int8", context_tokens=args.context
            )
            memory = [dict(each) for each in engine.info.memory]
            figures["int4"] = {"load_s": time.perf_counter() - began, "memory": memory}
            figures["int4"] |= asyncio.run(switching(lane_of(engine), args.a1, args.b1))
            figures["int4"]["most_reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
            figures["int4"]["used_gib"] = (total - torch.cuda.mem_get_info()[0]) / GIB
            tell()
            del engine
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(1.0)
        if "full" in parts:
            engine = opened(args.model, Path(folder), None, kv_format="int8", context_tokens=8192)
            figures["bf16_decode_ms_at_4k"] = asyncio.run(decoding(engine))
            tell()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
