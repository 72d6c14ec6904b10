"""The latency of `/health` while the engine reads a long prompt, and while it writes the answer.

    python -m benchmarks.health_lag [--characters 28000] [--threads N]

The event loop and the engine share a process. If the engine ever blocked the loop, a probe would wait for the end of a
chunk (seconds). Another process sends the probes on one keep-alive connection, one every 20 ms.
"""

from __future__ import annotations

import argparse
import gc
import threading
import time

import httpx

from benchmarks import servers, texts
from benchmarks.chat import Answer, ask
from benchmarks.common import Goal, Result, Table, finish, machine, percentile, progress

PROBE_EVERY_S = 0.020
BOUND_MS = 50.0
IDLE_S = 5.0
CHARACTERS = 28_000
"""About 7,000 tokens of the demo model."""
OUTPUT_TOKENS = 48
PHASES = ("idle", "prefill", "decode")


class Probe(threading.Thread):
    """Measures `/health` until it is stopped. Each sample belongs to the current `phase`."""

    def __init__(self, base_url: str) -> None:
        super().__init__(daemon=True)
        self.base_url = base_url
        self.phase = "idle"
        self.ended = threading.Event()
        self.milliseconds: dict[str, list[float]] = {phase: [] for phase in PHASES}

    def run(self) -> None:
        with httpx.Client(timeout=120) as client:
            client.get(f"{self.base_url}/health")
            while not self.ended.wait(PROBE_EVERY_S):
                phase = self.phase
                started = time.perf_counter()
                client.get(f"{self.base_url}/health").raise_for_status()
                self.milliseconds[phase].append((time.perf_counter() - started) * 1000)


def measure(server: servers.Server, characters: int) -> tuple[Probe, Answer]:
    probe = Probe(server.base_url)

    def decoding() -> None:
        probe.phase = "decode"

    gc.collect()
    gc.freeze()  # a garbage collection in this process would count as the server's delay
    probe.start()
    time.sleep(IDLE_S)
    progress("reading a long prompt ...")
    probe.phase = "prefill"
    messages = texts.opening("Hedy", 3000, characters, "Summarise the document in at least ten sentences.")
    answer = ask(server.base_url, messages, output_tokens=OUTPUT_TOKENS, on_first_token=decoding)
    probe.ended.set()
    probe.join()
    return probe, answer


def main() -> None:
    parser = argparse.ArgumentParser(description="/health while a prompt is read")
    parser.add_argument("--characters", type=int, default=CHARACTERS)
    parser.add_argument("--threads", type=int, help="the engine computes with; default: all cores")
    options = parser.parse_args()
    started = machine()
    result = Result("health_lag", "/health while the engine works", __doc__.split("\n\n")[2].replace("\n", " "))
    with servers.parkd_server(cache_mib=1024, context_tokens=8192, threads=options.threads) as server:
        probe, answer = measure(server, options.characters)
    rows = []
    for phase in PHASES:
        samples = probe.milliseconds[phase]
        figures = (percentile(samples, 0.5), percentile(samples, 0.99), max(samples))
        rows.append((phase, str(len(samples)), *(f"{figure:.1f}" for figure in figures)))
    columns = ("while", "probes", "p50 ms", "p99 ms", "max ms")
    title = f"{answer.prompt_tokens:,} prompt tokens, {answer.first_token_s:.1f} s to the first token"
    result.tables.append(Table(title, columns, tuple(rows)))
    slowest = max(probe.milliseconds["prefill"])
    result.goals.append(
        Goal(
            "slowest /health answer during a prefill", f"<= {BOUND_MS:.0f} ms", f"{slowest:.1f} ms", slowest <= BOUND_MS
        )
    )
    result.raw["milliseconds"] = {phase: [round(sample, 2) for sample in probe.milliseconds[phase]] for phase in PHASES}
    result.raw["prompt_tokens"] = answer.prompt_tokens
    finish(result, started)


if __name__ == "__main__":
    main()
