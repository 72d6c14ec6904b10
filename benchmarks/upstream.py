"""What parkd costs in front of an OpenAI-style server, beside a proxy that only forwards bytes.

    python -m benchmarks.upstream [--clients 200] [--tokens 30000] [--rounds 2] [--before CHECKOUT]

A server without a model answers at once, in one piece or in 64. Each client has a long conversation of its own and
sends its next turn: all at the same time. *Processor ms* are those of the proxy's process per request; *first word* is
the client's wait. parkd compares prompts by characters, or, with the demo model's tokenizer, by tokens. All proxies are
up at the same time, and take turns round by round; with `--before`, so is parkd as it is in another checkout.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import psutil
from parkd_engine.loading.gguf_tokenizer import save_tokenizer

from benchmarks import texts
from benchmarks.common import REPOSITORY, Goal, Result, Table, finish, machine, percentile, progress
from benchmarks.proxy_time import body_of, conversation
from benchmarks.servers import Server, bare_proxy, demo_model, free_port, running
from parkd.model_files.gguf_metadata import read_metadata

PIECES = (1, 64)
ANSWER_ID = 300
GOAL_MS = 3.0
PROMPT_MEMORY_MIB = 2000
"""Enough for the tokens of all conversations: the default is for a few."""
HEAD_BYTES = 64 * 1024
BODY_BYTES = 8 * 1024 * 1024
CHAT_PATH = "/v1/chat/completions"
WORD = re.compile(rb'"content":"[^"]')
MODELS = {"data": [{"id": "fake", "owned_by": "vllm", "max_model_len": 131_072}]}


async def serve(port: int) -> None:
    """The server without a model: answers with as many pieces as the request has tokens at most."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                path = head.split(" ", 2)[1]
                fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
                body = await reader.readexactly(int(fields.get("content-length", 0)))
                if path.startswith("/v1/") and body:
                    writer.write(b"".join(_stream(orjson.loads(body))))
                else:
                    found = {"/v1/models": MODELS, "/version": {"version": "0"}, "/health": {"ok": 1}}.get(path)
                    writer.write(_document(200 if found else 404, found or {"detail": "none"}))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", port, limit=BODY_BYTES, backlog=1024)
    async with server:
        await server.serve_forever()


def _document(status: int, value: Any) -> bytes:
    data = orjson.dumps(value)
    head = f"HTTP/1.1 {status} -\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


def _stream(body: dict[str, Any]) -> Iterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    for _ in range(int(body["max_tokens"])):
        if "prompt" in body:
            yield _chunk({"choices": [{"index": 0, "text": " word", "token_ids": [ANSWER_ID]}]})
        else:
            yield _chunk({"choices": [{"index": 0, "delta": {"content": " word"}}]})
    yield _chunk({"choices": [{"index": 0, "delta": {}, "text": "", "finish_reason": "length"}]})
    yield _chunk({"choices": [], "usage": {"prompt_tokens": 30_000, "completion_tokens": int(body["max_tokens"])}})
    yield b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def _chunk(event: dict[str, Any]) -> bytes:
    data = b"data: " + orjson.dumps(event) + b"\n\n"
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


@dataclass
class Load:
    """What one round of requests took."""

    requests: int
    processor_ms: float
    """Of the proxy, for all of them."""
    first_word_ms: list[float] = field(default_factory=list)
    wall_s: float = 0.0


async def send(base_url: str, bodies: Sequence[bytes]) -> list[float]:
    """Sends all at the same time. Returns the milliseconds until each got its first word."""
    host, _, port = base_url.removeprefix("http://").partition(":")

    async def one(body: bytes) -> float:
        reader, writer = await asyncio.open_connection(host, int(port), limit=BODY_BYTES)
        head = f"POST {CHAT_PATH} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\nconnection: close\r\n"
        began_s = time.perf_counter()
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        first_s = 0.0
        async for line in _lines(reader):
            if line.startswith(b"HTTP/") and b" 200 " not in line:
                raise RuntimeError(line.decode())
            if not first_s and WORD.search(line):
                first_s = time.perf_counter()
        writer.close()
        if not first_s:
            raise RuntimeError("an answer without a word")
        return (first_s - began_s) * 1000

    return list(await asyncio.gather(*map(one, bodies)))


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while line := await reader.readline():
        yield line


def loaded(server: Server, bodies: Sequence[bytes]) -> Load:
    process = psutil.Process(server.process.pid)

    def processor_s() -> float:
        times = process.cpu_times()
        return float(times.user + times.system)

    before_s, began_s = processor_s(), time.perf_counter()
    first = asyncio.run(send(server.base_url, bodies))
    wall_s = time.perf_counter() - began_s
    return Load(len(bodies), (processor_s() - before_s) * 1000, first, wall_s)


