"""Seats: a switch between live conversations, one seat's speed beside others, and memory.

    python -m benchmarks.gpu.seats --models random:qwen3-8b,random:qwen3.5-27b [--seats 1,2] [--a1 20000] [--out FILE]

For each model an engine with one seat and one with several: decoding of one conversation, A1 -> B1 -> A2 through
engine, store and parking code (no HTTP), and what the card measures beside the account. With several seats also steps
of several at once. Prints JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from parkd_engine import Session
from parkd_engine.together import WIDTHS, Together

from benchmarks.gpu.figures import GIB
from benchmarks.gpu.lane import GpuLane, following, load, random_ids
from benchmarks.gpu.switching import machine
from parkd.engine_adapter.torch_engine.engine import TorchEngine
from parkd.state.engine_config import CARD_BATCH

CARD = "cuda:0"
STEPS, REPEATS = 40, 5
ANSWER_TOKENS, MORE_TOKENS = 17, 16


def sessions_of(engine: TorchEngine) -> list[Session]:
    return [seat.session for seat in engine.seats]  # type: ignore[attr-defined]


def decode_ms(session: Session, vocab_size: int, tokens: int) -> list[float]:
    """Milliseconds a token, after `tokens` tokens, in each of `REPEATS` runs; greedy choice on the card."""
    session.reset()
    session.extend(random_ids(tokens, vocab_size, 5))
    found = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        began, token = time.perf_counter(), 7
        for _ in range(STEPS):
            token = int(session.step(token).argmax())
        found.append((time.perf_counter() - began) / STEPS * 1e3)
    return found


async def parked_switch(engine: TorchEngine, a1_tokens: int, b1_tokens: int) -> dict[str, Any]:
    """With one seat: A2 restores what B's turn parked."""
    lane = GpuLane(engine, 8 * GIB)
    assert lane.hooks is not None
    lane.hooks.settle(120)
    vocab = engine.info.vocab_size
    a1, b1 = random_ids(a1_tokens, vocab, 1), random_ids(b1_tokens, vocab, 2)
    first = await lane.turn(lane.prompt("a", a1), ANSWER_TOKENS)
    await lane.turn(lane.prompt("b", b1), ANSWER_TOKENS)
    await lane.live.settle()
    back = await lane.turn(lane.prompt("a", following(a1, first, random_ids(MORE_TOKENS, vocab, 3))), ANSWER_TOKENS)
    await lane.live.settle()
    lane.thread.stop(30.0)
    lane.store.close()
    return {"a1_s": first.first_token_s, "a2_s": back.first_token_s, "outcome": back.outcome, "tokens": back.tokens}


def live_switch(engine: TorchEngine, a1_tokens: int, b1_tokens: int) -> dict[str, Any]:
    """With several: A2 goes on in its seat."""
    one, two = sessions_of(engine)[:2]
    for session in (one, two):
        session.reset()
    vocab = engine.info.vocab_size
    a1, b1 = random_ids(a1_tokens, vocab, 1), random_ids(b1_tokens, vocab, 2)
    said, seconds = [int(a1[-1])], []
    one.extend(a1[:-1])
    for _ in range(ANSWER_TOKENS):
        said.append(int(one.step(said[-1]).argmax()))
    two.extend(b1[:-1])
    two.step(int(b1[-1]))
    more = random_ids(MORE_TOKENS, vocab, 3)
    torch.cuda.synchronize()
    began = time.perf_counter()
    one.checkpoint()
    one.extend([said[-1], *more[:-1]])
    tokens = [int(one.step(int(more[-1])).argmax())]
    seconds.append(time.perf_counter() - began)
    for _ in range(ANSWER_TOKENS - 1):
        tokens.append(int(one.step(tokens[-1]).argmax()))
    return {"a2_s": seconds[0], "tokens": tokens}


def together_ms(engine: TorchEngine, tokens: int) -> dict[int, float]:
    """Seats that step together -> milliseconds a step, each `tokens` tokens long; empty if such steps are not
    recorded."""
    sessions, vocab = sessions_of(engine), engine.info.vocab_size
    found: dict[int, float] = {}
    together = Together(sessions)
    for session in sessions:
        session.reset()
    if not together.record():
        return found
    for width in (each for each in WIDTHS if each <= len(sessions)):
        for number, session in enumerate(sessions):
            session.reset()
            if number < width:
                session.extend(random_ids(tokens, vocab, number))
        said, runs = [7] * width, []
        for _ in range(REPEATS):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(STEPS):
                scores = together.step(range(width), said)
                said = torch.stack(scores).argmax(dim=-1).tolist()
            runs.append((time.perf_counter() - began) / STEPS * 1e3)
        found[width] = statistics.median(runs)
    return found


def memory(engine: TorchEngine, before: int) -> dict[str, float]:
    account = sum(engine.info.memory[0].values())
    reserved = torch.cuda.max_memory_reserved() - before
    return {
        "account_mib": account / 2**20,
        "reserved_mib": reserved / 2**20,
        "reserved_over_account": reserved / account,
    }


def measured(model: str, seats: int, a1_tokens: int, b1_tokens: int) -> dict[str, Any]:
    torch.cuda.reset_peak_memory_stats()
    before, began = torch.cuda.memory_reserved(), time.perf_counter()
    engine = load(
        model,
        (CARD,),
        Path(tempfile.gettempdir()) / "parkd-bench",
        context_tokens=a1_tokens + 512,
        batch_tokens=CARD_BATCH,
        seats=seats,
    )
    figures: dict[str, Any] = {"seats": seats, "load_s": time.perf_counter() - began, "rows": engine.info.row_tokens}
    vocab = engine.info.vocab_size
    for number, session in enumerate(sessions_of(engine)[:2]):
        runs = decode_ms(session, vocab, 4096)
        figures[f"decode_ms_seat_{number}"] = {"median": statistics.median(runs), "runs": runs}
    if seats == 1:
        figures |= asyncio.run(parked_switch(engine, a1_tokens, b1_tokens))
    else:
        figures |= live_switch(engine, a1_tokens, b1_tokens)
    figures["memory"] = memory(engine, before)
    if seats > 1:
        figures["together_ms"] = together_ms(engine, 4096)
    engine.close()
    del engine, session
    gc.collect()
    torch.cuda.empty_cache()
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="random:qwen3-8b,random:qwen3.5-27b")
    parser.add_argument("--seats", default="1,2")
    parser.add_argument("--a1", type=int, default=20_000)
    parser.add_argument("--b1", type=int, default=4000)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    results: dict[str, Any] = {**machine(), "models": {}}
    results["command"] = results["command"].replace("switching", "seats")
    for model in asked.models.split(","):
        runs = [measured(model, int(seats), asked.a1, asked.b1) for seats in asked.seats.split(",")]
        results["models"][model] = runs
        print(json.dumps({model: runs}), flush=True)
        if asked.out is not None:
            asked.out.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
