"""The cost and gain of guessing with a draft head on a card.

    python -m benchmarks.gpu.draft [--gain 0.0001] [--position 4096] [--tokens 96] [--out FILE]

Weights are random, and model and head are constructed to agree: the output of layers is multiplied by `gain`
(`families.presets.heads`). What carries over to a trained head is the time of a step, and so the share of right guesses
above which guessing pays. Answers are greedy. All settings use the same weights, one after the other.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from parkd_engine import EngineConfig, open_session
from parkd_engine.decoding import Decoder
from parkd_engine.families.presets.heads import random_head
from parkd_engine.families.presets.shapes import ECHO, WITH_HEAD, preset_config
from parkd_engine.families.presets.weights import random_model
from parkd_engine.session import Session
from parkd_engine.words.sampling import TensorSampler

from benchmarks.gpu.lane import random_ids
from benchmarks.gpu.switching import machine
from parkd.types import SamplingParams

CARD = "cuda:0"
SETTINGS = (0, 1, 2, 3)
"""Guesses per step."""
RUNS = 3
"""The first is a warm-up."""


def answer(session: Session, prompt: Any, vocabulary: int, tokens: int) -> dict[str, Any]:
    """Generates the same answer `RUNS` times. Returns its tokens and the time that one took."""
    seconds: list[float] = []
    for _ in range(RUNS):
        session.truncate(len(prompt) - 1)
        decoder = Decoder(session, TensorSampler(SamplingParams(temperature=0.0), vocabulary, prompt))
        steps = decoder.tokens(int(prompt[-1]))
        torch.cuda.synchronize()
        began = time.perf_counter()
        said = [next(steps) for _ in range(tokens)]
        seconds.append(time.perf_counter() - began)
        steps.close()
    return {"said": said, "drafted": decoder.counts.drafted, "accepted": decoder.counts.accepted, "runs_s": seconds[1:]}


def step_seconds(session: Session, guesses: int) -> dict[str, float]:
    """Seconds of one step by part: the guesses and the check of all of them, or the single token."""
    start = session.position
    times: dict[str, list[float]] = {"guess_ms": [], "check_ms": []} if guesses else {"single_ms": []}
    for _ in range(12):
        torch.cuda.synchronize()
        began = time.perf_counter()
        if guesses:
            found = session.guess(5, guesses, lambda logits: int(logits.argmax()))
            times["guess_ms"].append((time.perf_counter() - began) * 1e3)
            began = time.perf_counter()
            session.verify([5, *found]).argmax(-1).tolist()
            times["check_ms"].append((time.perf_counter() - began) * 1e3)
            session.truncate(session.position - guesses)
        else:
            int(session.step(5).argmax())
            times["single_ms"].append((time.perf_counter() - began) * 1e3)
    session.truncate(start)
    return {name: statistics.median(values[2:]) for name, values in times.items()}


def measure(model: str, gain: float, position: int, tokens: int, kv: str | None) -> list[dict[str, Any]]:
    config = preset_config(model + WITH_HEAD)
    weights = random_model(config, torch.bfloat16, torch.device(CARD), gain)
    head = random_head(weights, ECHO)
    vocabulary = int(config.vocab_size)
    prompt = random_ids(position + 1, vocabulary, 1)
    found: list[dict[str, Any]] = []
    for guesses in SETTINGS:
        layout = EngineConfig(
            devices=(CARD,), context_tokens=position + 1024, batch_tokens=2048, draft_tokens=guesses, kv_format=kv
        )
        session = open_session(weights, layout, draft_model=head if guesses else None)
        began = time.perf_counter()
        recorded = session.use_kernels()
        prepared = time.perf_counter() - began
        session.extend(prompt[:-1])
        session.checkpoint()
        figures = answer(session, prompt, vocabulary, tokens)
        session.truncate(position)
        figures |= {"guesses": guesses, "recorded": recorded, "prepared_s": prepared, **step_seconds(session, guesses)}
        figures["tokens_per_s"] = tokens / min(figures["runs_s"])
        first = found[0]["said"] if found else figures["said"]
        figures["same_tokens_as_single_steps"] = int(np.argmin([*np.equal(first, figures["said"]), False]))
        found.append(figures)
        print(json.dumps({name: value for name, value in figures.items() if name != "said"}), flush=True)
        del session
        torch.cuda.empty_cache()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random:qwen3.5-27b")
    parser.add_argument("--gain", type=float, default=1e-4, help="how much layers add to what they read")
    parser.add_argument("--position", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--kv", choices=("bf16", "int8"), default="bf16")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    kv = "int8" if asked.kv == "int8" else None
    result = {
        **machine(),
        "model": asked.model,
        "gain": asked.gain,
        "position": asked.position,
        "tokens": asked.tokens,
        "kv": asked.kv,
    }
    result["command"] = result["command"].replace("switching", "draft")
    result["runs"] = measure(asked.model, asked.gain, asked.position, asked.tokens, kv)
    if asked.out:
        asked.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
