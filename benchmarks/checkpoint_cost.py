"""The cost of checkpoints of fixed state while a prompt is read, as a share of the reading time.

    python -m benchmarks.checkpoint_cost [--tokens 512 2048 8192] [--pairs 16]

A checkpoint costs a copy. One inside the prompt also ends a chunk early, so that there is one chunk more. The cost of
that is measured on one chunk, read alternately whole and cut. The number of cuts follows from the checkpoints that the
proxy takes in a prompt of that length. Comparing long prompts with and without checkpoints would not work: on shared
machines, two readings differ by more than the goal.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from parkd_engine import EngineConfig, Session, open_session
from parkd_engine.families.presets.shapes import PRESETS
from parkd_engine.families.presets.weights import random_model
from transformers import AutoConfig

from benchmarks.common import MIB, Goal, Result, Table, finish, machine, progress
from parkd.lane.checkpoints import checkpoints_to_take
from parkd.types import ConversationKey, PromptIdentity

CHUNK, LIMIT, COPIES, NARROWER = 512, 8, 20, 4
HEAD, QUESTION, GENERATION = 0.25, 0.8, 4
"""End of the system text and start of the last user message, as fractions of the prompt; tokens of the generation
prompt."""
CUTS = (125, 406, 508)
"""The positions at which one chunk is cut to measure the cost."""
MIDDLE_TURNS = 6
"""Earlier answers in a long conversation."""
GOAL = 0.02
VOCABULARY = 8_000
KINDS = ("a first message", "a later message, all read anew", "the same, and the template rewrites its tail")


def shape() -> Any:
    """One period of Qwen3.5-27B's layers (three linear, one full) at a quarter of its width. The work is proportional
    to the square of the width, the state to the width: relative to the work, a checkpoint is four times as large as in
    the whole model."""
    preset = PRESETS["qwen3.5-27b"]
    parted = (
        *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
        *("linear_num_key_heads", "linear_num_value_heads"),
    )
    changes = {name: preset.settings[name] // NARROWER for name in parted}
    small = {"num_hidden_layers": 4, "vocab_size": VOCABULARY, "max_position_embeddings": 32_768}
    return AutoConfig.for_model(preset.model_type, **{**preset.settings, **changes, **small})


def places_of(tokens: int, kind: str) -> tuple[int, ...]:
    """The checkpoints that the proxy takes in a prompt of `tokens`, with turns evenly spaced between system text and
    question."""
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
    """Seconds of each copy alone. Copies reuse the memory of earlier ones, as in a long conversation."""
    session.reset()
    taken = []
    for token in ids[:COPIES]:
        session.step(int(token))
        started = time.perf_counter()
        session.checkpoint()
        taken.append(time.perf_counter() - started)
    return taken[LIMIT:]


def cuts_s(session: Session, ids: npt.NDArray[np.int64], pairs: int) -> list[float]:
    """Seconds that one cut adds to a chunk, including the copy, for each pair of consecutive readings."""
    return [
        (read_s(session, ids[:CHUNK], (*CUTS, CHUNK)) - read_s(session, ids[:CHUNK], (CHUNK,))) / len(CUTS)
        for _ in range(pairs)
    ]


def row(tokens: int, kind: str, whole_s: float, cut_s: float, copy_s: float) -> dict[str, Any]:
    """The cost of checkpoints for a kind of turn, relative to `whole_s`, the time to read `tokens`."""
    places = places_of(tokens, kind)
    cuts = sum(place % CHUNK != 0 and place != tokens - 1 for place in places)
    extra_s = cuts * cut_s + (len(places) - cuts) * copy_s
    return {
        "tokens": tokens,
        "kind": kind,
        "places": places,
        "cuts": cuts,
        "copies_share": len(places) * copy_s / whole_s,
        "share": extra_s / whole_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2_048, 8_192])
    parser.add_argument("--pairs", type=int, default=16)
    options = parser.parse_args()
    started = machine()
    model = random_model(shape(), torch.float32, torch.device("cpu"))
    session = open_session(
        model, EngineConfig(context_tokens=max(options.tokens), batch_tokens=CHUNK, ctx_checkpoints=LIMIT)
    )
    ids = np.random.default_rng(0).integers(3, VOCABULARY, max(options.tokens))
    cuts_s(session, ids, 1)  # warms up
    copies, cuts = copies_s(session, ids), cuts_s(session, ids, options.pairs)
    copy_s, cut_s = statistics.median(copies), statistics.median(cuts)
    progress(f"a copy {1000 * copy_s:.2f} ms, a cut {1000 * cut_s:.0f} ms: {[round(cut, 3) for cut in cuts]}")
    reading_s = {}
    for tokens in options.tokens:
        reading_s[tokens] = min(read_s(session, ids[: tokens - 1], ()) for _ in range(2))
        progress(f"{tokens:,} tokens: {reading_s[tokens]:.2f} s")
    results = [row(tokens, kind, reading_s[tokens], cut_s, copy_s) for tokens in options.tokens for kind in KINDS]
    fixed_bytes = sum(arena.layout.fixed_bytes for arena in session.arenas)
    token_s = min(reading_s.values()) / min(options.tokens)
    rows = tuple(
        (
            f"{each['tokens']:,}",
            each["kind"],
            f"{reading_s[each['tokens']]:.2f}",
            str(len(each["places"])),
            str(each["cuts"]),
            f"{each['copies_share']:.2%}",
            f"{each['share']:.1%}",
        )
        for each in results
    )
    goals = [
        Goal(
            f"checkpoints of {each['kind']}, share of reading {each['tokens']:,} tokens",
            f"<= {GOAL:.0%}",
            f"{each['share']:.1%}",
            each["share"] <= GOAL,
        )
        for each in results
        if each["kind"] != KINDS[2]
    ]
    columns = ("tokens", "prompt", "s to read", "checkpoints", "chunks cut", "copies alone", "copies and cut chunks")
    result = Result(
        "checkpoint_cost",
        "What checkpoints cost while a prompt is read",
        f"One period of Qwen3.5-27B's layers (three linear, one full) at a quarter of its width, random weights, "
        f"float32, one stage on the CPU, {torch.get_num_threads()} threads. Relative to the work, a checkpoint is "
        f"{NARROWER} times as large as in the whole model. The cost of a cut is the median of {options.pairs} pairs of "
        f"readings of one chunk of {CHUNK} tokens, whole and cut at {', '.join(map(str, CUTS))}. A share is that cost, "
        f"times the number of cuts that the proxy makes in such a prompt, divided by the time to read it without cuts. "
        f"A first message follows a system text; the later one follows {MIDDLE_TURNS} answers, and nothing is parked.",
        [Table("Reading the prompt", columns, rows)],
        goals,
        [
            f"One copy of {fixed_bytes / MIB:.1f} MiB takes {1000 * copy_s:.2f} ms, one cut {1000 * cut_s:.0f} ms: as "
            f"much as reading {cut_s / token_s:.0f} tokens. Every chunk reads all weights once.",
            "The third kind of prompt is for templates whose generation prompt differs from the text before earlier "
            "answers (by an empty thinking block, for example): a checkpoint is then taken at its start too.",
            "An agent's turn that continues from the last answer takes one checkpoint, at its end, and cuts no chunk.",
        ],
        {"results": results, "copies_s": copies, "cuts_s": cuts, "reading_s": reading_s, "fixed_bytes": fixed_bytes},
    )
    finish(result, started)


if __name__ == "__main__":
    main()
