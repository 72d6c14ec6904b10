"""A1 -> B1 -> A2 at the sizes of the report that began this project, on one card or more, and the speed of the links.

    python -m benchmarks.gpu.switching [--model random:qwen3-8b] [--cards 1,2] [--kv bf16,int8] [--out FILE]

Prints JSON, and writes it with `--out`. All figures of a run are measured in that run, also those of links and memory.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.lane import GpuLane, following, load, random_ids
from parkd.store.records import CaptureRequest
from parkd.types import SamplingParams

A1_TOKENS, B1_TOKENS, A2_TOKENS = 86_343, 14_533, 86_376
ANSWER_TOKENS = 17
"""A2's prompt contains A1's, its answer and a new message."""
GIB = 1 << 30
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=1)
KV = {"bf16": torch.bfloat16, "int8": torch.int8}
MAX_CARDS = 8


def synchronize(devices: tuple[str, ...]) -> None:
    for device in devices:
        torch.cuda.synchronize(device)


def timed(devices: tuple[str, ...], action: Callable[[], Any], repeats: int) -> float:
    """The median seconds of `action`."""
    seconds = []
    for _ in range(repeats):
        synchronize(devices)
        began = time.perf_counter()
        action()
        synchronize(devices)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def memory_read_bytes_per_s(device: str) -> float:
    """The speed at which a card's memory is read: the faster of a sum and of a copy, which reads and writes."""
    data = torch.empty(2 * GIB, dtype=torch.int64, device=device).random_()
    out = torch.empty_like(data)
    summed = timed((device,), data.sum, 5)
    copied = timed((device,), lambda: out.copy_(data), 5)
    return max(data.nbytes / summed, 2 * data.nbytes / copied)


def raw_copies(lane: GpuLane, transfer: Any, *, into: bool) -> Callable[[], None]:
    """A plain copy of a transfer's bytes, on all cards at once, without checksums or checks."""
    from engine.copies import host_tensor

    arenas = lane.engine._session.arenas
    pairs = [
        (arena, arena.rows[run.start : run.stop].view(-1), host_tensor(run.buffer))
        for arena, stage in zip(arenas, transfer.stages, strict=True)
        for run in stage.rows
    ] + [
        (arena, arena.fixed, host_tensor(part.buffer))
        for arena, stage in zip(arenas, transfer.stages, strict=True)
        for part in stage.fixed
    ]

    def copy() -> None:
        for arena, rows, host in pairs:
            with torch.cuda.stream(arena.streams.into if into else arena.streams.out):
                if into:
                    rows.copy_(host, non_blocking=True)
                else:
                    host.copy_(rows, non_blocking=True)

    return copy


def capture_request(lane: GpuLane) -> CaptureRequest:
    live = lane.live.conversation
    assert live.key is not None
    prompt = lane.prompt(live.key.namespace, live.units.astype("int64"))
    return CaptureRequest(
        key_digest=live.key.digest,
        units=live.units,
        prefix_hashes=prompt.prefix_hashes,
        lineage=(),
        layout_digest=lane.engine.info.layout.digest,
        checkpoints=(live.position,) if lane.engine.info.layout.fixed_bytes else (),
        rewindable=lane.engine.info.layout.fixed_bytes == 0,
    )


def copy_figures(lane: GpuLane, devices: tuple[str, ...]) -> dict[str, float]:
    """Captures and restores the live state, and compares with plain copies between the same buffers."""
    engine = lane.engine
    capture = lane.store.begin_capture(capture_request(lane))
    transfer = capture.transfer
    sums = engine.capture(transfer)
    parked_s = timed(devices, lambda: engine.capture(transfer), 5)
    out_s = timed(devices, raw_copies(lane, transfer, into=False), 5)
    runs = [run.buffer.nbytes for run in transfer.stages[0].rows]
    parked = lane.store.commit(capture, sums)
    with lane.store.lease(parked.id, parked.position) as lease:
        back = lease.transfer
        restored_s = timed(devices, lambda: engine.restore(back), 5)
        in_s = timed(devices, raw_copies(lane, back, into=True), 5)
    lane.store.drop(parked.id, "measured")
    size = transfer.bytes
    return {
        "bytes": size,
        "runs": len(runs),
        "longest_run_bytes": max(runs),
        "park_gb_s": size / parked_s / 1e9,
        "plain_out_gb_s": size / out_s / 1e9,
        "park_share": out_s / parked_s,
        "restore_gb_s": size / restored_s / 1e9,
        "plain_in_gb_s": size / in_s / 1e9,
        "restore_share": in_s / restored_s,
    }


def decode_seconds(lane: GpuLane, devices: tuple[str, ...], steps: int) -> float:
    """Seconds per token after the present position, which is kept."""
    session = lane.engine._session
    position = session.position
    session.checkpoint()
    int(session.step(5).argmax())
    synchronize(devices)
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        int(session.step(5).argmax())
        seconds.append(time.perf_counter() - began)
    session.truncate(position)
    return statistics.median(seconds)


