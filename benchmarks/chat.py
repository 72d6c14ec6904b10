"""A streamed chat request as a client sends it, with the time of its first content token."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

REQUEST_TIMEOUT_S = 900.0
"""A cold prompt on a busy machine takes minutes; this bounds the wait."""


@dataclass(frozen=True)
class Answer:
    text: str
    first_token_s: float
    """From sending the request to the first piece of text (not the empty piece with the role)."""
    total_s: float
    prompt_tokens: int
    reused_tokens: int
    output_tokens: int
    cache: str
    """The server's own report on its cache; empty if it has none."""


class ServerError(Exception):
    """The server answered with an error, or its stream was incomplete."""


def ask(
    base_url: str,
    messages: Sequence[dict[str, str]],
    *,
    output_tokens: int,
    extra: dict[str, Any] | None = None,
    on_first_token: Callable[[], None] = lambda: None,
) -> Answer:
    """One greedy answer. Raises ServerError, or httpx.HTTPError if the server cannot be reached."""
    body = {
        "model": "benchmark",
        "messages": list(messages),
        "temperature": 0,
        "max_tokens": output_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        **(extra or {}),
    }
    pieces: list[str] = []
    last: dict[str, Any] = {}
    first_token_s: float | None = None
    client = httpx.Client(timeout=REQUEST_TIMEOUT_S)  # reads certificates, which takes tens of milliseconds
    started = time.perf_counter()
    with client, client.stream("POST", f"{base_url}/v1/chat/completions", json=body) as response:
        if response.status_code != httpx.codes.OK:
            raise ServerError(f"{response.status_code}: {response.read().decode(errors='replace')[:400]}")
        for chunk in _chunks(response.iter_lines()):
            last.update({name: chunk[name] for name in ("usage", "timings") if chunk.get(name)})
            for choice in chunk["choices"]:
                if text := choice["delta"].get("content"):
                    if first_token_s is None:
                        first_token_s = time.perf_counter() - started
                        on_first_token()
                    pieces.append(text)
        header = response.headers.get("x-parkd-cache", "")
    if first_token_s is None or "usage" not in last:
        raise ServerError("the stream ended without text or without usage")
    usage, timings = last["usage"], last.get("timings", {})
    details = usage.get("prompt_tokens_details") or {}
    return Answer(
        text="".join(pieces),
        first_token_s=first_token_s,
        total_s=time.perf_counter() - started,
        prompt_tokens=usage["prompt_tokens"],
        reused_tokens=details.get("cached_tokens", timings.get("cache_n", 0)),
        output_tokens=usage["completion_tokens"],
        cache=str(timings.get("cache", header)),
    )


def _chunks(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The JSON documents of a stream of server-sent events, without comments (keep-alives)."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        payload = line.removeprefix("data:").strip()
        if payload == "[DONE]":
            return
        chunk = json.loads(payload)
        if "error" in chunk:
            raise ServerError(str(chunk["error"]))
        yield chunk
