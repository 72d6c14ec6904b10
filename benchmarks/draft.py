"""The cost and gain of guessing with a draft head that is never right, and with one constructed to agree.

    python -m benchmarks.draft [--tokens 48]

No trained checkpoint with a draft head is available here, so weights are random, of Qwen3.5's kind. A random head shows
the cost of guessing without any gain. The other pairs are constructed to agree to a chosen, reported degree: layers add
little to their input (`families.presets.heads`), but do all of their arithmetic. Answers are greedy, and every
setting's are compared with those of single steps. Only the last setting pauses while few guesses are right, as
parkd does; the others show what such a pause saves.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch
from parkd_engine import EngineConfig, open_session
from parkd_engine.decoding import Decoder
from parkd_engine.families.presets.heads import random_head
from parkd_engine.families.presets.shapes import ECHO, PRESETS
from parkd_engine.families.presets.weights import random_model
from parkd_engine.loading.draft_loading import declare_head
from parkd_engine.words.sampling import TensorSampler
from transformers import AutoConfig

from benchmarks.common import Result, Table, finish, machine, progress
from parkd.types import SamplingParams

GUESSES = ((0, False), (1, False), (2, False), (2, True))
"""(guesses per step, whether guessing pauses)."""
SHAPES = {"4 narrow layers": (4, 256), "12 wider layers": (12, 1024)}
"""The model's label -> its layers and hidden size. A step of the first is mostly call overhead; one of the second is
mostly reading weights, as in models that people run."""
GAINS = {"random head": 1.0, "agreeing, layers at 0.003": 0.003, "agreeing, layers at 0.0003": 0.0003}
"""The label of a pair of model and head -> the factor for what layers add to their input."""
PROMPT_TOKENS = 128
VOCABULARY = 8_000


def shape(layers: int, hidden: int) -> Any:
    """A configuration with Qwen3.5's layers (three of four linear), narrow enough for a CPU, with a draft head."""
    preset = PRESETS["qwen3.5-27b"]
    changes = {
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
    }
    config = AutoConfig.for_model(preset.model_type, **{**preset.settings, **changes})
    declare_head(config)
    return config


def measure(config: Any, gain: float, tokens: int) -> list[dict[str, Any]]:
    """Measures one pair of model and head with every setting of GUESSES."""
    model = random_model(config, torch.float32, torch.device("cpu"), gain)
    head = random_head(model, ECHO if gain < 1 else "")
    prompt = np.random.default_rng(0).integers(3, VOCABULARY, PROMPT_TOKENS)
    found: list[dict[str, Any]] = []
    expected: list[int] = []
    for guesses, pauses in GUESSES:
        config_of_session = EngineConfig(context_tokens=512, batch_tokens=PROMPT_TOKENS, draft_tokens=guesses)
        session = open_session(model, config_of_session, draft_model=head)
        session.draft_pauses = pauses
        session.extend(prompt[:-1])
        session.checkpoint()
        seconds: list[float] = []
        for _ in range(3):  # The first is a warm-up.
            session.truncate(PROMPT_TOKENS - 1)
            decoder = Decoder(session, TensorSampler(SamplingParams(temperature=0.0), VOCABULARY, prompt))
            steps = decoder.tokens(int(prompt[-1]))
            began = time.perf_counter()
            said = [next(steps) for _ in range(tokens)]
            seconds.append(time.perf_counter() - began)
            steps.close()
        expected = expected or said
        counts = decoder.counts
        found.append(
            {
                "guesses": f"{guesses}, pausing" if pauses else guesses,
                "drafted": counts.drafted,
                "accepted": counts.accepted,
                "seconds": seconds[1:],
                "tokens_per_second": tokens / min(seconds[1:]),
                "same_answer": said == expected,
                "different_tokens": len(set(said)),
            }
        )
        progress(f"guesses: {found[-1]}")
    return found


def table(name: str, rows: list[dict[str, Any]]) -> Table:
    base = rows[0]["tokens_per_second"]
    lines = [
        (
            str(row["guesses"]),
            f"{row['accepted'] / row['drafted']:.0%}" if row["drafted"] else "-",
            f"{row['tokens_per_second']:.1f}",
            f"{row['tokens_per_second'] / base:.2f}",
            "yes" if row["same_answer"] else "no",
        )
        for row in rows
    ]
    return Table(name, ("guesses a step", "right", "tokens/s", "against none", "same answer"), tuple(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=48)
    options = parser.parse_args()
    started = machine()
    raw = {
        f"{name}, {pair}": measure(shape(*size), gain, options.tokens)
        for name, size in SHAPES.items()
        for pair, gain in GAINS.items()
    }
    result = Result(
        name="draft",
        title="Guessing ahead with a draft head",
        how=(
            f"Random weights of Qwen3.5's kind: "
            f"{', '.join(f'{name} (hidden size {size[1]:,})' for name, size in SHAPES.items())}; vocabulary "
            f"{VOCABULARY:,}, float32, {torch.get_num_threads()} threads. {options.tokens} greedy tokens after a "
            f"prompt of {PROMPT_TOKENS}; the faster of two runs, after one warm-up. A random head gains nothing and "
            f"shows the cost of guessing. The others are constructed to agree: layers add the given share to their "
            f"input, so that the output of model and head mostly depends on the last token alone, but do all of their "
            f"arithmetic. How often a trained head is right is not known. Without `--draft-tokens`, parkd does not "
            f"guess. With it, guessing pauses while fewer than a quarter are right, as in the last line of each table."
        ),
        tables=[table(name, rows) for name, rows in raw.items()],
        raw=raw,
    )
    finish(result, started)


if __name__ == "__main__":
    main()
