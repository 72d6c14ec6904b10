"""What the engine in process takes from the library's speed: the same context, used bare and through the engine.

python -m benchmarks.llama_speed [--tokens N] [--repeats N]

Needs parkd[llama-cpp] and the demo model.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import Goal, Result, Table, finish, machine
from benchmarks.servers import demo_model

BATCH_TOKENS = 512
DECODED = 48
BARE, NO_CALLBACK, ENGINE = "the library, bare", "the engine, not cancellable", "the engine"
WAYS = (BARE, NO_CALLBACK, ENGINE)
GOAL = 0.98
CALLBACK_GOAL = 0.99


@dataclass
class Speed:
    """Seconds by what computes: reading a prompt, decoding an answer."""

    tokens: int
    raw: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def note(self, name: str, what: str, seconds: float) -> None:
        self.raw.setdefault(name, {}).setdefault(what, []).append(seconds)

    def lines(self) -> list[tuple[str, float, float]]:
        return [
            (name, self.tokens / statistics.median(times["read"]), DECODED / statistics.median(times["decode"]))
            for name, times in sorted(self.raw.items(), key=lambda item: WAYS.index(item[0]))
        ]

    @property
    def read_share(self) -> float:
        return self._share("read", ENGINE)

    @property
    def decode_share(self) -> float:
        return self._share("decode", ENGINE)

    @property
    def callback_share(self) -> float:
        """Of the reading's speed that is left when it may be cancelled."""
        pairs = zip(self.raw[NO_CALLBACK]["read"], self.raw[ENGINE]["read"], strict=True)
        return statistics.median(without / with_it for without, with_it in pairs)

    def _share(self, what: str, name: str) -> float:
        """Median of the runs' own shares: a run and its neighbour see the same machine."""
        pairs = zip(self.raw[BARE][what], self.raw[name][what], strict=True)
        return statistics.median(bare / other for bare, other in pairs)


def speed(model: Path, cache_dir: Path, tokens: int, repeats: int) -> Speed:
    """One warm-up of each first; then each run in an order of its own, so that none has always the same neighbour."""
    from parkd.engine_adapter.llama_cpp import LlamaCppConfig
    from parkd.engine_adapter.llama_cpp.engine import LlamaCppEngine

    config = LlamaCppConfig(model, cache_dir, context_tokens=2048, batch_tokens=BATCH_TOKENS)
    engine = LlamaCppEngine.load(config)
    ids = np.random.default_rng(0).integers(1000, 20000, tokens).astype(np.int64)
    measured = Speed(tokens)
    ways = {BARE: _bare, NO_CALLBACK: _uncancellable, ENGINE: _through}
    order = random.Random(0)
    try:
        for run in range(repeats + 1):
            for name in order.sample(list(ways), len(ways)):
                engine.reset()
                read_s, decode_s = ways[name](engine, ids)
                if run:
                    measured.note(name, "read", read_s)
                    measured.note(name, "decode", decode_s)
    finally:
        engine.close()
    return measured


def _through(engine: Any, ids: Any) -> tuple[float, float]:
    started = time.perf_counter()
    engine.extend(ids[:-1], cancel=threading.Event())
    return _timed_answer(engine, ids, started)


def _uncancellable(engine: Any, ids: Any) -> tuple[float, float]:
    """As the engine reads, but that nothing can stop it."""
    started = time.perf_counter()
    for start in range(0, len(ids) - 1, BATCH_TOKENS):
        engine._decode(ids[:-1][start : start + BATCH_TOKENS], None)
    return _timed_answer(engine, ids, started)


def _timed_answer(engine: Any, ids: Any, started: float) -> tuple[float, float]:
    from parkd.types import SamplingParams

    read = time.perf_counter()
    answer = engine.generate(int(ids[-1]), SamplingParams(temperature=0.0), history=ids)
    for _ in range(DECODED):
        next(answer)
    return read - started, time.perf_counter() - read


def _bare(engine: Any, ids: Any) -> tuple[float, float]:
    """What llama.cpp's own examples do: whole batches, then greedy tokens one by one."""
    import llama_cpp.llama_cpp as low

    context = engine._model.context
    tokens = (ctypes.c_int32 * len(ids))(*ids.tolist())
    sampler = low.llama_sampler_init_greedy()
    started = time.perf_counter()
    for start in range(0, len(ids) - 1, BATCH_TOKENS):
        count = min(BATCH_TOKENS, len(ids) - 1 - start)
        at = ctypes.cast(ctypes.byref(tokens, start * 4), ctypes.POINTER(ctypes.c_int32))
        if low.llama_decode(context, low.llama_batch_get_one(at, count)):
            raise RuntimeError("llama.cpp did not read the batch")
    low.llama_synchronize(context)
    read = time.perf_counter()
    one = (ctypes.c_int32 * 1)(int(ids[-1]))
    for _ in range(DECODED):
        if low.llama_decode(context, low.llama_batch_get_one(one, 1)):
            raise RuntimeError("llama.cpp did not decode")
        one[0] = low.llama_sampler_sample(sampler, context, -1)
    ended = time.perf_counter()
    low.llama_sampler_free(sampler)
    return read - started, ended - read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=513, help="length of the prompt")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    started = machine()
    with tempfile.TemporaryDirectory() as folder:
        measured = speed(demo_model(), Path(folder), options.tokens, options.repeats)
    lines = [(name, f"{read:.1f}", f"{decoded:.1f}") for name, read, decoded in measured.lines()]
    claims = (
        ("reading in process against the library alone", GOAL, measured.read_share),
        ("decoding in process against the library alone", GOAL, measured.decode_share),
        (
            "reading that can be cancelled inside a batch against reading that cannot",
            CALLBACK_GOAL,
            measured.callback_share,
        ),
    )
    finish(
        Result(
            name="llama_speed",
            title="llama.cpp in process: what the engine takes from the library's speed",
            how=(
                f"SmolLM2-135M-Instruct Q4_1 on the CPU: a prompt of {options.tokens} tokens in batches of "
                f"{BATCH_TOKENS}, then {DECODED} greedy tokens, by the engine and by a bare loop over the same library "
                f"and context (llama_decode, llama_sampler_sample), {options.repeats} times each, in random order. A "
                f"share is the median over the repeats of what one repeat gives, since the machine's speed drifts."
            ),
            tables=[Table("Tokens a second, medians", ("what computes", "reading", "decoding"), tuple(lines))],
            goals=[Goal(claim, f">= {goal}", f"{share:.3f}", share >= goal) for claim, goal, share in claims],
            raw={"seconds": measured.raw},
        ),
        started,
    )


if __name__ == "__main__":
    main()
