"""The canary of an engine that parkd only sits in: is an answer after a restore the one that was computed cold?

Each trial asks the same prompt three times, under three salts that nobody else has, so that the engine's own caches
know nothing of it:

    cold       computed; what it leaves is kept under a name
    restored   starts from what was kept under that name: must answer equally
    mistaken   starts from what another prompt left: must answer otherwise, or nothing was restored before either

Lengths stand around multiples of a chunk, where schedulers were seen to be wrong. Pure but for `ask`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

PARAMS_KEY = "parkd_tier"
"""Under `kv_transfer_params` of a request."""
CHUNKS = 4
FIRST_TOKEN, END_TOKEN = 10, 500
"""Tokens of prompts: every vocabulary has these."""
ANSWER_TOKENS = 12
LOGPROB_TOLERANCE = 0.1
"""Most by which logarithms of probabilities may differ: a restored prompt is computed in other shapes than a cold one,
which changes roundings."""
SALT_BITS = 128


@dataclass(frozen=True)
class Reply:
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    """Of each token."""


Ask = Callable[[list[int], str, Mapping[str, Any]], Reply]
"""Prompt, salt, and what is said to the tier. Greedy, `ANSWER_TOKENS` long."""


@dataclass(frozen=True)
class Verdict:
    passed: bool
    told: str
    """A sentence for people."""


def alike(one: Reply, other: Reply) -> bool:
    return one.tokens == other.tokens and all(
        abs(mine - theirs) <= LOGPROB_TOLERANCE for mine, theirs in zip(one.logprobs, other.logprobs, strict=True)
    )


def trial_lengths(chunk_tokens: int) -> tuple[int, ...]:
    whole = CHUNKS * chunk_tokens
    return whole - 1, whole, whole + 1, whole + chunk_tokens // 2 + 1


def try_all(ask: Ask, chunk_tokens: int, token: str, source: random.Random) -> Verdict:
    """Runs all trials. `token`: by which the tier knows that whoever asks may read its directory."""
    lengths = trial_lengths(chunk_tokens)
    for length in lengths:
        prompt, strange = ([source.randrange(FIRST_TOKEN, END_TOKEN) for _ in range(length)] for _ in range(2))
        names = [f"{source.getrandbits(64):016x}" for _ in range(2)]

        def said(prompt: list[int], **params: str) -> Reply:
            return ask(prompt, f"{source.getrandbits(SALT_BITS):032x}", {PARAMS_KEY: {"token": token, **params}})

        cold = said(prompt, record=names[0])
        said(strange, record=names[1])
        if not alike(said(prompt, replay=names[0]), cold):
            return Verdict(False, f"after a restore of {length} tokens the answer was another than the cold one")
        if alike(said(prompt, replay=names[1]), cold):
            return Verdict(False, f"another prompt's state of {length} tokens did not change the answer: none was used")
    shown = ", ".join(map(str, lengths))
    return Verdict(True, f"restored answers were those of cold reads, at {shown} tokens")
