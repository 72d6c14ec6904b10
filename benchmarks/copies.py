"""The speed of parking and restoring, compared with a plain copy of the same number of bytes.

    python -m benchmarks.copies [--device cpu] [--repeats 9]

Park and restore use the engine's snapshot code, including checks and checksums. The plain copy only moves the same
bytes between the same buffers: on a CPU with one thread and with as many as the engine uses, on CUDA from and to pinned
memory. Plain copies and snapshots alternate. Rows are random bytes; no model is needed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
from parkd_engine.arenas.arena import StageArena
from parkd_engine.arenas.layout import build_layout
from parkd_engine.forward.stages import PassThrough, Stage
from parkd_engine.moves.snapshot import capture, restore
from parkd_engine.moves.transfer import MAX_THREADS
from parkd_engine.session import Session
from torch import nn
from transformers import LlamaConfig

from benchmarks.common import Goal, Result, Table, finish, machine, progress
from parkd.state import RowRun, StageTransfer, Transfer

BLOCK_TOKENS = 256
GOAL_SHARE = 0.9


@dataclass(frozen=True)
class Shape:
    name: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    tokens: int


SHAPES = (
    Shape("SmolLM2-135M, fp32, 3,000 tokens", 30, 3, 64, torch.float32, 3_000),
    Shape("SmolLM2-135M, fp32, 8,192 tokens", 30, 3, 64, torch.float32, 8_192),
    Shape("8B (32 layers, 8 KV heads of 128), bf16, 8,192 tokens", 32, 8, 128, torch.bfloat16, 8_192),
)


def session_of(shape: Shape, devices: tuple[str, ...]) -> Session:
    """A session whose arenas are full of random rows and whose stages have no weights."""
    config = LlamaConfig(
        num_hidden_layers=shape.layers,
        num_key_value_heads=shape.kv_heads,
        num_attention_heads=shape.kv_heads,
        hidden_size=shape.kv_heads * shape.head_dim,
        head_dim=shape.head_dim,
    )
    cuts = [shape.layers * index // len(devices) for index in range(len(devices) + 1)]
    ranges = tuple(itertools.pairwise(cuts))
    layouts = build_layout(config, ranges, shape.dtype)
    stages, arenas = [], []
    for index, ((first, end), layout, device) in enumerate(zip(ranges, layouts, devices, strict=True)):
        inner = nn.Module()
        inner.layers = nn.ModuleList(PassThrough(nn.Module()) for _ in range(shape.layers))
        stages.append(Stage(index, first, end, torch.device(device), inner, None))
        arena = StageArena(layout, shape.tokens, device)
        arena.rows.view(torch.int64).random_()
        arenas.append(arena)
    session = Session(stages, arenas)
    session.adopt(shape.tokens)
    return session


def host_plan(session: Session, tokens: int, pinned: bool) -> Transfer:
    """One contiguous run per stage, in memory that was touched before, as from a store with free adjacent slots."""
    stages = []
    for arena in session.arenas:
        buffer = torch.zeros(tokens * arena.layout.row_bytes, dtype=torch.uint8, pin_memory=pinned)
        stages.append(StageTransfer((RowRun(0, tokens, buffer.numpy()),)))
    return Transfer(session.layout.digest, 0, tokens, BLOCK_TOKENS, tuple(stages))


def plain_copy(session: Session, plan: Transfer, threads: int) -> Callable[[], None]:
    """Copies from host memory to the arenas as a restore does, without anything else."""
    pairs = [
        (arena.rows[: plan.stop].view(-1), torch.from_numpy(stage.rows[0].buffer))
        for arena, stage in zip(session.arenas, plan.stages, strict=True)
    ]
    if session.arenas[0].device.type == "cuda":

        def queue() -> None:
            for there, here in pairs:
                there.copy_(here, non_blocking=True)
            for arena in session.arenas:
                torch.cuda.synchronize(arena.device)

        return queue
    pieces = [
        (there, here)
        for to, source in pairs
        for there, here in zip(
            np.array_split(to.numpy(), threads), np.array_split(source.numpy(), threads), strict=True
        )
    ]
    if threads == 1:

        def alone() -> None:
            for there, here in pieces:
                np.copyto(there, here)

        return alone

    def shared() -> None:
        with ThreadPoolExecutor(threads) as pool:
            for future in [pool.submit(np.copyto, there, here) for there, here in pieces]:
                future.result()

    return shared


def gigabytes_per_s(ways: dict[str, Callable[[], object]], size: int, repeats: int) -> dict[str, list[float]]:
    """GB/s of every way, run once per round so that other load on the machine affects all of them."""
    measured: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(repeats + 1):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            elapsed_s = time.perf_counter() - started
            if number:  # the first round only warms up
                measured[name].append(size / elapsed_s / 1e9)
    return measured


def measure(shape: Shape, devices: tuple[str, ...], repeats: int) -> tuple[int, dict[str, list[float]]]:
    session = session_of(shape, devices)
    cuda = session.arenas[0].device.type == "cuda"
    plan = host_plan(session, shape.tokens, pinned=cuda)
    sealed = replace(plan, checksums=capture(session, plan).rows)
    before = [arena.rows.clone() for arena in session.arenas]
    ways: dict[str, Callable[[], object]] = {"plain": plain_copy(session, plan, 1)}
    if not cuda:
        ways["plain, threads"] = plain_copy(session, plan, min(MAX_THREADS, os.cpu_count() or 1))
    ways |= {"park": lambda: capture(session, plan), "restore": lambda: restore(session, sealed)}
    size = sum(stage.rows[0].buffer.nbytes for stage in plan.stages)
    measured = gigabytes_per_s(ways, size, repeats)
    for arena, rows in zip(session.arenas, before, strict=True):
        assert torch.equal(arena.rows, rows), "a restore gave back other bytes"
    return size, measured


def main() -> None:
    parser = argparse.ArgumentParser(description="park and restore against a plain copy")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    started = machine()
    result = Result("copies", "Park and restore against a plain copy", " ".join(__doc__.split("\n\n")[2].split()))
    rows = []
    for shape in SHAPES:
        progress(f"{shape.name} ...")
        size, measured = measure(shape, (options.device, options.device), options.repeats)
        medians = {name: statistics.median(values) for name, values in measured.items()}
        figures = ("plain", "plain, threads", "park", "restore")
        rows.append(
            (
                shape.name,
                f"{size / 1e6:,.0f}",
                *(f"{medians[name]:.1f}" if name in medians else "-" for name in figures),
                f"{size / medians['restore'] / 1e6:.0f}",
            )
        )
        share = medians["restore"] / medians["plain"]
        result.goals.append(
            Goal(f"restore / plain copy, {shape.name}", f">= {GOAL_SHARE}", f"{share:.2f}", share >= GOAL_SHARE)
        )
        result.raw[shape.name] = {"bytes": size, "gigabytes_per_s": measured}
    columns = ("state", "MB", "plain GB/s", "plain, threads GB/s", "park GB/s", "restore GB/s", "restore ms")
    result.tables.append(Table("Two stages, medians", columns, tuple(rows)))
    finish(result, started)


if __name__ == "__main__":
    main()
