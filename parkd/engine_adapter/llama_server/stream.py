"""Parses a streamed completion: server-sent events to values.

    : ping
    data: {"content": "", "tokens": [0], "prompt_progress": {"total": 10, "cache": 9, "processed": 9}}    reading
    data: {"content": "The", "tokens": [504], "tokens_predicted": 1}                                       a token
    data: {"content": "", "tokens": [], "stop": true, "stop_type": "eos", "timings": {...}}                the end

The server does not send a token whose text ends within a character. `tokens_predicted` of the next event then counts
more tokens than the events contain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import orjson

from parkd.engine_adapter.http.lines import EventLines, error_text, field_of
from parkd.errors import UpstreamFailed


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

    def __init__(self, lines: EventLines) -> None:
        self._lines = lines
        self._ended = False

    def next(self) -> CompletionEvent | None:
        """The next event; None once the completion has ended. Blocks. Raises UpstreamFailed, UpstreamTimeout."""
        if self._ended:
            return None
        event = cast(CompletionEvent, self._lines.next(parse_line))
        self._ended = isinstance(event, Ended)
        return event

    def close(self) -> None:
        """Closes the connection; the server then stops generating at its next batch. May be called again."""
        self._lines.close()


def parse_line(line: bytes) -> CompletionEvent | None:
    """The event of a line; None for blank lines, comments and other fields. Raises UpstreamFailed."""
    name, value = field_of(line)
    if name not in (b"data", b"error") or value in (b"", b"[DONE]"):
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
