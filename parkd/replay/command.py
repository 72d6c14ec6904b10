"""`parkd replay`: how much time budgets and policies would have saved over a trace."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from parkd.errors import ConfigError
from parkd.replay.bound import clairvoyant_bound_s
from parkd.replay.curve import plot, table
from parkd.replay.driver import replay
from parkd.replay.generators import GENERATORS, generate
from parkd.replay.measured import measured_reading
from parkd.replay.result import ReplayConfig, ReplayResult
from parkd.replay.schedules import schedule_table, tasks_of
from parkd.replay.trace import Trace, TraceError, TraceHeader, TurnRecord, read_trace, write_trace
from parkd.state import Costs
from parkd.store.policy import POLICIES, policy_named

MIB = 1 << 20
GENERATE = "generate:"
DEFAULT_BUDGETS = (1024, 2048, 4096, 8192, 16384)
DEFAULT_READ_MS = 0.38
DEFAULT_GROWTH_NS = 10.0
DEFAULT_RESTORE_GB_PER_S = 8.0
DEFAULT_DISK_GB_PER_S = 1.0


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The size of a model's state and the work to read its prompts, from its configuration."""

    row_bytes: tuple[int, ...]
    """Bytes per token, one for each stage."""
    fixed_bytes: tuple[int, ...]
    read_flop: float
    """Operations to read one token."""
    growth_flop: float
    """Additional operations for each token before it."""


SizesOf = Callable[[Sequence[str]], ModelSizes]
"""Takes flags of `parkd plan`, `--model` first. Raises ConfigError and ModelError."""


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


def _disk_sizes(text: str) -> tuple[int, ...]:
    return tuple(0 if part == "0" else _sizes(part)[0] for part in text.split(","))


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number above 0")
    return number


def make_parser() -> argparse.ArgumentParser:
    names = ", ".join(policy.name for policy in POLICIES)
    parser = _Parser(
        prog="parkd replay",
        description="Drives the store with a trace, without a model: what budgets and policies would have been worth.",
        epilog="With --model, the flags of parkd plan that say how it is loaded are taken too (--devices, "
        f"--layer-split, --kv-cache-dtype). Generators: {', '.join(GENERATORS)}. "
        "Example: parkd replay 'generate:round-robin?agents=8&turns=20'",
        allow_abbrev=False,
    )
    parser.add_argument(
        "trace", help="a trace (--record), a file of block hashes, or generate:NAME?parameter=number&..."
    )
    parser.add_argument(
        "--policy", action="append", choices=[policy.name for policy in POLICIES], help=f"{names} (all)"
    )
    parser.add_argument("--budgets", metavar="MIB,...", type=_sizes, default=DEFAULT_BUDGETS, help="memory budgets")
    parser.add_argument(
        "--disk-budgets",
        metavar="MIB,...",
        type=_disk_sizes,
        default=(0,),
        help="disk budgets, each with each --budgets",
    )
    parser.add_argument("--disk-write-gib-per-day", metavar="GIB", type=_positive, default=200, help="(200)")
    parser.add_argument("--disk-gb-per-s", metavar="GB", type=_positive, help="from disk to memory (1)")
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="take sizes, and what reading costs, from its configuration; no weights are read",
    )
    parser.add_argument("--tflops", metavar="N", type=_positive, default=40, help="of the device while it reads (40)")
    parser.add_argument("--bytes-per-token", metavar="BYTES,...", type=_sizes, help="a stage each (the trace's own)")
    parser.add_argument("--slots", metavar="N", type=int, help="most conversations parked (no bound)")
    parser.add_argument(
        "--read-ms", metavar="MS", type=_positive, help="to read one token (as recorded, 0.38, or --model's)"
    )
    parser.add_argument(
        "--read-growth-ns", metavar="NS", type=_positive, help="more a token of depth (as recorded, 10, or --model's)"
    )
    parser.add_argument("--restore-gb-per-s", metavar="GB", type=_positive, help="from memory (8)")
    parser.add_argument(
        "--schedules", action="store_true", help="also how long turns wait under each schedule, with the first budget"
    )
    parser.add_argument("--decode-ms", metavar="MS", type=_positive, default=20, help="to generate a token (20)")
    parser.add_argument("--limit", metavar="N", type=int, help="only the first turns")
    parser.add_argument("--bound", action="store_true", help="also the most that any policy could have saved")
    parser.add_argument("--plot", metavar="SVG", type=Path, help="draw the curve")
    parser.add_argument("--force", action="store_true", help="replace files that --save and --plot name")
    parser.add_argument("--save", metavar="TRACE", type=Path, help="write the trace, for example a generated one")
    return parser


