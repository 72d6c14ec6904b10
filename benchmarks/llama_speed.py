"""The overhead of the in-process engine: the same library context, used directly and through the engine.

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
DECODED = 16
"""Tokens per answer. Few, so that two compared answers are close in time."""
ANSWERS = 6
"""Answers of each kind after each prompt."""
BARE, NO_CALLBACK, ENGINE = "the library, bare", "the engine, not cancellable", "the engine"
WAYS = (BARE, NO_CALLBACK, ENGINE)
GOAL = 0.98
CALLBACK_GOAL = 0.99


@dataclass
class Speed:
    """Seconds by way of computing, for reading a prompt and for decoding an answer."""

    tokens: int
    raw: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def note(self, name: str, what: str, seconds: float, *, counts: bool) -> None:
        """Adds a measurement if it `counts`, that is, if it is not a warm-up."""
        if counts:
            self.raw.setdefault(name, {}).setdefault(what, []).append(seconds)

    def lines(self) -> list[tuple[str, str, str]]:
        return [
            (
                name,
                f"{self.tokens / statistics.median(times['read']):.1f}",
                f"{DECODED / statistics.median(times['decode']):.1f}" if "decode" in times else "",
            )
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
        """The speed of reading that can be cancelled, relative to reading that cannot."""
        pairs = zip(self.raw[NO_CALLBACK]["read"], self.raw[ENGINE]["read"], strict=True)
        return statistics.median(without / with_it for without, with_it in pairs)

    def _share(self, what: str, name: str) -> float:
        """The median of the shares of single pairs, since two consecutive runs see the same load on the machine."""
        pairs = zip(self.raw[BARE][what], self.raw[name][what], strict=True)
        return statistics.median(bare / other for bare, other in pairs)


def speed(model: Path, cache_dir: Path, tokens: int, repeats: int) -> Speed:
    """One warm-up of each; then runs in random order, so that none always has the same neighbour."""
    from parkd.config import ModelConfig
    from parkd.engine_adapter.llama_cpp.engine import LlamaCppEngine
    from parkd.state import EngineConfig

    config = ModelConfig(str(model), cache_dir, layout=EngineConfig(context_tokens=2048, batch_tokens=BATCH_TOKENS))
    engine = LlamaCppEngine.load(config)
    ids = np.random.default_rng(0).integers(1000, 20000, tokens).astype(np.int64)
    prompt, last = ids[:-1], int(ids[-1])
    measured, order = Speed(tokens), random.Random(0)
    reading = {BARE: _bare_reading, NO_CALLBACK: _uncancellable, ENGINE: _cancellable}
    answering = {BARE: _bare_answer, ENGINE: _answer}
    try:
        for run in range(repeats + 1):
            for name in order.sample(list(reading), len(reading)):
                engine.reset()
                started = time.perf_counter()
                reading[name](engine, prompt)
                measured.note(name, "read", time.perf_counter() - started, counts=run > 0)
            engine.reset()
            engine.extend(prompt, cancel=threading.Event())
            for name in order.sample(list(answering) * ANSWERS, ANSWERS * len(answering)):
                engine.truncate(len(prompt))
                started = time.perf_counter()
                answering[name](engine, last, ids)
                measured.note(name, "decode", time.perf_counter() - started, counts=run > 0)
    finally:
        engine.close()
    return measured


def _bare_reading(engine: Any, ids: Any) -> None:
    """Reads in whole batches, as llama.cpp's examples do."""
    import llama_cpp.llama_cpp as low

    context = engine.context.pointer
    tokens = (ctypes.c_int32 * len(ids))(*ids.tolist())
    for start in range(0, len(ids), BATCH_TOKENS):
        count = min(BATCH_TOKENS, len(ids) - start)
        at = ctypes.cast(ctypes.byref(tokens, start * 4), ctypes.POINTER(ctypes.c_int32))
        if low.llama_decode(context, low.llama_batch_get_one(at, count)):
            raise RuntimeError("llama.cpp did not read the batch")
    low.llama_synchronize(context)


def _uncancellable(engine: Any, ids: Any) -> None:
    """Reads as the engine does, but without the possibility to cancel."""
    for start in range(0, len(ids), BATCH_TOKENS):
        engine.timeline.decode(ids[start : start + BATCH_TOKENS], None)


def _cancellable(engine: Any, ids: Any) -> None:
    engine.extend(ids, cancel=threading.Event())


def _bare_answer(engine: Any, last: int, _ids: Any) -> None:
    """Decodes greedy tokens one by one, as llama.cpp's examples do."""
    import llama_cpp.llama_cpp as low

    context, one = engine.context.pointer, (ctypes.c_int32 * 1)(last)
    sampler = low.llama_sampler_init_greedy()
    for _ in range(DECODED):
        if low.llama_decode(context, low.llama_batch_get_one(one, 1)):
            raise RuntimeError("llama.cpp did not decode")
        one[0] = low.llama_sampler_sample(sampler, context, -1)
    low.llama_sampler_free(sampler)
    engine.timeline.position = engine.sequence.position


def _answer(engine: Any, _last: int, ids: Any) -> None:
    from parkd.types import SamplingParams

    engine.begin(ids, SamplingParams(temperature=0.0))
    answer = engine.generate()
    for _ in range(DECODED):
        next(answer)
    answer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=513, help="length of the prompt")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    started = machine()
    with tempfile.TemporaryDirectory() as folder:
        measured = speed(demo_model(), Path(folder), options.tokens, options.repeats)
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
                f"{BATCH_TOKENS}, then {DECODED} greedy tokens, with the engine and with a bare loop over the same "
                f"library and context (llama_decode, llama_sampler_sample), in random order: {options.repeats} "
                f"readings and {options.repeats * ANSWERS} answers of each. A share is the median over pairs that were "
                f"measured close to each other, since the machine's speed drifts."
            ),
            tables=[
                Table("Tokens a second, medians", ("what computes", "reading", "decoding"), tuple(measured.lines()))
            ],
            goals=[Goal(claim, f">= {goal}", f"{share:.3f}", share >= goal) for claim, goal, share in claims],
            raw={"seconds": measured.raw},
        ),
        started,
    )


if __name__ == "__main__":
    main()
