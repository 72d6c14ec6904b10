"""Results over budgets: a table for a terminal, and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from parkd.errors import ConfigError
from parkd.replay.driver import ReplayResult

MIB = 1 << 20
COLUMNS = (
    "MiB",
    "policy",
    "hit tokens",
    "of all",
    "saved s",
    "of all",
    "evictions",
    "written MiB",
    "refusals",
    "turns/s",
)


def table(results: Sequence[ReplayResult], bounds: Mapping[int, float]) -> str:
    """`bounds`: budget in bytes -> the most seconds that could be saved."""
    rows = [COLUMNS]
    for result in results:
        refused = " ".join(f"{reason} {count}" for reason, count in sorted(result.refusals.items()))
        if result.partial:
            refused = f"{refused} in-part {result.partial}".strip()
        rows.append(
            (
                f"{result.budget_bytes // MIB:,}",
                result.policy,
                f"{result.hit_tokens:,}",
                _share(result.hit_tokens, result.prompt_tokens),
                f"{result.saved_s:,.1f}",
                _share(result.saved_s, result.cold_s),
                f"{result.evictions:,}",
                f"{result.written_bytes // MIB:,}",
                refused or "-",
                f"{result.requests / max(result.wall_s, 1e-9):,.0f}",
            )
        )
    for budget, most_s in bounds.items():
        cold_s = results[0].cold_s
        saved = (f"{most_s:,.1f}", _share(most_s, cold_s))
        rows.append((f"{budget // MIB:,}", "bound", "-", "-", *saved, "-", "-", "-", "-"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def plot(path: Path, title: str, results: Sequence[ReplayResult], bounds: Mapping[int, float]) -> None:
    """Seconds saved over the budget, a line a policy. Raises ConfigError if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot needs matplotlib; install it with: pip install 'parkd[plot]'") from None
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for policy in dict.fromkeys(result.policy for result in results):
        points = sorted((r.budget_bytes / MIB, r.saved_s) for r in results if r.policy == policy)
        axes.plot([budget for budget, _ in points], [saved for _, saved in points], marker="o", label=policy)
    if bounds:
        budgets = sorted(bounds)
        axes.plot([budget / MIB for budget in budgets], [bounds[b] for b in budgets], "k--", label="bound")
    axes.set(title=title, xlabel="budget, MiB", ylabel="seconds saved", xscale="log", ylim=(0, None))
    axes.legend()
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise ConfigError(f"--plot {path}: {error.strerror}") from error


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"
