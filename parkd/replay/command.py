"""`parkd replay`: what budgets and policies would have been worth over a trace."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from parkd.errors import ConfigError
from parkd.replay.bound import clairvoyant_bound_s
from parkd.replay.curve import plot, table
from parkd.replay.driver import ReplayConfig, ReplayResult, replay
from parkd.replay.generators import GENERATORS, generate
from parkd.replay.trace import Trace, TraceError, read_trace, write_trace
from parkd.store.policy import POLICIES, Costs, policy_named

MIB = 1 << 20
GENERATE = "generate:"
DEFAULT_BUDGETS = (1024, 2048, 4096, 8192, 16384)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (parkd replay --help)")


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected whole numbers from 1 up, with commas between")
    return sizes


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number above 0")
    return number


def _parser() -> argparse.ArgumentParser:
    names = ", ".join(policy.name for policy in POLICIES)
    parser = _Parser(
        prog="parkd replay",
        description="Drives the store with a trace, without a model: what budgets and policies would have been worth.",
        epilog=f"Generators: {', '.join(GENERATORS)}. Example: parkd replay 'generate:round-robin?agents=8&turns=20'",
        allow_abbrev=False,
    )
    parser.add_argument(
        "trace", help="a trace (--record), a file of block hashes, or generate:NAME?parameter=number&..."
    )
    parser.add_argument(
        "--policy", action="append", choices=[policy.name for policy in POLICIES], help=f"{names} (all)"
    )
    parser.add_argument("--budgets", metavar="MIB,...", type=_sizes, default=DEFAULT_BUDGETS, help="memory budgets")
    parser.add_argument("--bytes-per-token", metavar="BYTES,...", type=_sizes, help="a stage each (the trace's own)")
    parser.add_argument("--slots", metavar="N", type=int, help="most conversations parked (no bound)")
    parser.add_argument("--read-ms", metavar="MS", type=_positive, default=0.38, help="to read one token (0.38)")
    parser.add_argument("--read-growth-ns", metavar="NS", type=_positive, default=10, help="more a token of depth (10)")
    parser.add_argument("--restore-gb-per-s", metavar="GB", type=_positive, default=8, help="from memory (8)")
    parser.add_argument("--limit", metavar="N", type=int, help="only the first turns")
    parser.add_argument("--bound", action="store_true", help="also the most that any policy could have saved")
    parser.add_argument("--plot", metavar="PNG", type=Path, help="draw the curve; needs parkd[plot]")
    parser.add_argument("--save", metavar="TRACE", type=Path, help="write the trace, for example a generated one")
    return parser


def run(words: Sequence[str], say: Callable[[str], None] = print) -> int:
    """Returns the exit code. Raises ConfigError."""
    given = _parser().parse_args(words)
    trace = _trace(given.trace, given.limit)
    if given.bytes_per_token:
        fixed = (0,) * len(given.bytes_per_token)
        header = replace(trace.header, row_bytes=given.bytes_per_token, fixed_bytes=fixed)
        trace = replace(trace, header=header)
    if given.save is not None:
        try:
            write_trace(given.save, trace)
        except OSError as error:
            raise ConfigError(f"--save {given.save}: {error.strerror}") from error
    costs = Costs(given.read_ms / 1e3, given.read_growth_ns / 1e9, given.restore_gb_per_s * 1e9)
    results: list[ReplayResult] = []
    for budget in given.budgets:
        for name in given.policy or [policy.name for policy in POLICIES]:
            config = ReplayConfig(budget * MIB, policy_named(name), costs, given.slots)
            results.append(replay(trace.header, trace.turns, config))
    bounds = {
        budget * MIB: clairvoyant_bound_s(trace.header, trace.turns, costs, budget * MIB)
        for budget in (given.budgets if given.bound else ())
    }
    say(f"{trace.name}: {len(trace.turns):,} turns, {sum(turn.prompt_tokens for turn in trace.turns):,} prompt tokens")
    say(table(results, bounds))
    if given.plot is not None:
        plot(given.plot, trace.name, results, bounds)
        say(f"written: {given.plot}")
    return 0


def _trace(text: str, limit: int | None) -> Trace:
    """Raises ConfigError."""
    try:
        if text.startswith(GENERATE):
            made = generate(text.removeprefix(GENERATE))
            return replace(made, turns=made.turns[:limit])
        return read_trace(Path(text).expanduser(), limit)
    except TraceError as error:
        raise ConfigError(f"{text}: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{text} cannot be read: {error}") from error
