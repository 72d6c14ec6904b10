"""Seconds until a server answers, of them on processors, and its memory, for one source tree or several in turn.

python -m benchmarks.start_up [--model FILE.gguf] [--repeats 5] [--source NAME=FOLDER ...]

Each source serves a GGUF file on llama.cpp in process, and stands before a llama-server: the tests' own, without a
model. A first start, which digests the weights and runs the canary, is not counted. Prints JSON, medians last.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.servers import demo_model
from tests.packaging.installed_kit import ROOT, chat, llama_server, serving, variables

WORDS = [{"role": "user", "content": "Begin."}]
RESIDENT = "VmRSS:"
START_DEADLINE_S = 600.0


def resident_mib(pid: int) -> float:
    """proc(5), `/proc/pid/status`."""
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(RESIDENT)]
    return int(line.split()[1]) / 1024


def processor_s(pid: int) -> float:
    """Seconds on processors, in user and system mode (proc(5), `/proc/pid/stat`, behind the name in brackets)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def start(source: Path, words: Sequence[str], home: Path) -> dict[str, float]:
    env = variables(f"{source}:{source / 'engine'}", home)
    command = [sys.executable, "-m", "parkd", "serve", *words, "--port", "0"]
    began_s = time.perf_counter()
    with serving(command, env, home, deadline_s=START_DEADLINE_S) as server:
        seconds = time.perf_counter() - began_s
        found = {"seconds": seconds, "processor_s": processor_s(server.pid), "mib": resident_mib(server.pid)}
        chat(server.url, WORDS)
        return {**found, "mib_after_a_turn": resident_mib(server.pid)}


def medians_of(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--source", action="append", default=[])
    asked = parser.parse_args()
    sources = dict(each.split("=", 1) for each in asked.source) or {"here": str(ROOT)}
    model = asked.model or demo_model()
    seen: dict[str, dict[str, list[dict[str, float]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        slots = Path(folder) / "slots"
        slots.mkdir(mode=0o700)
        with llama_server(slots) as upstream:
            ways = {
                "llama.cpp": ["--engine", "llama.cpp", "--model", str(model), "--ctx-size", "4096", "--threads", "2"],
                "llama-server": ["--upstream", upstream, "--slot-save-path", str(slots)],
            }
            ways["llama.cpp"] += ["--conversation-cache-mib", "256"]
            ways["llama-server"] += ["--conversation-cache-disk-mib", "8"]
            for number in range(asked.repeats + 1):
                for name, source in sources.items():
                    for way, words in ways.items():
                        home = Path(folder) / f"{name}-{way}"
                        home.mkdir(exist_ok=True)
                        found = start(Path(source), words, home)
                        if number:
                            seen.setdefault(way, {}).setdefault(name, []).append(found)
    medians = {way: {name: medians_of(runs) for name, runs in named.items()} for way, named in seen.items()}
    print(json.dumps({"model": Path(model).name, "runs": seen, "medians": medians}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
