"""`parkd demo`: sends turns of conversations A, A, B, A over HTTP, and the last one to a second server, without state.

server 1   A1 ---- A + turn ---- B1 ---- A2      A2's conversation is restored
server 2   A2                                    the same request, read cold
"""

from __future__ import annotations

import importlib.metadata
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from parkd.config import Config, load
from parkd.config.keys import read_key_file
from parkd.demo.server import ServerFailed, running_server
from parkd.errors import ParkdError

Messages = list[dict[str, str]]

SYSTEM = "You answer questions about a document. Answer in one or two short sentences."
LONG_CHARACTERS = 11_000
"""About 3,000 tokens of the demo model."""
SHORT_CHARACTERS = 4_000
ANSWER_TOKENS = 24
LEAST_REUSED = 0.99
"""Share of A1's prompt that must be reused when A returns."""
EXIT_TERMINATED = 143
SILENCE_LIMIT_S = 120
"""The server sends keep-alives to a waiting client, so a longer silence is a failure."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer, as the client saw it."""

    name: str
    prompt_tokens: int
    reused_tokens: int
    first_token_s: float
    cache: str
    text: str
    output_tokens: int


def run(flags: Mapping[str, str]) -> int:
    """Runs the demo; `flags` are passed to both servers. Returns the exit code: 0, or 1 if a result is not as
    expected."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))  # unwinds the stack, which stops the servers
    config = load(flags)
    given = dict(flags) | {"port": "0"}
    if not config.model.layout.devices:
        given["devices"] = "cpu,cpu"
    try:
        turns, cold = _converse(config, given)
    except (ParkdError, httpx.HTTPError, OSError) as error:
        reason = error.message if isinstance(error, ParkdError) else f"{type(error).__name__}: {error}"
        print(f"\nparkd demo failed: {reason}", file=sys.stderr)
        return 1
    print("\n" + table([*turns, cold]))
    problems = verdict(turns, cold)
    for problem in problems:
        print(f"parkd demo failed: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _converse(config: Config, flags: Mapping[str, str]) -> tuple[list[Turn], Turn]:
    """Runs both servers. Returns the turns A1, A + turn, B1 and A2, and A2 read cold."""
    long, short = documents()
    a: Messages = _open(long, "What is this document about?")
    b: Messages = _open(short, "What does this text allow?")
    turns: list[Turn] = []
    with running_server(flags, lambda line: _say(f"  | {line}")) as url, _client(config, url) as client:
        turns.append(ask(client, "A1", a))
        a += _turn(turns[-1].text, "Who would use it?")
        turns.append(ask(client, "A + turn", a))
        turns.append(ask(client, "B1", b))
        a += _turn(turns[1].text, "Name one thing that it does.")
        turns.append(ask(client, "A2 after B", a))
    _say("Starting a second server, which has seen nothing, to read A2 cold")
    cold_flags = dict(flags) | {"conversation-cache-mib": "0"}
    with running_server(cold_flags) as url, _client(config, url) as client:
        return turns, ask(client, "A2 cold", a)


def documents() -> tuple[str, str]:
    """A long and a short text: the project's documentation and its licence."""
    root = Path(__file__).parents[1]
    paths = [root / name for name in ("README.md", "docs/ARCHITECTURE.md", "LICENSE")]
    if all(path.is_file() for path in paths):
        readme, architecture, licence = (path.read_text(encoding="utf-8") for path in paths)
        long = f"{readme}\n{architecture}"
    else:  # without the source tree, the package's description contains the README
        package = importlib.metadata.distribution("parkd")
        licence = package.read_text("licenses/LICENSE") or ""
        long = f"{package.metadata['Description']}\n{licence}"
    return long[:LONG_CHARACTERS], licence[:SHORT_CHARACTERS]


def _open(document: str, question: str) -> Messages:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"{document}\n\n{question}"}]


def _turn(answer: str, question: str) -> Messages:
    return [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]


def _client(config: Config, url: str) -> httpx.Client:
    file = config.server.api_key_file
    keys = config.server.api_keys or tuple(key.key for key in (() if file is None else read_key_file(file)))
    headers = {"authorization": f"Bearer {keys[0]}"} if keys else {}
    return httpx.Client(base_url=url, headers=headers, timeout=httpx.Timeout(SILENCE_LIMIT_S))


def ask(client: httpx.Client, name: str, messages: Messages) -> Turn:
    """Requests one streamed, greedy answer. Raises httpx.HTTPError or ServerFailed."""
    _say(f"{name}: reading the prompt")
    body = {
        "model": "demo",
        "messages": messages,
        "temperature": 0,
        "max_tokens": ANSWER_TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started = time.monotonic()
    first_token_s = 0.0
    pieces: list[str] = []
    usage: dict[str, Any] = {}
    timings: dict[str, Any] = {}
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.is_error:
            raise ServerFailed(f"{name}: HTTP {response.status_code}: {response.read().decode()}")
        cache = response.headers.get("x-parkd-cache", "")
        for chunk in _chunks(response, lambda: _say(f"{name}: at it for {time.monotonic() - started:.0f} s")):
            if "error" in chunk:
                raise ServerFailed(f"{name}: {chunk['error']}")
            usage = chunk.get("usage") or usage
            timings = chunk.get("timings") or timings
            for choice in chunk["choices"]:
                piece = choice["delta"].get("content")
                if piece:
                    first_token_s = first_token_s or time.monotonic() - started
                    pieces.append(piece)
    turn = Turn(
        name=name,
        prompt_tokens=usage["prompt_tokens"],
        reused_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        first_token_s=first_token_s,
        cache=str(timings.get("cache") or cache),
        text="".join(pieces),
        output_tokens=usage["completion_tokens"],
    )
    _say(f"{name}: {turn.first_token_s:.1f} s to the first token; {turn.text.strip()!r}")
    return turn


def _chunks(response: httpx.Response, on_keep_alive: Callable[[], None]) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith(":"):
            on_keep_alive()
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def table(turns: list[Turn]) -> str:
    """A table with one line per turn. The last two turns are the same request, restored and read cold."""
    lines = [f"{'turn':<12}{'prompt':>8}{'reused':>8}{'first token':>14}  cache"]
    lines += [
        f"{turn.name:<12}{turn.prompt_tokens:>8,}{turn.reused_tokens:>8,}{turn.first_token_s:>12.2f} s  {turn.cache}"
        for turn in turns
    ]
    restored, cold = turns[-2:]
    ratio = cold.first_token_s / max(restored.first_token_s, 1e-6)
    same = "the same" if restored.text == cold.text else "NOT the same"
    lines.append(f"\nA2 restored came {ratio:.1f} times sooner than A2 cold; the answers are {same}.")
    return "\n".join(lines)


def verdict(turns: list[Turn], cold: Turn) -> list[str]:
    """Descriptions of all results that are not as expected."""
    first, back = turns[0], turns[-1]
    problems = []
    if back.reused_tokens < LEAST_REUSED * first.prompt_tokens:
        problems.append(f"A2 reused {back.reused_tokens} tokens of the {first.prompt_tokens} in A1's prompt")
    if not back.cache.startswith("restored"):
        problems.append(f"A2 was not restored: its cache outcome is {back.cache!r}")
    if cold.reused_tokens:
        problems.append(f"the cold read reused {cold.reused_tokens} tokens, so it was not cold")
    if (back.text, back.output_tokens) != (cold.text, cold.output_tokens):
        problems.append(f"the answers differ: restored {back.text!r}, cold {cold.text!r}")
    return problems


def _say(line: str) -> None:
    print(line, flush=True)
