"""What checkpoints of fixed state cost while a prompt is read, as a share of the time that reading takes.

    python -m benchmarks.checkpoint_cost [--tokens 512 2048 8192] [--repeats 3]

A checkpoint costs a copy, and those inside the prompt end a chunk early, so that the arithmetic runs in smaller pieces.
The same prompt is read with and without, in turns, at the places that a turn of such a length takes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoConfig

from benchmarks.common import MIB, Goal, Result, Table, finish, machine, progress
from engine import EngineConfig, Session, open_session
from engine.hybrid_presets import HYBRID_PRESETS
from engine.presets import random_model
from parkd.proxy.checkpoints import checkpoints_to_take
from parkd.types import ConversationKey, PromptIdentity

CHUNK, LIMIT, COPIES, NARROWER = 512, 8, 20, 4
HEAD, QUESTION, GENERATION = 0.25, 0.8, 4
"""Where the system text ends and the last user message begins, in shares of the prompt; tokens of the last opener."""
MIDDLE_TURNS = 6
"""Answers of earlier turns in a long conversation."""
GOAL = 0.02
VOCABULARY = 8_000
KINDS = ("a first message", "a later message, all read anew", "the same, and the template rewrites its tail")


def shape() -> Any:
    """One period of Qwen3.5-27B's layers (three linear, one full) at a quarter of its width. Arithmetic falls with the
    square of the width, state with the width: so a checkpoint weighs four times what it does in the whole model."""
    kind, settings = HYBRID_PRESETS["qwen3.5-27b"]
    parted = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    parted += ("linear_num_key_heads", "linear_num_value_heads")
    changes = {name: settings[name] // NARROWER for name in parted}
    small = {"num_hidden_layers": 4, "vocab_size": VOCABULARY, "max_position_embeddings": 32_768}
    return AutoConfig.for_model(kind, **{**settings, **changes, **small})


def places_of(tokens: int, kind: str) -> tuple[int, ...]:
    """What the proxy takes in a prompt of so many tokens whose turns lie evenly between system text and question."""
    head, question = int(tokens * HEAD) - 3, int(tokens * QUESTION) - 3
    generation = tokens - GENERATION
    turns = [head + (question - head) * turn // (MIDDLE_TURNS + 1) for turn in range(1, MIDDLE_TURNS + 1)]
    boundaries = (head, generation) if kind == KINDS[0] else (head, *turns, question, generation)
    units = np.zeros(tokens, dtype=np.uint64)
    prompt = PromptIdentity(
        ConversationKey("", b""),
        units.astype(np.int64),
        units,
        (),
        boundaries=boundaries,
        generation_stays=kind != KINDS[2],
    )
    return checkpoints_to_take(prompt, 0, 0, LIMIT)


def read_s(session: Session, ids: npt.NDArray[np.int64], places: tuple[int, ...]) -> float:
    session.reset()
    started = time.perf_counter()
    session.extend(ids, checkpoint_at=places)
    taken = time.perf_counter() - started
    assert session.checkpoints == places, "checkpoints were not where they belong"
    return taken


def copies_s(session: Session, ids: npt.NDArray[np.int64]) -> list[float]:
    """Seconds of each copy alone; the memory of an earlier one is used again, as in a long conversation."""
    session.reset()
    taken = []
    for token in ids[:COPIES]:
        session.step(int(token))
        started = time.perf_counter()
        session.checkpoint()
        taken.append(time.perf_counter() - started)
    return taken[LIMIT:]


def measured(session: Session, ids: npt.NDArray[np.int64], repeats: int) -> dict[str, Any]:
    """Seconds of reading all but the last token, without checkpoints and with those of each kind of turn, in turns."""
    tokens = len(ids)
    places = {"none": (), **{kind: places_of(tokens, kind) for kind in KINDS}}
    runs: dict[str, list[float]] = {name: [] for name in places}
    for _ in range(repeats):
        for name, taken_at in places.items():
            runs[name].append(read_s(session, ids[:-1], taken_at))
        progress(f"{tokens:,} tokens: " + ", ".join(f"{taken[-1]:.2f} s" for taken in runs.values()))
    # Whatever else runs on the machine only ever adds: the fastest runs are compared.
    best = {name: min(taken) for name, taken in runs.items()}
    shares = {kind: best[kind] / best["none"] - 1 for kind in KINDS}
    return {"tokens": tokens, "places": places, "runs_s": runs, "shares": shares}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2_048, 8_192])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    started = machine()
    model = random_model(shape(), torch.float32, torch.device("cpu"))
    session = open_session(
        model, EngineConfig(context_tokens=max(options.tokens), batch_tokens=CHUNK, ctx_checkpoints=LIMIT)
    )
    ids = np.random.default_rng(0).integers(3, VOCABULARY, max(options.tokens))
    read_s(session, ids[: CHUNK + 50], (CHUNK,))
    alone = copies_s(session, ids)
    copy_s = statistics.median(alone)
    results = [measured(session, ids[:tokens], options.repeats) for tokens in options.tokens]
    fixed_bytes = sum(arena.layout.fixed_bytes for arena in session.arenas)
    rows = tuple(
        (
            f"{result['tokens']:,}",
            kind,
            str(len(result["places"][kind])),
            f"{min(result['runs_s']['none']):.2f}",
            f"{min(result['runs_s'][kind]):.2f}",
            f"{len(result['places'][kind]) * copy_s / min(result['runs_s']['none']):.2%}",
            f"{result['shares'][kind]:.1%}",
        )
        for result in results
        for kind in KINDS
    )
    goals = [
        Goal(
            f"checkpoints of {kind}, share of reading {result['tokens']:,} tokens",
            f"<= {GOAL:.0%}",
            f"{result['shares'][kind]:.1%}",
            result["shares"][kind] <= GOAL,
        )
        for result in results
        for kind in KINDS[:2]
    ]
    columns = ("tokens", "prompt", "checkpoints", "s without", "s with", "copies alone", "copies and cut chunks")
    result = Result(
        "checkpoint_cost",
        "What checkpoints cost while a prompt is read",
        f"One period of Qwen3.5-27B's layers (three linear, one full) at a quarter of its width, random weights, "
        f"float32, one stage on the CPU, {torch.get_num_threads()} threads. So a checkpoint weighs "
        f"{NARROWER} times what it does in the whole one. Prompts in chunks of {CHUNK} tokens, without checkpoints and "
        f"with those that the proxy takes, in turns; the fastest of {options.repeats} runs each. A first message "
        f"stands behind its system text; the later one behind {MIDDLE_TURNS} answers, of which nothing was parked.",
        [Table("Reading the prompt", columns, rows)],
        goals,
        [
            f"One copy of {fixed_bytes / MIB:.1f} MiB takes {1000 * copy_s:.2f} ms. The rest is what small chunks "
            "cost: every chunk reads all weights once, and delta nets fill theirs up to 64 tokens.",
            "The third kind of prompt is of templates whose generation prompt is not what they write before an earlier "
            "answer (an empty block of thought, say): there its start is kept too.",
        ],
        {"results": results, "copies_s": alone, "fixed_bytes": fixed_bytes},
    )
    finish(result, started)


if __name__ == "__main__":
    main()
