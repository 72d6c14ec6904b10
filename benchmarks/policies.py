"""Seconds saved by the eviction policies over synthetic and public traces, compared with LRU and an upper bound.

    python -m benchmarks.policies [--trace FILE] [--quick]

Each trace is replayed on the real store, without a model, with budgets that are fractions of what would keep
everything. The public trace is replayed with fixed budgets, and only its second half, because the value policy's
return probability was fitted to its first half. Seconds come from a cost model: 0.38 ms per token plus 10 ns for each
token before it, restores at 8 GB/s, 96 KiB per token. The bound is the clairvoyant linear program of
`parkd/replay/bound.py`, which no policy can exceed. Shares of the bound include what the arenas alone save, since every
policy has that; the column `without live` does not.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import MIB, Goal, Result, Table, finish, machine, progress
from parkd.replay.bound import clairvoyant_bound_s
from parkd.replay.driver import Replayer, replay
from parkd.replay.generators import GENERATORS, generate
from parkd.replay.result import DEFAULT_COSTS, ReplayConfig, ReplayResult
from parkd.replay.trace import Trace, read_trace
from parkd.state import Checksums, StageLayout, StateLayout
from parkd.store.policy import LruPolicy, ValuePolicy, policy_named
from parkd.store.records import Capture, CaptureRequest, StoreConfig
from parkd.store.store import ConversationStore

POLICIES = ("lru", "gdsf", "value")
PARTS = (8, 4, 2)
FLOOD_PARTS = (32, 16, 8)
AGENTS = ("parent-worker", "round-robin", "fan-out", "compaction")
PUBLIC_TOKENS = (1_000_000, 2_000_000, 4_000_000, 8_000_000)
ROW_BYTES = 98_304
GOAL_SHARE = 0.8
GOAL_RAM = 1.3
GOAL_RATE = 2000.0
GOAL_EVICT_MS = 10.0
PARKED = 989


@dataclass(frozen=True)
class Case:
    label: str
    pattern: str
    trace: Trace
    budget_bytes: int


@dataclass(frozen=True)
class Outcome:
    case: Case
    results: dict[str, ReplayResult]
    bound_s: float

    def share(self, policy: str) -> float:
        return self.results[policy].saved_s / self.bound_s

    def parked_share(self, policy: str) -> float:
        result = self.results[policy]
        most_s = self.bound_s - result.live_saved_s
        return result.parked_saved_s / most_s if most_s > 0 else 1.0


def cases(trace: Path | None, quick: bool) -> list[Case]:
    found = []
    for name in GENERATORS:
        made = generate(name)
        whole = replay(made.header, made.turns, ReplayConfig(1 << 42, LruPolicy())).peak_bytes
        parts = FLOOD_PARTS if name == "one-shots" else PARTS
        found += [Case(f"{name}, 1/{part}", name, made, whole // part) for part in parts]
    if trace is not None:
        public = read_trace(trace)
        turns = public.turns[len(public.turns) // 2 :]
        half = Trace("public", public.header, turns[:500] if quick else turns)
        for tokens in PUBLIC_TOKENS:
            label = f"public trace, {tokens // 1_000_000} M tokens"
            found.append(Case(label, "public", half, tokens * ROW_BYTES))
    return found


def run(case: Case) -> Outcome:
    turns, header = case.trace.turns, case.trace.header
    results = {}
    for name in POLICIES:
        results[name] = replay(
            header, turns, ReplayConfig(case.budget_bytes, policy_named(name)), clock=time.process_time
        )
    known_s = max(result.saved_s for result in results.values())
    bound_s = clairvoyant_bound_s(header, turns, DEFAULT_COSTS, case.budget_bytes, known_s=known_s)
    return Outcome(case, results, bound_s)


def fan_out_ram() -> tuple[float, float, float]:
    """The bytes held for 16 workers with a prefix of 20k tokens, divided by the bytes of one prefix and their tails,
    and by those of 16 copies; bytes of metadata per conversation."""
    made = generate("fan-out?workers=16&shared=20000&tail=2500&turns=1&waves=1")
    replayer = Replayer(made.header, ReplayConfig(1 << 40, ValuePolicy()))
    for turn in made.turns:
        replayer.turn(turn)
    stats = replayer.store.stats()
    tails = sum(turn.live_tokens - 20_000 for turn in made.turns)
    return (
        stats.bytes_in_use / ((20_000 + tails) * ROW_BYTES),
        stats.bytes_in_use / (sum(turn.live_tokens for turn in made.turns) * ROW_BYTES),
        stats.metadata_bytes / stats.conversations,
    )


def eviction_ms(policy: str) -> float:
    """CPU milliseconds of a capture that evicts ten of 989 parked conversations; the least of five."""
    layout = StateLayout((StageLayout(0, 1, 64, 0, b"0" * 16),), "none")
    now = [0.0]
    slot = 64 * 256
    config = StoreConfig(PARKED * 40 * (slot + 1024) + PARKED * 90_000, 256)
    store = ConversationStore(config, layout, lambda: now[0], policy=policy_named(policy))

    def park(number: int, blocks: int) -> float:
        """Seconds of CPU time until there was room."""
        units = np.full(blocks * 256, number, np.uint64)
        hashes = tuple(number.to_bytes(8, "big") + block.to_bytes(8, "big") for block in range(blocks))
        request = CaptureRequest(b"k" * 16, units, hashes, (), layout.digest)
        began_s = time.process_time()
        capture = store.begin_capture(request)
        took_s = time.process_time() - began_s
        assert isinstance(capture, Capture), capture
        store.commit(capture, Checksums(np.zeros((blocks, 1), np.uint64), np.zeros((0, 1), np.uint64)))
        return took_s

    number = 0
    while store.stats().evictions_total == 0:
        number, now[0] = number + 1, now[0] + 600.0
        park(number, 40)
    best = float("inf")
    for _ in range(5):
        now[0] += 600.0
        number += 1
        before = store.stats().evictions_total
        best = min(best, park(number, 400))
        assert store.stats().evictions_total - before >= 8
    return best * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description="what the eviction policies are worth")
    parser.add_argument("--trace", type=Path, help="a public trace of block hashes")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    started = machine()
    result = Result("policies", "Eviction policies", " ".join(__doc__.split("\n\n")[2].split()))
    outcomes = []
    for case in cases(options.trace, options.quick):
        progress(case.label)
        outcomes.append(run(case))
    rows = []
    for outcome in outcomes:
        shares = [f"{outcome.share(policy):.1%}" for policy in POLICIES]
        lru, value = outcome.results["lru"], outcome.results["value"]
        rows.append(
            (
                outcome.case.label,
                f"{outcome.case.budget_bytes // MIB:,}",
                f"{outcome.bound_s:,.0f}",
                *shares,
                f"{value.saved_s - lru.saved_s:+,.0f}",
                f"{outcome.parked_share('value'):.1%}",
                f"{lru.written_bytes // MIB:,} / {value.written_bytes // MIB:,}",
                f"{lru.evictions:,} / {value.evictions:,}",
            )
        )
    columns = (
        "trace, budget",
        "MiB",
        "bound s",
        *POLICIES,
        "value over LRU s",
        "without live",
        "written MiB",
        "evicted",
    )
    result.tables.append(Table("Seconds saved, as shares of the bound", columns, tuple(rows)))
    add_goals(result, outcomes)
    result.raw = {
        outcome.case.label: {"bound_s": outcome.bound_s} | {name: raw(r) for name, r in outcome.results.items()}
        for outcome in outcomes
    }
    finish(result, started)


def raw(result: ReplayResult) -> dict[str, Any]:
    return vars(result) | {"refusals": dict(result.refusals)}


def add_goals(result: Result, outcomes: list[Outcome]) -> None:
    worst = min(outcomes, key=lambda o: o.results["value"].saved_s / max(1e-9, o.results["lru"].saved_s))
    ratio = worst.results["value"].saved_s / worst.results["lru"].saved_s
    result.goals.append(
        Goal("value against LRU, everywhere", ">= 1", f"{ratio:.3f} ({worst.case.label})", ratio >= 0.9999)
    )
    for outcome in outcomes:
        if outcome.case.pattern in AGENTS:
            share = outcome.share("value")
            claim = f"value against the bound: {outcome.case.label}"
            result.goals.append(Goal(claim, f">= {GOAL_SHARE:.0%}", f"{share:.1%}", share >= GOAL_SHARE))
    ram, copies, metadata = fan_out_ram()
    claim = f"RAM of 16 workers over 20k tokens, against one prefix and tails ({copies:.2f} of 16 copies)"
    result.goals.append(Goal(claim, f"<= {GOAL_RAM}", f"{ram:.3f}", ram <= GOAL_RAM))
    for policy in POLICIES:
        took_ms = eviction_ms(policy)
        claim = f"a capture that evicts ten of {PARKED} ({policy}), processor time"
        result.goals.append(Goal(claim, f"< {GOAL_EVICT_MS:.0f} ms", f"{took_ms:.1f} ms", took_ms < GOAL_EVICT_MS))
    for pattern in dict.fromkeys(outcome.case.pattern for outcome in outcomes):
        runs = [r for o in outcomes if o.case.pattern == pattern for r in o.results.values()]
        rate = sum(r.requests for r in runs) / sum(r.wall_s for r in runs)
        claim = f"turns replayed in a second of processor time: {pattern}"
        result.goals.append(Goal(claim, f">= {GOAL_RATE:,.0f}", f"{rate:,.0f}", rate >= GOAL_RATE))
    result.notes.append(f"Metadata of a parked conversation of some 22,500 tokens: {metadata:,.0f} bytes.")


if __name__ == "__main__":
    main()
