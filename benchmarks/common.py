"""Code that all benchmarks share: the description of the machine, tables, goals, and the result file.

A result names the processor, the cores and the memory, but no host or path, because it is published with the source.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "xxhash", "uvicorn", "xllamacpp")
MIB = 1024 * 1024


@dataclass(frozen=True)
class Table:
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        """The table as Markdown, with columns padded to one width so that it is readable in a terminal too."""
        lines = (self.columns, *self.rows)
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.columns))]
        padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
        rule = ["-" * width for width in widths]
        return "\n".join("| " + " | ".join(line) + " |" for line in (padded[0], rule, *padded[1:]))


@dataclass(frozen=True)
class Goal:
    """A goal and its measured figure."""

    claim: str
    bound: str
    measured: str
    met: bool


@dataclass
class Result:
    """The result of one benchmark. The result file has exactly these fields."""

    name: str
    title: str
    how: str
    """A description of the method for readers who have not seen the script."""
    tables: list[Table] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    raw: dict[str, Any] = field(default_factory=dict)
    """All single measurements behind the tables."""


def machine() -> dict[str, Any]:
    """A description of the machine. The load average shows whether it was in use by others."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": platform.system(),
        "python": platform.python_version(),
        "versions": versions,
        "load_average_1m": round(os.getloadavg()[0], 2),
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def commit() -> str:
    """The commit that was measured, with `+` if files differed from it."""
    git = shutil.which("git")
    if git is None:
        return "unknown"

    def output(*arguments: str) -> str:
        run = subprocess.run([git, *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False)
        return run.stdout.strip()

    changed = output("status", "--porcelain", "--untracked-files=no", "--", "parkd", "engine", "benchmarks/*.py")
    return output("rev-parse", "--short", "HEAD") + ("+" if changed else "")


def finish(result: Result, started: dict[str, Any]) -> None:
    """Prints tables and goals and writes the result file. `started` is `machine()` from before the measurement."""
    for table in result.tables:
        print(f"\n{table.title}\n{table.markdown()}")
    for goal in result.goals:
        print(f"{'met' if goal.met else 'MISSED'}: {goal.claim}: {goal.measured} (goal {goal.bound})")
    document = {
        "command": "python -m " + _module_command(),
        "measured_on": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit(),
        "machine": started,
        **asdict(result),
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{result.name}.json"
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    print(f"\nwritten: {path.parent.name}/{path.name}")


def _module_command() -> str:
    return " ".join([f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]])


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest-rank percentile, which is always a measured value."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