def parkd_before(url: str, clients: int, *words: str, checkout: Path = REPOSITORY) -> AbstractContextManager[Server]:
    port = free_port()
    command = [sys.executable, "-m", "parkd", "--port", str(port), "--upstream", url, "--ledger", "off"]
    more = ["--upstream-turns", str(clients), "--max-queue", str(4 * clients), "--max-queue-mib", "2000"]
    more += ["--prompt-memory-mib", str(PROMPT_MEMORY_MIB), "--answer-memory-mib", "256"]
    environment = {"PYTHONPATH": f"{checkout}:{checkout / 'engine'}"}
    return running("parkd", [*command, *more, *words], port, environment=environment, checkout=checkout)


@contextmanager
def upstream() -> Iterator[Server]:
    port = free_port()
    with running("fake", [sys.executable, "-m", "benchmarks.upstream", "--serve", str(port)], port) as it:
        yield it


def turns_of(conversations: Sequence[list[dict[str, str]]], pieces: int, turns: int) -> Iterator[list[bytes]]:
    """The bodies of each turn of every conversation."""
    grown = list(conversations)
    for turn in range(turns):
        yield [orjson.dumps({**json.loads(body_of(messages)), "max_tokens": pieces}) for messages in grown]
        grown = [texts.next_turn(messages, " word" * pieces, f"And what then, {turn}?") for messages in grown]


def measured(
    ways: Mapping[str, Callable[[], AbstractContextManager[Server]]],
    conversations: Sequence[list[dict[str, str]]],
    pieces: int,
    rounds: int,
) -> dict[str, list[Load]]:
    """Each way's rounds, which take turns. The first is left out: no prompt was seen before it."""
    with ExitStack() as stack:
        servers = {way: stack.enter_context(opened()) for way, opened in ways.items()}
        loads: dict[str, list[Load]] = {way: [] for way in ways}
        for number, bodies in enumerate(turns_of(conversations, pieces, rounds + 1)):
            for way, server in servers.items():
                progress(f"{way}, {pieces} pieces, round {number} ...")
                loads[way].append(loaded(server, bodies))
    return {way: each[1:] for way, each in loads.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="parkd in front of an OpenAI-style server")
    parser.add_argument("--serve", type=int, help="be the server without a model, at this port")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=30_000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--before", type=Path, help="another checkout, whose parkd is measured too")
    options = parser.parse_args()
    if options.serve is not None:
        asyncio.run(serve(options.serve))
        return
    started = machine()
    result = Result(
        f"upstream_{options.clients}", "In front of an OpenAI-style server", " ".join(__doc__.split("\n\n")[2].split())
    )
    rows = []
    conversations = [conversation(5000 + client, options.tokens) for client in range(options.clients)]
    with upstream() as fake, tempfile.TemporaryDirectory() as folder:
        save_tokenizer(read_metadata(demo_model()), Path(folder))
        ways: dict[str, Callable[[], AbstractContextManager[Server]]] = {
            "bare proxy": lambda: bare_proxy(fake.base_url)
        }
        trees = {"": REPOSITORY} if options.before is None else {" before": options.before.resolve(), "": REPOSITORY}
        for name, tree in trees.items():
            for unit, words in (("characters", ()), ("tokens", ("--tokenizer", folder))):
                ways[f"parkd{name}, {unit}"] = partial(
                    parkd_before, fake.base_url, options.clients, *words, checkout=tree
                )
        for pieces in PIECES:
            for way, loads in measured(ways, conversations, pieces, options.rounds).items():
                per = [load.processor_ms / load.requests for load in loads]
                first = [each for load in loads for each in load.first_word_ms]
                median = statistics.median(per)
                rows.append(
                    (
                        way,
                        str(pieces),
                        f"{median:.2f}",
                        f"{statistics.median(first):.0f}",
                        f"{percentile(first, 0.99):.0f}",
                        f"{statistics.median(load.requests / load.wall_s for load in loads):.0f}",
                    )
                )
                result.raw[f"{way}, {pieces}"] = {"processor_ms": per, "first_word_ms": first}
                if way in ("parkd, characters", "parkd, tokens") and pieces == 1:
                    claim = f"{way}: processor time of a request, {options.tokens:,} tokens, {options.clients} at once"
                    result.goals.append(Goal(claim, f"<= {GOAL_MS:.0f} ms", f"{median:.2f} ms", median <= GOAL_MS))
    columns = ("proxy", "pieces", "processor ms", "first word ms", "99th", "requests a second")
    title = f"{options.clients} next turns at once, {options.tokens:,} tokens each, medians"
    result.tables.append(Table(title, columns, tuple(rows)))
    finish(result, started)


if __name__ == "__main__":
    main()