def run(words: Sequence[str], say: Callable[[str], None] = print, sizes_of: SizesOf | None = None) -> int:
    """Returns the exit code. `sizes_of` is called for `--model`. Raises ConfigError, and the errors of `sizes_of`."""
    given, others = make_parser().parse_known_args(words)
    if others and given.model is None:
        raise ConfigError(f"unknown flag {others[0]} (parkd replay --help)")
    model = None
    if given.model is not None:
        assert sizes_of is not None, "the command line hands it in"
        model = sizes_of(("--model", given.model, *others))
    trace = _trace(given.trace, given.limit)
    trace = replace(trace, header=_header(trace.header, given, model))
    for flag, file in (("--save", given.save), ("--plot", given.plot)):
        if file is not None and file.exists() and not given.force:
            raise ConfigError(f"{flag} {file} exists. Choose another name, or add --force to replace it.")
    if given.save is not None:
        try:
            write_trace(given.save, trace)
        except OSError as error:
            raise ConfigError(f"--save {given.save}: {error.strerror}") from error
    costs, said = _costs(given, model, trace.turns)
    daily = int(given.disk_write_gib_per_day * 1024) * MIB
    budgets = [(ram * MIB, disk * MIB) for ram in given.budgets for disk in given.disk_budgets]
    results: list[ReplayResult] = []
    for ram, disk in budgets:
        for name in given.policy or [policy.name for policy in POLICIES]:
            config = ReplayConfig(ram, policy_named(name), costs, given.slots, disk, daily)
            results.append(replay(trace.header, trace.turns, config))
    # State on disk is restored through memory. The bound assumes memory's speed and counts it once: it saves no less.
    bounds = {
        (ram, disk): clairvoyant_bound_s(trace.header, trace.turns, costs, ram + disk)
        for ram, disk in (budgets if given.bound else ())
    }
    tokens = sum(turn.prompt_tokens for turn in trace.turns)
    say("\n".join((f"{trace.name}: {len(trace.turns):,} turns, {tokens:,} prompt tokens", *said)))
    say(table(results, bounds))
    if given.schedules:
        read_s, decode_s = results[0].turn_read_s, given.decode_ms / 1e3
        say(schedule_table(tasks_of(trace.header, trace.turns, read_s, costs, decode_s)))
    if given.plot is not None:
        plot(given.plot, trace.name, results, bounds)
        say(f"written: {given.plot}")
    return 0


def _header(header: TraceHeader, given: argparse.Namespace, model: ModelSizes | None) -> TraceHeader:
    if given.bytes_per_token:
        fixed = (0,) * len(given.bytes_per_token)
        return replace(header, row_bytes=given.bytes_per_token, fixed_bytes=fixed)
    if model is not None:
        return replace(header, row_bytes=model.row_bytes, fixed_bytes=model.fixed_bytes)
    return header


def _costs(
    given: argparse.Namespace, model: ModelSizes | None, turns: Sequence[TurnRecord]
) -> tuple[Costs, tuple[str, ...]]:
    """The costs, and lines that say of each where it is from."""
    read_s, growth_s = DEFAULT_READ_MS / 1e3, DEFAULT_GROWTH_NS / 1e9
    origin = "assumed (--read-ms, --read-growth-ns)"
    measured = measured_reading(turns)
    if model is not None:
        rate = given.tflops * 1e12
        read_s, growth_s = model.read_flop / rate, model.growth_flop / rate
        origin = f"computed for {given.model} at {given.tflops:g} TFLOP/s"
    elif measured is not None:
        read_s, growth_s = measured.read_s, measured.growth_s
        origin = f"measured: {measured.seconds:,.0f} s in {measured.turns:,} turns of the recording"
    read_origin = growth_origin = origin
    if given.read_ms is not None:
        read_s, read_origin = given.read_ms / 1e3, "as given"
    if given.read_growth_ns is not None:
        growth_s, growth_origin = given.read_growth_ns / 1e9, "as given"
    ram, disk = given.restore_gb_per_s or DEFAULT_RESTORE_GB_PER_S, given.disk_gb_per_s or DEFAULT_DISK_GB_PER_S
    lines = (
        f"reading a token   {read_s * 1e3:.3g} ms, {read_origin}",
        f"a token of depth  {growth_s * 1e9:.3g} ns more, {growth_origin}",
        f"memory            {ram:g} GB/s, {'as given' if given.restore_gb_per_s else 'assumed (--restore-gb-per-s)'}",
        f"disk              {disk:g} GB/s, {'as given' if given.disk_gb_per_s else 'assumed (--disk-gb-per-s)'}",
    )
    return Costs(read_s, growth_s, ram * 1e9, disk * 1e9), lines


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
