"""Runs every benchmark this machine can run, one after the other, and rewrites docs/BENCHMARKS.md and
its pictures: `make bench`."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.common import REPOSITORY, progress

BENCH = (
    "proxy_time",
    "ledger",
    "copies",
    "disk",
    "many_clients",
    "schedule",
    "health_lag",
    "policies",
    "perplexity",
    "indexer",
    "latents",
    "draft",
    "checkpoint_cost",
    "spinning",
    "aba",
)
"""Each runs in a process of its own, so that none inherits another's memory or threads."""


def main() -> int:
    failed = []
    for name in (*BENCH, "tables", "pictures"):
        progress(f"\n== {name}")
        run = subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], cwd=REPOSITORY, check=False)
        if run.returncode != 0:
            failed.append(name)
    if failed:
        progress(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
