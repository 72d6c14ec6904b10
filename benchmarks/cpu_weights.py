"""Decoding on CPUs with quantised weights, beside llama.cpp with the same model.

python -m benchmarks.cpu_weights [--tokens N] [--repeats N] [--threads N]

Needs parkd[torch,llama-cpp] and the demo model.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import Goal, Result, Table, finish, machine
from benchmarks.servers import demo_model

PROMPT, CONTEXT = 128, 1024
LLAMA = "llama.cpp, Q4_1"
WAYS = {"float32": None, "int8": "int8", "int4": "int4"}
"""Name -> `--weights` of the torch engine."""
GOAL = 0.8


def engines(model: Path, cache: Path, threads: int) -> dict[str, Any]:
    import torch

    from parkd.config import ModelConfig
    from parkd.engine_adapter.llama_cpp.engine import LlamaCppEngine
    from parkd.engine_adapter.torch_engine.engine import TorchEngine
    from parkd.state import EngineConfig

    torch.set_num_threads(threads)

    def of(weights: str | None) -> TorchEngine:
        layout = EngineConfig(devices=("cpu",), context_tokens=CONTEXT, weights=weights)
        return TorchEngine.load(ModelConfig(str(model), cache, layout=layout))

    made: dict[str, Any] = {name: of(weights) for name, weights in WAYS.items()}
    layout = EngineConfig(context_tokens=CONTEXT)
    made[LLAMA] = LlamaCppEngine.load(ModelConfig(str(model), cache, layout=layout, threads=threads))
    return made


def decoded(engine: Any, ids: Any, tokens: int) -> float:
    """Tokens a second, greedy, behind the prompt that is there."""
    from parkd.types import SamplingParams

    engine.truncate(len(ids) - 1)
    engine.begin(ids, SamplingParams(temperature=0.0))
    answer = engine.generate()
    next(answer)
    began_s = time.perf_counter()
    for _ in range(tokens):
        next(answer)
    seconds = time.perf_counter() - began_s
    answer.close()
    return tokens / seconds


def measure(model: Path, cache: Path, tokens: int, repeats: int, threads: int) -> dict[str, list[float]]:
    """Each way once in each round, in random order; the first round counts for nothing."""
    made, order = engines(model, cache, threads), random.Random(0)
    ids = np.random.default_rng(0).integers(1000, 20000, PROMPT).astype(np.int64)
    speeds: dict[str, list[float]] = {name: [] for name in made}
    for engine in made.values():
        engine.extend(ids[:-1], cancel=threading.Event())
    for turn in range(repeats + 1):
        for name in order.sample(list(made), len(made)):
            speed = decoded(made[name], ids, tokens)
            if turn:
                speeds[name].append(speed)
    for engine in made.values():
        engine.close()
    return speeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    started = machine()
    with tempfile.TemporaryDirectory() as folder:
        speeds = measure(demo_model(), Path(folder), options.tokens, options.repeats, options.threads)
    share = statistics.median(mine / theirs for mine, theirs in zip(speeds["int4"], speeds[LLAMA], strict=True))
    finish(
        Result(
            name="cpu_weights",
            title="Decoding on CPUs with quantised weights",
            how=(
                f"SmolLM2-135M-Instruct behind {PROMPT} tokens, {options.tokens} greedy tokens at a time, the ways in "
                f"random order in each of {options.repeats} rounds: the torch engine with --weights, and llama.cpp in "
                f"process with the Q4_1 file, {options.threads} threads for each. The share is the median over rounds."
            ),
            tables=[
                Table(
                    "Tokens a second, medians",
                    ("weights", "decoding"),
                    tuple((name, f"{statistics.median(each):.1f}") for name, each in speeds.items()),
                )
            ],
            goals=[Goal("int4 against llama.cpp", f">= {GOAL}", f"{share:.2f}", share >= GOAL)],
            raw={"tokens_a_second": speeds},
        ),
        started,
    )


if __name__ == "__main__":
    main()
