"""Breaks every condition of the store on purpose, and asks whether a test notices.

    python -m tests.mutants                                        all modules of MODULES
    python -m tests.mutants --module parkd/store/admission.py      one; --module takes globs, and may be repeated
    python -m tests.mutants --since v1                             only conditions whose lines differ from that commit's
    python -m tests.mutants --list                                 what would be broken, without running anything

One condition at a time is changed, in memory: the working tree is never edited. Only the fast tests that run its line
are run, the quickest first. Results are kept in build/mutants, so that a run that is stopped goes on where it was; a
mutant that was killed is run again only when its module has changed, one that survived also when a test has. Ends with
status 1 if one survived that `equivalent.toml` does not explain.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

from tests.mutants import children
from tests.mutants.mutations import Mutant, mutants_of

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "build" / "mutants"
EQUIVALENT = Path(__file__).with_name("equivalent.toml")
MODULES = ("parkd/store/*.py",)
"""Globs of the modules whose conditions decide what is reused, kept, restored and recovered."""
TESTS = ("tests/unit/store", "tests/fault")
NOT_RUN = ("tests/unit/store/test_store_metadata.py",)
"""It measures memory, which takes seconds and notices no condition."""
HUNK = re.compile(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@")
LEAST_TIMEOUT_S = 30.0
TIMEOUT_FACTOR = 4.0
"""A mutant's tests may take this many times as long as they take without it, with the lines watched."""
WATCH_TIMEOUT_S = 1800.0


@dataclass
class Results:
    """What earlier runs have seen: a line of JSON for each mutant that was run."""

    path: Path
    seen: dict[str, dict[str, str]] = field(default_factory=dict)

    def load(self) -> None:
        if self.path.exists():
            for line in self.path.read_text().splitlines():
                record = json.loads(line)
                self.seen[record["name"]] = record

    def known(self, name: str, tests_digest: str) -> dict[str, str] | None:
        record = self.seen.get(name)
        if record is not None and (record["result"] == "killed" or record["tests"] == tests_digest):
            return record
        return None

    def add(self, name: str, result: str, by: str, tests_digest: str) -> dict[str, str]:
        record = {"name": name, "result": result, "by": by, "tests": tests_digest}
        self.seen[name] = record
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        return record


def digest(paths: Iterable[Path]) -> str:
    sums = hashlib.sha256()
    for path in sorted(paths):
        sums.update(path.read_bytes())
    return sums.hexdigest()[:16]


def modules_of(globs: Sequence[str]) -> list[Path]:
    """Raises SystemExit for a glob that names nothing."""
    found: dict[Path, None] = {}
    for pattern in globs:
        paths = sorted(path for path in ROOT.glob(pattern) if path.suffix == ".py" and path.read_text().strip())
        if not paths:
            raise SystemExit(f"{pattern} names no module: give a path from the root of the repository")
        found.update(dict.fromkeys(paths))
    return list(found)


def changed_lines(since: str) -> dict[str, set[int]]:
    """The lines of each file, by its path from the root, that differ from those of a commit.

    Raises subprocess.CalledProcessError, after git has said why, if there is no such commit.
    """
    command = ["git", "diff", "--unified=0", "--find-renames", "--no-color", since, "--", "*.py"]
    shown = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    found: dict[str, set[int]] = {}
    path = ""
    for line in shown.splitlines():
        if line.startswith("+++ "):
            path = line.removeprefix("+++ b/")
        elif hunk := HUNK.match(line):
            first = int(hunk[1])
            found.setdefault(path, set()).update(range(first, first + int(hunk[2] or 1)))
    return found


def explained() -> dict[str, str]:
    """The reason by the key of each mutant that changes nothing that anyone could see."""
    listed = tomllib.loads(EQUIVALENT.read_text()).get("equivalent", [])
    return {f"{each['function']}: {each['before']} -> {each['after']}": each["why"] for each in listed}


@dataclass(frozen=True)
class Chosen:
    """Which conditions are broken."""

    modules: Sequence[Path]
    changed: dict[str, set[int]] | None = None
    """Only conditions that one of these lines belongs to; None: all."""

    def mutants(self, path: Path, source: str) -> Iterator[tuple[int, Mutant]]:
        """Each with its number among all of the module."""
        module = path.relative_to(ROOT).as_posix()
        for number, mutant in enumerate(mutants_of(module, source)):
            lines = range(mutant.line, mutant.last_line + 1)
            if self.changed is None or not self.changed.get(module, set()).isdisjoint(lines):
                yield number, mutant


