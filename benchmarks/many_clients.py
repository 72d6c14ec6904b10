"""Two hundred streaming clients wait for one lane: the delay of the event loop, and whether every event arrives.

    python -m benchmarks.many_clients [--clients 200]

A real server on a real socket runs the tests' deterministic engine, which takes two milliseconds per token, as a device
would, but does not compute. All clients run in another process, send their requests at once and stream; one request
runs, the others wait and get keep-alives. A timer on the server's event loop measures how late it fires. Afterwards,
each request is sent again without streaming and the texts are compared, which would show a lost or reordered event.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import threading
import time
from itertools import count
from typing import Any

import httpx

from benchmarks.common import MIB, Goal, Result, Table, finish, machine, percentile, progress
from parkd.identity.builder import IdentityBuilder
from parkd.proxy.config import ProxyConfig, Services
from parkd.proxy.server import Server
from parkd.state import BLOCK_TOKENS
from parkd.store.records import StoreConfig
from parkd.store.store import ConversationStore
from tests.fakes.engine import FakeEngine

TOKEN_S = 0.002
PROMPT_CHARACTERS = 4_000
OUTPUT_TOKENS = 48
PROBE_S = 0.005
GOAL_MS = 20.0
KEEP_ALIVE_S = 0.5


class Probe:
    """Measures how late a timer on the loop fires, in milliseconds."""

    def __init__(self) -> None:
        self.late_ms: list[float] = []

    async def run(self) -> None:
        while True:
            due = time.perf_counter() + PROBE_S
            await asyncio.sleep(PROBE_S)
            self.late_ms.append((time.perf_counter() - due) * 1000)


class ProbedServer(Server):
    """Starts the probe on its own loop."""

    probe = Probe()

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self._probing = asyncio.create_task(self.probe.run())

    async def shutdown(self, sockets: Any = None) -> None:
        self._probing.cancel()
        await super().shutdown(sockets)


def services(clients: int) -> Services:
    engine = FakeEngine(hook=lambda name, _place: time.sleep(TOKEN_S) if name == "token" else None, end_odds=2**40)
    identity = IdentityBuilder(engine.tokenizer, engine.template, engine.info.fingerprint, BLOCK_TOKENS, 16 * MIB)
    numbers = count()
    store = ConversationStore(
        StoreConfig(256 * MIB, BLOCK_TOKENS, None, slab_bytes=4 * MIB),
        engine.info.layout,
        clock=time.monotonic,
        new_id=lambda: f"c{next(numbers)}",
    )
    config = ProxyConfig(port=0, max_queue=clients + 8, keep_alive_s=KEEP_ALIVE_S, first_byte_deadline_s=0.2)
    return Services(engine, identity.build, store, config)


def body(number: int, *, stream: bool) -> dict[str, Any]:
    text = f"Client {number}. " * (PROMPT_CHARACTERS // 12)
    return {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "stream": stream,
    }


async def listen(client: httpx.AsyncClient, number: int) -> dict[str, Any]:
    """Streams one answer. Returns its pieces in order and the longest silence."""
    text, ended, silence_s, at_s = "", False, 0.0, time.perf_counter()
    async with client.stream("POST", "/v1/chat/completions", json=body(number, stream=True)) as response:
        async for line in response.aiter_lines():
            silence_s, at_s = max(silence_s, time.perf_counter() - at_s), time.perf_counter()
            if line == "data: [DONE]":
                ended = True
            elif line.startswith("data: "):
                choices = json.loads(line.removeprefix("data: "))["choices"]
                text += "".join(choice["delta"].get("content") or "" for choice in choices)
    return {"number": number, "text": text, "ended": ended, "silence_s": silence_s, "status": response.status_code}


def clients_process(url: str, clients: int, results: Any) -> None:
    async def run() -> list[dict[str, Any]]:
        limits = httpx.Limits(max_connections=clients + 8)
        async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits, trust_env=False) as client:
            return list(await asyncio.gather(*(listen(client, number) for number in range(clients))))

    results.put(asyncio.run(run()))


def measure(clients: int) -> tuple[list[dict[str, Any]], list[float], int]:
    """(the clients' answers, the loop's delays in ms meanwhile, the number of texts that differ without streaming)."""
    server = ProbedServer(services(clients))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    server.probe.late_ms.clear()
    process = context.Process(target=clients_process, args=(server.url, clients, results))
    process.start()
    seen = results.get(timeout=900)
    late_ms = list(server.probe.late_ms)
    process.join()
    different = 0
    with httpx.Client(base_url=server.url, timeout=120, trust_env=False) as client:
        for answer in seen:
            plain = client.post("/v1/chat/completions", json=body(answer["number"], stream=False)).json()
            different += plain["choices"][0]["message"]["content"] != answer["text"]
    server.should_exit = True
    thread.join(30)
    return seen, late_ms, different


def main() -> None:
    parser = argparse.ArgumentParser(description="many streaming clients on one lane")
    parser.add_argument("--clients", type=int, default=200)
    options = parser.parse_args()
    started = machine()
    result = Result("many_clients", "Many streaming clients", " ".join(__doc__.split("\n\n")[2].split()))
    progress(f"{options.clients} clients ...")
    began_s = time.perf_counter()
    seen, late_ms, different = measure(options.clients)
    lost = sum(not answer["ended"] or answer["status"] != 200 for answer in seen) + options.clients - len(seen)
    p99 = percentile(late_ms, 0.99)
    rows = (
        ("clients", f"{len(seen)}"),
        ("loop late, median ms", f"{statistics.median(late_ms):.2f}"),
        ("loop late, p99 ms", f"{p99:.2f}"),
        ("loop late, most ms", f"{max(late_ms):.2f}"),
        ("longest silence of a stream, s", f"{max(answer['silence_s'] for answer in seen):.2f}"),
        ("streams that did not end", f"{lost}"),
        ("texts that differ from an answer without a stream", f"{different}"),
        ("seconds, all", f"{time.perf_counter() - began_s:.1f}"),
    )
    result.tables.append(Table(f"{options.clients} clients at once", ("what", "measured"), rows))
    result.goals.append(Goal("the event loop is late, p99", f"<= {GOAL_MS:.0f} ms", f"{p99:.2f} ms", p99 <= GOAL_MS))
    result.goals.append(Goal("events lost or reordered", "0", f"{lost + different}", lost + different == 0))
    result.raw["late_ms"] = [round(value, 3) for value in late_ms]
    finish(result, started)


if __name__ == "__main__":
    main()