def generate_seconds(lane: GpuLane, sampling: SamplingParams, steps: int) -> float:
    """Seconds per sampled token after the present position, which is kept."""
    engine = lane.engine
    position = engine.position
    engine.checkpoint()
    answer = engine.generate(5, sampling, history=np.zeros(0, dtype=np.int64))
    next(answer)
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        next(answer)
        seconds.append(time.perf_counter() - began)
    engine.truncate(position)
    return statistics.median(seconds)


def decode_figures(lane: GpuLane, devices: tuple[str, ...], read_speed: float) -> dict[str, Any]:
    """Decoding at the present position with and without recorded graphs, and the time to read all weights and rows."""
    session = lane.engine._session
    head = session.stages[-1].head
    embedding = session.stages[0].inner.embed_tokens.weight.nbytes
    tied = head.weight.data_ptr() == session.stages[0].inner.embed_tokens.weight.data_ptr()
    weights = lane.engine.info.weights_bytes - (0 if tied else embedding)
    position = session.position
    rows = position * lane.engine.info.layout.row_bytes
    windows = sum(field.nbytes for arena in session.arenas for field in arena.layout.window_fields)
    fixed = 2 * lane.engine.info.layout.fixed_bytes - windows  # Read and written; windows are only read.
    limit = (weights + rows + fixed) / read_speed
    runs = [decode_seconds(lane, devices, 80) for _ in range(3)]
    recorded = statistics.median(runs)
    graph, session._forward.decode_graph = session._forward.decode_graph, None
    library = decode_seconds(lane, devices, 4)
    session._forward.decode_graph = graph
    return {
        "position": position,
        "recorded": graph is not None,
        "ms": recorded * 1e3,
        "ms_runs": [seconds * 1e3 for seconds in runs],
        "sampled_ms": generate_seconds(lane, SAMPLED, 40) * 1e3,
        "library_forward_ms": library * 1e3,
        "limit_ms": limit * 1e3,
        "over_limit": recorded / limit,
    }


def state_of(lane: GpuLane) -> list[torch.Tensor]:
    """The rows of every stage, and its fixed state if the model has any."""
    session = lane.engine._session
    state = [arena.rows[: session.position].clone() for arena in session.arenas]
    if session.fixed_state.exists:
        state += [fixed.clone() for fixed in session.fixed_state.live(session.position)]
    return state


