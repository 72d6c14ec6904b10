"""Results over budgets: a table for a terminal, and a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from parkd.errors import ConfigError
from parkd.replay.picture import Line, Panel, Picture, svg
from parkd.replay.result import ReplayResult

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


DISK_COLUMNS = ("disk MiB", "from disk", "to disk MiB")
"""Added after the other columns if any result has a disk budget."""
Budget = tuple[int, int]
"""(bytes of memory, bytes of disk)."""


def table(results: Sequence[ReplayResult], bounds: Mapping[Budget, float]) -> str:
    """The table as text. `bounds`: budget -> the most seconds that could be saved."""
    has_disk = any(result.disk_bytes for result in results)
    columns = (*COLUMNS, *DISK_COLUMNS) if has_disk else COLUMNS
    rows: list[tuple[str, ...]] = [columns]
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
                f"{result.disk_bytes // MIB:,}",
                f"{result.disk_hit_tokens:,}",
                f"{result.disk_written_bytes // MIB:,}",
            )[: len(columns)]
        )
    for (budget, disk), most_s in bounds.items():
        cold_s = results[0].cold_s
        saved = (f"{most_s:,.1f}", _share(most_s, cold_s))
        rows.append(
            (f"{budget // MIB:,}", "bound", "-", "-", *saved, *"----", f"{disk // MIB:,}", "-", "-")[: len(columns)]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def plot(path: Path, title: str, results: Sequence[ReplayResult], bounds: Mapping[Budget, float]) -> None:
    """Draws the share of all prompt seconds that was saved over the memory budget as SVG, one line per policy. If the
    disk budget varies, over the disk budget, one line per policy and memory budget. Raises ConfigError."""
    try:
        path.write_text(svg(curve(title, results, bounds)))
    except OSError as error:
        raise ConfigError(f"--plot {path}: {error.strerror}") from error


def curve(title: str, results: Sequence[ReplayResult], bounds: Mapping[Budget, float]) -> Picture:
    """The picture of `plot`."""
    over_disk = len({result.disk_bytes for result in results}) > 1
    cold_s = results[0].cold_s
    points: dict[tuple[str, int], list[tuple[float, float]]] = {}

    def add(name: str, ram: int, disk: int, saved_s: float) -> None:
        x, line = (disk, ram) if over_disk else (ram, disk)
        points.setdefault((name, line), []).append((x / MIB, 100 * saved_s / cold_s if cold_s else 0.0))

    for result in results:
        add(result.policy, result.budget_bytes, result.disk_bytes, result.saved_s)
    for (ram, disk), most_s in bounds.items():
        add("bound", ram, disk, most_s)
    several = len({line for _, line in points}) > 1
    other = "memory" if over_disk else "disk"
    lines = tuple(
        Line(f"{policy}, {line // MIB:,} MiB of {other}" if several else policy, tuple(sorted(at)))
        for (policy, line), at in points.items()
    )
    smallest = min(x for line in lines for x, _ in line.points)
    return Picture(
        title=title,
        x_label=f"{'disk' if over_disk else 'memory'} budget, MiB",
        y_label="seconds saved, % of all reading",
        panels=(Panel("", lines),),
        is_log_x=smallest > 0,
        y_top=100.0,
    )


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"
