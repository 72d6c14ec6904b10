"""What the ledger costs each turn.

    python -m benchmarks.ledger [--turns 300]

*On the loop* is what a turn waits for: digests of its system message and tools, and the note that it queues.
*On the thread* is what the ledger's own thread does with it later: finding the cause, among 64 earlier requests of the
key, and writing the row. A *next turn* goes on where the last one ended. A *changed clock* differs in the first line of
the system prompt, so that every part is compared. Prompts are chats whose tokens are letters.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.common import Goal, Result, Table, finish, machine, progress
from parkd.identity.builder import IdentityBuilder
from parkd.lane.reports.explain import EXPLAINED_BYTES, Explained, PromptParts, RequestMemory
from parkd.lane.reports.ledger_rows import LedgerWriter
from parkd.lane.turn import Turn
from parkd.ledger.ledger import Ledger
from parkd.ledger.turns import LedgerTurn
from parkd.types import CacheOutcome, CacheReport, Divergence, Timings, TurnRequest
from tests.fakes.text import FakeTemplate, FakeTokenizer

GOAL_MS = 0.2
SIZES = {"8k": 8_000, "40k": 40_000}
EARLIER = 64
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"tool_{number}",
            "description": "Does one thing, and says what came of it. " * 8,
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}, "line": {"type": "integer"}}},
        },
    }
    for number in range(20)
]
MESSAGE = "Look into the file that was changed last, and say which of its lines are not tested. "


class TimedLedger(Ledger):
    """Notes the seconds that each row takes to make."""

    def __init__(self, path: Path) -> None:
        self.made_s: list[float] = []
        super().__init__(path)

    def note(self, make: Callable[[], LedgerTurn]) -> None:
        def timed() -> LedgerTurn:
            began_s = time.perf_counter()
            row = make()
            self.made_s.append(time.perf_counter() - began_s)
            return row

        super().note(timed)


def talk(tokens: int, clock: str) -> TurnRequest:
    messages: list[dict[str, str]] = [{"role": "system", "content": f"It is {clock} now. " + MESSAGE * 20}]
    length = len(messages[0]["content"])
    while length < tokens:
        role = "user" if len(messages) % 2 else "assistant"
        messages.append({"role": role, "content": f"{len(messages)}. " + MESSAGE * 8})
        length += len(messages[-1]["content"])
    return TurnRequest(messages=messages, tools=TOOLS)


def measured(tokens: int, turns: int, *, is_changed: bool) -> tuple[float, float, float]:
    """Milliseconds of a turn on the loop, of making a row on the thread, and of all on the thread: medians."""
    tokenizer = FakeTokenizer()
    builder = IdentityBuilder(tokenizer, FakeTemplate(), b"f" * 16, 256, 1 << 26)
    memory, loop_ms = RequestMemory(limit_bytes=64 * EXPLAINED_BYTES), []
    requests = [talk(tokens, f"10:{number % 60:02d}:{number % 7:02d}") for number in range(8)]
    prompts = [builder.build(request) for request in requests]
    with tempfile.TemporaryDirectory() as folder:
        ledger = TimedLedger(Path(folder) / "ledger.sqlite3")
        writer = LedgerWriter(ledger, tokenizer.decode, shows_text=False)
        began_s = 0.0
        for number in range(turns + EARLIER):
            at = number % len(prompts) if is_changed else 0
            request, prompt = requests[at], prompts[at]
            is_counted = number >= EARLIER
            if number == EARLIER:
                ledger.turns(0, 1).result(120)
                ledger.made_s.clear()
                began_s = time.perf_counter()
            turn_began_s = time.perf_counter()
            parts = PromptParts.of(request)
            loop_s = time.perf_counter() - turn_began_s
            explained = Explained(f"r{number}", "anna", prompt, parts, float(number))
            memory.add(explained)
            turn = Turn(f"r{number}", "anna", request, prompt, 0.0, 0.0)
            turn.explained, turn.own_earlier = explained, partial(memory.own_before, explained)
            reused = 30 if is_changed else len(prompt) - 400
            outcome = CacheOutcome.COLD if is_changed else CacheOutcome.LIVE
            differs = Divergence(reused, "system", "", "") if is_changed else None
            turn.report = CacheReport(outcome, len(prompt), reused, divergence=differs)
            turn.timings = Timings(prefill_s=1.0, prefill_tokens=len(prompt) - reused)
            note_began_s = time.perf_counter()
            writer.note(turn, "c1")
            if is_counted:
                loop_ms.append(1e3 * (loop_s + time.perf_counter() - note_began_s))
            if number % 32 == 0:
                ledger.turns(0, 1).result(120)  # never behind, so that no turn is left out
        ledger.turns(0, 1).result(120)
        all_ms = 1e3 * (time.perf_counter() - began_s) / turns
        assert ledger.stats().dropped_total == 0
        made_ms = 1e3 * statistics.median(ledger.made_s)
        ledger.close()
    return statistics.median(loop_ms), made_ms, all_ms


def main() -> None:
    parser = argparse.ArgumentParser(description="what the ledger costs each turn")
    parser.add_argument("--turns", type=int, default=300)
    turns = parser.parse_args().turns
    started = machine()
    result = Result("ledger", "The ledger", " ".join((__doc__ or "").split("\n\n")[2].split()))
    rows = []
    for size, tokens in SIZES.items():
        for name, is_changed in (("next turn", False), ("changed clock", True)):
            progress(f"{size}, {name} ...")
            loop_ms, made_ms, all_ms = measured(tokens, turns, is_changed=is_changed)
            rows.append((size, name, f"{loop_ms:.3f}", f"{made_ms:.2f}", f"{all_ms:.2f}"))
            claim = f"on the loop, {size} tokens, {name}"
            result.goals.append(Goal(claim, f"< {GOAL_MS} ms", f"{loop_ms:.3f} ms", loop_ms < GOAL_MS))
    columns = ("prompt", "turn", "on the loop, ms", "row made on the thread, ms", "all of a turn, ms")
    result.tables.append(Table(f"Medians of {turns} turns", columns, tuple(rows)))
    finish(result, started)


if __name__ == "__main__":
    main()
