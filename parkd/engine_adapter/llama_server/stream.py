"""Parses a streamed completion: server-sent events to values.

    : ping
    data: {"content": "", "tokens": [0], "prompt_progress": {"total": 10, "cache": 9, "processed": 9}}    reading
    data: {"content": "The", "tokens": [504], "tokens_predicted": 1}                                       a token
    data: {"content": "", "tokens": [], "stop": true, "stop_type": "eos", "timings": {...}}                the end

The server does not send a token whose text ends within a character. `tokens_predicted` of the next event then counts
more tokens than the events contain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import orjson

from parkd.errors import UpstreamFailed, UpstreamTimeout

MOST_EVENT_BYTES = 64 * 1024 * 1024
"""Maximum size of one event: the last one may contain the whole prompt."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Progress of reading the prompt."""

    total: int
    cached: int
    """Tokens of the prompt that were already in the slot."""
    processed: int
    """Tokens of the prompt that are in the slot now, including cached ones."""


@dataclass(frozen=True, slots=True)
class Token:
    """Newly generated text and tokens."""

    text: str
    token_ids: tuple[int, ...]
    """May lack tokens whose text ended within a character."""
    predicted: int
    """Tokens generated so far, including these."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The last event of a successful completion."""

    stop_type: str
    """`eos`, `limit`, `word`."""
    predicted: int
    cached: int | None
    """Tokens of the prompt that were already in the slot; None if this server does not tell."""
    text: str = ""
    """Text that the server had held back."""


CompletionEvent = Reading | Token | Ended


class CompletionStream:
    """The events of one completion. `Ended` is the last; if the server closes the connection before it, raises
    UpstreamFailed."""

    def __init__(
        self,
        parts: Iterator[bytes],
        close: Callable[[], None],
        translated: Callable[[], AbstractContextManager[None]],
        silence_s: float,
        monotonic: Callable[[], float],
    ) -> None:
        """`translated` is a context that translates the connection's errors into the daemon's."""
        self._parts = parts
        self._close = close
        self._translated = translated
        self._silence_s = silence_s
        self._monotonic = monotonic
        self._buffer = bytearray()
        self._ended = False

    def next(self) -> CompletionEvent | None:
        """The next event; None once the completion has ended. Blocks. Raises UpstreamFailed, UpstreamTimeout."""
        if self._ended:
            return None
        heard_s = self._monotonic()
        while True:
            line = self._line()
            if line is None:
                with self._translated():
                    part = next(self._parts, None)
                if part is None:
                    raise UpstreamFailed("The llama-server closed its answer before the end. Send the request again.")
                self._buffer += part
                if len(self._buffer) > MOST_EVENT_BYTES:
                    raise UpstreamFailed("The llama-server sends an event without an end. Send the request again.")
                # Pings do not count: they show that the server's HTTP thread lives, not that the model makes progress.
                if self._monotonic() - heard_s > self._silence_s:
                    raise UpstreamTimeout(
                        f"The llama-server sent nothing of its answer for {self._silence_s:.0f} s. Check that it "
                        f"still runs, or give it more time with --upstream-timeout."
                    )
                continue
            event = parse_line(line)
            if event is not None:
                self._ended = isinstance(event, Ended)
                return event

    def close(self) -> None:
        """Closes the connection; the server then stops generating at its next batch. May be called again."""
        self._close()

    def _line(self) -> bytes | None:
        """Removes the next complete line from the buffer and returns it; None if there is none."""
        end = self._buffer.find(b"\n")
        if end < 0:
            return None
        line = bytes(self._buffer[:end]).rstrip(b"\r")
        del self._buffer[: end + 1]
        return line


def parse_line(line: bytes) -> CompletionEvent | None:
    """The event of a line; None for blank lines, comments and other fields. Raises UpstreamFailed."""
    name, _, value = line.partition(b":")
    if name not in (b"data", b"error") or value.strip() in (b"", b"[DONE]"):
        return None
    try:
        document = orjson.loads(value)
        if name == b"error" or "error" in document:
            error = document.get("error", document)
            raise UpstreamFailed(
                f"The llama-server failed in the middle of its answer: {error_text(error)} Send the request again."
            )
        return _event(document)
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise UpstreamFailed(
            "The llama-server sent an event that cannot be read. Check that --upstream names a llama-server that parkd "
            "knows, and nothing between changes its answers."
        ) from error


def error_text(error: Mapping[str, Any]) -> str:
    """The server's error message, as a sentence."""
    text = " ".join(str(error.get("message", "")).split()) or "it does not say why"
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _event(document: Mapping[str, Any]) -> CompletionEvent:
    if document.get("stop"):
        timings = document.get("timings") or {}
        cached = timings.get("cache_n")
        return Ended(
            str(document.get("stop_type", "")),
            int(document["tokens_predicted"]),
            None if cached is None else int(cached),
            str(document.get("content", "")),
        )
    progress = document.get("prompt_progress")
    if progress is not None:
        return Reading(int(progress["total"]), int(progress["cache"]), int(progress["processed"]))
    token_ids = tuple(int(token) for token in document["tokens"])
    return Token(str(document["content"]), token_ids, int(document["tokens_predicted"]))