async def measure(
    model: str, devices: tuple[str, ...], batch_tokens: int, budget_bytes: int, kv: str, b_runs: int
) -> dict[str, Any]:
    figures: dict[str, Any] = {"devices": devices, "kv": kv, "batch_tokens": batch_tokens, "budget_bytes": budget_bytes}
    began = time.perf_counter()
    cache = Path(tempfile.gettempdir()) / "parkd-bench"
    engine = load(model, devices, cache, context_tokens=A2_TOKENS + 512, batch_tokens=batch_tokens, kv_dtype=KV[kv])
    figures["load_s"] = time.perf_counter() - began
    began = time.perf_counter()
    lane = GpuLane(engine, budget_bytes)
    figures["answers_after_s"] = time.perf_counter() - began
    assert lane.hooks is not None
    lane.hooks.settle(120)
    figures["pool_locked_after_s"] = time.perf_counter() - began
    figures["pool_locked_bytes"] = lane.hooks.locked_bytes
    vocab = engine.info.vocab_size
    figures["row_bytes"] = engine.info.layout.row_bytes
    figures["fixed_bytes"] = engine.info.layout.fixed_bytes
    figures["kernels"] = {
        "few": bool(engine._session._forward.dense),
        "flash_linear_attention": importlib.util.find_spec("fla") is not None,
    }
    figures["weights_gib"] = [torch.cuda.memory_allocated(device) / GIB for device in devices]
    figures["split"] = [[stage.first_layer, stage.end_layer] for stage in engine.info.layout.stages]
    figures["memory_read_gb_s"] = memory_read_bytes_per_s(devices[0]) / 1e9
    torch.cuda.empty_cache()
    read_speed = figures["memory_read_gb_s"] * 1e9

    a1, b1 = random_ids(A1_TOKENS, vocab, 1), random_ids(B1_TOKENS, vocab, 2)
    await lane.turn(lane.prompt("warm", random_ids(3 * batch_tokens, vocab, 3)), 4)

    # Never interrupted.
    first = await lane.turn(lane.prompt("whole", a1), ANSWER_TOKENS)
    a2 = following(a1, first, random_ids(A2_TOKENS - A1_TOKENS - ANSWER_TOKENS, vocab, 4))
    await lane.live.settle()
    same = await lane.turn(lane.prompt("whole", a2), ANSWER_TOKENS)
    await lane.live.settle()
    kept = state_of(lane)
    whole_decode = decode_figures(lane, devices, read_speed)
    lane.store.drop(lane.live.conversation.parked_id or "", "measured")
    await lane.live.reset()

    # Interrupted: B comes right after A1's answer.
    cold = await lane.turn(lane.prompt("parted", a1), ANSWER_TOKENS)
    b_parking = [(await lane.turn(lane.prompt("parted", b1), 4)).first_token_s]
    await lane.live.settle()
    back = await lane.turn(lane.prompt("parted", a2), ANSWER_TOKENS)
    await lane.live.settle()
    figures["tokens_equal"] = back.tokens == same.tokens and cold.tokens == first.tokens
    figures["state_equal"] = [torch.equal(*pair) for pair in zip(state_of(lane), kept, strict=True)]
    del kept
    restored_decode = decode_figures(lane, devices, read_speed)
    figures["decode_restored_over_never_parked"] = restored_decode["ms"] / whole_decode["ms"]
    figures["decode_86k"] = whole_decode
    figures["a1_cold"] = {
        "first_token_s": cold.first_token_s,
        "wall_s": cold.wall_s,
        "runs_s": [first.wall_s, cold.wall_s],
    }
    figures["a2_same_conversation"] = {"first_token_s": same.first_token_s, "reused": same.reused}
    figures["a2_after_b"] = {
        "first_token_s": back.first_token_s,
        "wall_s": back.wall_s,
        "outcome": back.outcome,
        "reused": back.reused,
    }
    figures["copies"] = copy_figures(lane, devices)
    moved = back.reused * engine.info.layout.row_bytes + engine.info.layout.fixed_bytes
    link = figures["copies"]["plain_in_gb_s"] * 1e9
    figures["a2_after_b"]["goal_s"] = same.first_token_s + 1.1 * moved / link
    figures["a1_cold_over_a2_after_b"] = {
        "first_token": cold.first_token_s / back.first_token_s,
        f"with {ANSWER_TOKENS} tokens": cold.wall_s / back.wall_s,
    }

    # B's first token while A is parked, and with nothing to park.
    for _ in range(b_runs):
        lane.store.drop(lane.live.conversation.parked_id or "", "measured")
        await lane.live.reset()
        for parked, _shared in lane.store.candidates(lane.prompt("parted", a2).key.digest, ()):
            lane.store.drop(parked.id, "measured")
        engine._session.adopt(A2_TOKENS)
        await lane.live.advance(lane.prompt("parted", a2).key, lane.prompt("parted", a2).units)
        await lane.live.park()
        b_parking.append((await lane.turn(lane.prompt("parted", b1), 4)).first_token_s)
        await lane.live.settle()
    b_alone = []
    for index in range(b_runs):
        await lane.live.reset()
        b_alone.append((await lane.turn(lane.prompt(f"alone {index}", b1), 4)).first_token_s)
        await lane.live.settle()
    figures["b_first_token_s"] = {"parking": b_parking, "alone": b_alone}
    figures["b_parking_over_alone"] = statistics.median(b_parking) / statistics.median(b_alone)
    await lane.live.reset()
    await lane.turn(lane.prompt("short", random_ids(4096, vocab, 5)), 2)
    await lane.live.settle()
    figures["decode_4k"] = decode_figures(lane, devices, read_speed)
    figures["peak_gib"] = [torch.cuda.max_memory_allocated(device) / GIB for device in devices]
    lane.close()
    return figures


def machine() -> dict[str, str]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    named = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().splitlines()
    return {
        "gpus": "; ".join(named),
        "torch": torch.__version__,
        "command": " ".join(["python -m benchmarks.gpu.switching", *sys.argv[1:]]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="random:qwen3-8b")
    parser.add_argument("--cards", default="1,2")
    parser.add_argument("--kv", default="bf16")
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--b-runs", type=int, default=6, help="how often B is read beside parking, and alone")
    parser.add_argument("--budget-gib", type=float, default=20)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    results: dict[str, Any] = {**machine(), "model": asked.model, "runs": []}
    for count, kv in ((int(word), kv) for kv in asked.kv.split(",") for word in asked.cards.split(",")):
        if count > min(torch.cuda.device_count(), MAX_CARDS):
            continue
        devices = tuple(f"cuda:{index}" for index in range(count))
        figures = asyncio.run(measure(asked.model, devices, asked.batch, int(asked.budget_gib * GIB), kv, asked.b_runs))
        results["runs"].append(figures)
        print(json.dumps(figures, indent=1, default=str), flush=True)
        torch.cuda.empty_cache()
        if asked.out:
            asked.out.write_text(json.dumps(results, indent=1, default=str) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
