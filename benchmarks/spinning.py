"""How long threads that wait should spin: the speed on an idle machine, and beside processes that compute.

    python -m benchmarks.spinning [--counts 1000,10000,100000,300000] [--rounds 3] [--busy 2]

One server for each count of `GOMP_SPINCOUNT` and one without any, all alive at once. A prompt of about 700 tokens is
read and 26 tokens are decoded by each in turn, with a new text each time, first on the idle machine, then beside
processes that only compute. Turns of a loop last differently long on different processors, so a count has to be tried
on each kind before it is believed.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import statistics
from collections.abc import Iterator

from benchmarks import servers, texts
from benchmarks.chat import ask
from benchmarks.common import Result, Table, finish, machine, progress

CHARACTERS = 2_600
OUTPUT_TOKENS = 26
CONTEXT_TOKENS = 2048
CACHE_MIB = 64
LIBRARY_DEFAULT = 300_000
"""What GNU's library takes where there are no more threads than cores and nothing was chosen."""


def compute() -> None:
    while True:
        sum(range(1_000_000))


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    started = [multiprocessing.Process(target=compute, daemon=True) for _ in range(processes)]
    for process in started:
        process.start()
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.join()


def measure(server: servers.Server, seed: int) -> tuple[float, float]:
    """(seconds to the first token, seconds for the rest)."""
    messages = texts.opening("Grace", seed, CHARACTERS, "Summarise the document in at least ten sentences.")
    answer = ask(server.base_url, messages, output_tokens=OUTPUT_TOKENS)
    return answer.first_token_s, answer.total_s - answer.first_token_s


def main() -> None:
    parser = argparse.ArgumentParser(description="speed by the turns that waiting threads spin")
    parser.add_argument("--counts", default="1000,10000,100000,300000", help="turns, separated by commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--busy", type=int, default=2, help="processes that compute beside")
    options = parser.parse_args()
    counts = [int(count) for count in options.counts.split(",")]
    started = machine()
    result = Result("spinning", "Threads that wait", __doc__.split("\n\n")[2].replace("\n", " "))
    seconds: dict[str, dict[int, list[tuple[float, float]]]] = {
        where: {count: [] for count in counts} for where in ("idle", "busy")
    }
    with contextlib.ExitStack() as running:
        started_servers = {}
        for count in counts:
            chosen = {"GOMP_SPINCOUNT": str(count)}
            server = servers.parkd_server(
                cache_mib=CACHE_MIB, context_tokens=CONTEXT_TOKENS, devices="cpu", environment=chosen
            )
            started_servers[count] = running.enter_context(server)
            measure(started_servers[count], 1)  # what only the first request costs
        for where, processes in (("idle", 0), ("busy", options.busy)):
            with busy(processes):
                for turn in range(options.rounds):
                    for count in counts if turn % 2 == 0 else counts[::-1]:
                        figures = measure(started_servers[count], 10_000 + 100 * turn + len(seconds[where][count]))
                        seconds[where][count].append(figures)
                        progress(f"{where} {count}: {figures[0]:.2f} / {figures[1]:.2f} s")
    rows = []
    for count in counts:
        cells = []
        for where in ("idle", "busy"):
            measured = seconds[where][count]
            cells += [f"{statistics.median(figures[part] for figures in measured):.2f}" for part in (0, 1)]
        rows.append((f"{count:,}", *cells))
    columns = ("turns", "idle: prompt s", "idle: answer s", "busy: prompt s", "busy: answer s")
    title = f"medians of {options.rounds}; {options.busy} processes compute beside"
    result.tables.append(Table(title, columns, tuple(rows)))
    result.raw["seconds"] = seconds
    finish(result, started)


if __name__ == "__main__":
    main()
