"""Synthetic traces of typical usage patterns; the same for the same seed.

A trace is named by a pattern and its parameters: `round-robin?agents=8&turns=20`. Sizes are in tokens, times in
seconds.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping
from types import MappingProxyType
from urllib.parse import parse_qsl

from parkd.replay.trace import HASH_BYTES, Trace, TraceError, TraceHeader, TurnRecord

BLOCK_TOKENS = 256
TURN_S = 8.0
"""Seconds between two turns of agents that do not wait for a person."""
THINK_S = 120.0
"""Median pause of a person, in seconds."""
SPREAD = 1.0
"""Sigma of the log-normal distribution of pauses."""


class _Talk:
    """A conversation that grows."""

    def __init__(self, rng: random.Random, tokens: int, head: tuple[bytes, ...] = ()) -> None:
        self._rng = rng
        self.chain = head
        self.tokens = len(head) * BLOCK_TOKENS
        self._grow(tokens)

    def turn(self, at_s: float, asked: int, answered: int, end: str = "stop") -> TurnRecord:
        self._grow(asked)
        prompt = self.tokens
        self._grow(answered)
        return TurnRecord(at_s, "", prompt, self.tokens, self.chain, end)

    def fork(self, tokens: int) -> _Talk:
        """A new conversation that begins with this one's full blocks."""
        return _Talk(self._rng, tokens, self.chain)

    def _grow(self, tokens: int) -> None:
        self.tokens += tokens
        missing = self.tokens // BLOCK_TOKENS - len(self.chain)
        self.chain += tuple(self._rng.randbytes(HASH_BYTES) for _ in range(missing))


def parent_worker(
    rng: random.Random,
    parents: int = 2,
    workers: int = 4,
    rounds: int = 12,
    parent_tokens: int = 30_000,
    worker_tokens: int = 8_000,
    worker_turns: int = 3,
    shared: int = 6_000,
) -> list[TurnRecord]:
    """Parents that delegate work to new workers, for a few turns each, and continue when these are done."""
    system = _Talk(rng, shared)
    turns: list[TurnRecord] = []
    talks = [system.fork(parent_tokens) for _ in range(parents)]
    at_s = 0.0
    for _ in range(rounds):
        for parent in talks:
            turns.append(parent.turn(at_s, 600, 400, "tool_calls"))
            at_s += TURN_S
            for _ in range(workers):
                worker = system.fork(worker_tokens)
                for _ in range(worker_turns):
                    turns.append(worker.turn(at_s, 800, 300, "tool_calls"))
                    at_s += TURN_S
    return turns


def round_robin(
    rng: random.Random, agents: int = 8, turns: int = 25, tokens: int = 20_000, step: int = 900, shared: int = 4_000
) -> list[TurnRecord]:
    """Agents that take turns in a fixed order; each conversation grows."""
    system = _Talk(rng, shared)
    talks = [system.fork(tokens) for _ in range(agents)]
    return [
        talk.turn((lap * agents + place) * TURN_S, step, 300, "tool_calls")
        for lap in range(turns)
        for place, talk in enumerate(talks)
    ]


def fan_out(
    rng: random.Random, workers: int = 16, shared: int = 20_000, tail: int = 2_500, turns: int = 6, waves: int = 4
) -> list[TurnRecord]:
    """Waves of workers with one long system prompt, working in parallel."""
    system = _Talk(rng, shared)
    records: list[TurnRecord] = []
    for _ in range(waves):
        talks = [system.fork(tail) for _ in range(workers)]
        for _ in range(turns):
            for talk in talks:
                records.append(talk.turn(len(records) * TURN_S, 500, 300, "tool_calls"))
    return records


def chat_titles(
    rng: random.Random, chats: int = 24, turns: int = 12, tokens: int = 3_000, step: int = 1_200, shared: int = 1_500
) -> list[TurnRecord]:
    """People who chat; after answers, their client sends requests of its own (a title, follow-up questions)."""
    system = _Talk(rng, shared)
    records: list[TurnRecord] = []
    for chat in range(chats):
        at_s = chat * THINK_S / 2
        talk = system.fork(tokens)
        for turn in range(1 + int(rng.expovariate(1 / turns))):
            records.append(talk.turn(at_s, step, 500))
            if turn % 3 == 0:
                records.append(_Talk(rng, min(talk.tokens, 4_000)).turn(at_s + 2.0, 200, 20))
            at_s += rng.lognormvariate(0.0, SPREAD) * THINK_S
    return sorted(records, key=lambda record: record.at_s)


def compaction(
    rng: random.Random,
    agents: int = 5,
    turns: int = 60,
    start: int = 8_000,
    step: int = 2_500,
    limit: int = 50_000,
    shared: int = 6_000,
) -> list[TurnRecord]:
    """Agents that grow to a limit and start again from a summary; the old conversation never returns."""
    system = _Talk(rng, shared)
    talks = [system.fork(start + rng.randrange(limit - start)) for _ in range(agents)]
    records: list[TurnRecord] = []
    for _ in range(turns):
        for place, talk in enumerate(talks):
            if talk.tokens > limit:
                records.append(talk.turn(len(records) * TURN_S, 200, 1_500))
                talks[place] = system.fork(start)
            records.append(talks[place].turn(len(records) * TURN_S, step, 400, "tool_calls"))
    return records


def one_shots(
    rng: random.Random,
    chats: int = 6,
    turns: int = 15,
    tokens: int = 15_000,
    step: int = 900,
    flood: int = 500,
    shot: int = 12_000,
) -> list[TurnRecord]:
    """Long chats among many prompts that are never sent again."""
    records: list[TurnRecord] = []
    last_s = 0.0
    for chat in range(chats):
        talk, at_s = _Talk(rng, tokens), chat * 20.0
        for _ in range(turns):
            records.append(talk.turn(at_s, step, 400))
            at_s += rng.lognormvariate(0.0, SPREAD / 2) * THINK_S
        last_s = max(last_s, at_s)
    for _ in range(flood):
        size = int(shot * rng.lognormvariate(0.0, 0.5))
        records.append(_Talk(rng, size).turn(rng.uniform(0.0, last_s), 1, 200))
    return sorted(records, key=lambda record: record.at_s)


Generator = Callable[..., list[TurnRecord]]

GENERATORS: Mapping[str, Generator] = MappingProxyType(
    {
        "parent-worker": parent_worker,
        "round-robin": round_robin,
        "fan-out": fan_out,
        "chat-titles": chat_titles,
        "compaction": compaction,
        "one-shots": one_shots,
    }
)


def generate(text: str) -> Trace:
    """`text` is `NAME` or `NAME?parameter=number&...`; all patterns have a parameter `seed` (0). Raises TraceError."""
    name, _, query = text.partition("?")
    make = GENERATORS.get(name)
    if make is None:
        raise TraceError(f"no generator {name!r}; there are {', '.join(GENERATORS)}")
    known = [parameter for parameter in inspect.signature(make).parameters if parameter != "rng"]
    sizes: dict[str, int] = {}
    seed = 0
    for key, value in parse_qsl(query, keep_blank_values=True):
        if key not in (*known, "seed") or not value.isdecimal() or (key != "seed" and int(value) == 0):
            raise TraceError(f"{name}: {key}={value}: expected a whole number from 1 for one of {', '.join(known)}")
        if key == "seed":
            seed = int(value)
        else:
            sizes[key] = int(value)
    try:
        turns = make(random.Random(seed), **sizes)  # noqa: S311 - not for secrets
    except ValueError as error:
        raise TraceError(f"{name}: {error}") from None
    return Trace(text, TraceHeader(BLOCK_TOKENS), tuple(turns))
