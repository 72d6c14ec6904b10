"""A1 -> B1 -> A2 at the sizes of the report that began this project, on one card or more, and the speed of the links.

    python -m benchmarks.gpu.switching [--model random:qwen3-8b] [--cards 1,2] [--kv bf16,int8] [--out FILE]

Prints JSON, and writes it with `--out`. All figures of a run are measured in that run, also those of links and memory.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.figures import GIB, copy_figures, decode_figures, decode_runs, memory_read_bytes_per_s
from benchmarks.gpu.lane import GpuLane, following, load, random_ids
from parkd.lane.checkpoints import checkpoints_to_take
from parkd.proxy.server import leave_out_of_collections
from parkd.types import PromptIdentity

A1_TOKENS, B1_TOKENS, A2_TOKENS = 86_343, 14_533, 86_376
ANSWER_TOKENS = 17
"""A2's prompt contains A1's, its answer and a new message."""
MAX_CARDS = 8


def pretend_read(lane: GpuLane, prompt: PromptIdentity) -> None:
    """Makes the rows in the arenas the state of `prompt`, with as many checkpoints as if it had been read cold."""
    session = lane.engine.session
    session.adopt(len(prompt))
    last = session.fixed_state.at(len(prompt))
    if last is not None:
        for place in checkpoints_to_take(prompt, 0, 0, lane.engine.info.ctx_checkpoints - 1):
            session.fixed_state._kept.keep(place, lambda _: [copy.clone() for copy in last])


def state_of(lane: GpuLane) -> list[torch.Tensor]:
    """The rows of every stage, and its fixed state if the model has any."""
    session = lane.engine.session
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
    engine = load(model, devices, cache, context_tokens=A2_TOKENS + 512, batch_tokens=batch_tokens, kv_format=kv)
    figures["load_s"] = time.perf_counter() - began
    began = time.perf_counter()
    lane = GpuLane(engine, budget_bytes)
    leave_out_of_collections()  # As the server does.
    figures["answers_after_s"] = time.perf_counter() - began
    assert lane.hooks is not None
    lane.hooks.settle(120)
    figures["pool_locked_after_s"] = time.perf_counter() - began
    figures["pool_locked_bytes"] = lane.hooks.locked_bytes
    vocab = engine.info.vocab_size
    figures["row_bytes"] = engine.info.layout.row_bytes
    figures["fixed_bytes"] = engine.info.layout.fixed_bytes
    figures["kernels"] = {
        "few": bool(engine.session.forward.dense),
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
    lane.store.drop(lane.live.rows.parked_id or "", "measured")
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
    restored = decode_runs(lane, devices)
    await lane.live.reset()
    await lane.turn(lane.prompt("never parked", a2), ANSWER_TOKENS)
    await lane.live.settle()
    again = decode_runs(lane, devices)
    # Both before and after, since runs of one state differ over time.
    never_ms = (whole_decode["ms"] + statistics.median(again) * 1e3) / 2
    figures["decode_restored_over_never_parked"] = statistics.median(restored) * 1e3 / never_ms
    figures["decode_ms_runs"] = {
        "never parked": [whole_decode["ms_runs"], [seconds * 1e3 for seconds in again]],
        "restored": [seconds * 1e3 for seconds in restored],
    }
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
        lane.store.drop(lane.live.rows.parked_id or "", "measured")
        await lane.live.reset()
        for parked, _shared in lane.store.candidates(lane.prompt("parted", a2).key.digest, ()):
            lane.store.drop(parked.id, "measured")
        pretend_read(lane, lane.prompt("parted", a2))
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
        gc.unfreeze()
        gc.collect()  # The model that was measured is in reference cycles.
        torch.cuda.empty_cache()
        if asked.out:
            asked.out.write_text(json.dumps(results, indent=1, default=str) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