class Run:
    """One call of the script."""

    def __init__(self, chosen: Chosen, tests: Sequence[str], seconds: float, within_s: float) -> None:
        KEPT.mkdir(parents=True, exist_ok=True)
        self.chosen = chosen
        self.modules = chosen.modules
        self.until = time.monotonic() + seconds
        self.within_s = within_s
        self.results = Results(KEPT / "results.jsonl")
        self.results.load()
        self.explained = explained()
        kits = (path for folder in TESTS for path in (ROOT / folder).rglob("*.py"))
        self.kits_digest = digest(kits) + "".join(sorted(tests) if tests != TESTS else [])
        self.tests_digest = self.kits_digest + (f" within {within_s} s" if math.isfinite(within_s) else "")
        self.counts: dict[str, Counter[str]] = {}
        self.lines: dict[str, list[list[object]]] = {}
        self.seconds: dict[str, float] = {}

    def work(self, trials: children.Trials) -> None:
        self.trials = trials
        self.watch()
        for path in self.modules:
            self.module(path)

    def watch(self) -> None:
        """Which lines each test runs: from an earlier run if neither a test nor a module has changed since."""
        watched = sorted(ROOT.glob("parkd/store/**/*.py")) + [path for path in self.modules if path.exists()]
        name = hashlib.sha256(f"{digest(dict.fromkeys(watched))} {self.kits_digest}".encode()).hexdigest()[:16]
        kept = KEPT / f"lines-{name}.json"
        if not kept.exists():
            print("watching which test runs which line", flush=True)
            kept.write_text(json.dumps(self.trials.watch(list(dict.fromkeys(watched)), WATCH_TIMEOUT_S)))
        self.lines, self.seconds = json.loads(kept.read_text())
        self.runners: dict[tuple[str, int], list[str]] = {}
        for test, lines in self.lines.items():
            for name, line in lines:
                self.runners.setdefault((str(name), int(str(line))), []).append(test)

    def tests_for(self, path: Path, mutant: Mutant) -> list[str]:
        lines = range(mutant.line, mutant.last_line + 1)
        found = {test for line in lines for test in self.runners.get((str(path), line), ())}
        quickest = sorted(found, key=self.seconds.__getitem__)
        sums = accumulate(map(self.seconds.__getitem__, quickest))
        return [test for test, seconds in zip(quickest, sums, strict=True) if seconds <= self.within_s]

    def module(self, path: Path) -> None:
        source, module = path.read_text(), path.relative_to(ROOT).as_posix()
        counts = self.counts[module] = Counter()
        for number, mutant in self.chosen.mutants(path, source):
            full = f"{digest([path])} {number} {mutant.key}"
            record = self.results.known(full, self.tests_digest)
            if record is None:
                if time.monotonic() > self.until:
                    counts["not run"] += 1
                    continue
                result, by = self._tried(path, source, mutant)
                record = self.results.add(full, result, by, self.tests_digest)
            result = record["result"]
            why = self.explained.get(mutant.key.split("::", 1)[1])
            if result == "survived" and why is not None:
                result = "equivalent"
            counts[result] += 1
            if result != "killed":
                print(f"{result:10} {module}:{mutant.line} {mutant.function}", flush=True)
                print(f"           {mutant.before}\n        -> {mutant.after}   {why or record['by']}", flush=True)

    def _tried(self, path: Path, source: str, mutant: Mutant) -> tuple[str, str]:
        tests = self.tests_for(path, mutant)
        if not tests:
            return "survived", "no test runs this line" if math.isinf(self.within_s) else "no such quick test"
        timeout_s = LEAST_TIMEOUT_S + TIMEOUT_FACTOR * sum(map(self.seconds.__getitem__, tests))
        is_killed, by = self.trials.outcome(mutant, source, path, tests, timeout_s)
        return ("killed", by) if is_killed else ("survived", f"{len(tests)} tests pass")

    def report(self) -> int:
        totals: Counter[str] = Counter()
        print(f"\n{'':40}{'tried':>8}{'killed':>8}{'equivalent':>12}{'survived':>10}{'not run':>9}")
        for module, counts in self.counts.items():
            totals += counts
            if counts:
                print(_row(module, counts))
        print(_row("all", totals))
        return 1 if totals["survived"] or totals["not run"] else 0


def _row(name: str, counts: Counter[str]) -> str:
    tried = counts["killed"] + counts["equivalent"] + counts["survived"]
    return (
        f"{name:40}{tried:8}{counts['killed']:8}{counts['equivalent']:12}{counts['survived']:10}{counts['not run']:9}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--module", action="append", help="a path or a glob from the root of the repository")
    parser.add_argument("--tests", nargs="*", help="other tests than those of TESTS")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no mutant after this long")
    parser.add_argument(
        "--within", type=float, default=math.inf, help="of the tests of a mutant, only the quickest, of so many seconds"
    )
    parser.add_argument("--since", metavar="COMMIT", help="only conditions whose lines differ from that commit's")
    parser.add_argument("--list", action="store_true", help="print the mutants and end")
    given = parser.parse_args()
    changed = None if given.since is None else changed_lines(given.since)
    chosen = Chosen(modules_of(given.module or MODULES), changed)
    if given.list:
        for path in chosen.modules:
            for _, mutant in chosen.mutants(path, path.read_text()):
                print(f"{mutant.module}:{mutant.line} {mutant.before} -> {mutant.after}")
        return 0
    tests = tuple(given.tests or TESTS)
    run = Run(chosen, tests, given.seconds, given.within)
    children.with_tests([*tests, *(f"--ignore={path}" for path in NOT_RUN)], run.work)
    return run.report()


if __name__ == "__main__":
    sys.exit(main())
