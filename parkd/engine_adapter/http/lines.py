"""Reads a streamed answer line by line: the events of `text/event-stream`, as they arrive.

: ping
data: {"content": "The"}
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from parkd.errors import UpstreamFailed, UpstreamTimeout

MOST_EVENT_BYTES = 64 * 1024 * 1024
"""Maximum size of one event: the last one may contain the whole prompt."""

MOST_ERROR_CHARS = 2000
"""Of a server's error message that are told to a client."""

E = TypeVar("E")


class EventLines:
    """The events of one answer, for one caller."""

    def __init__(
        self,
        parts: Iterator[bytes],
        close: Callable[[], None],
        translated: Callable[[], AbstractContextManager[None]],
        silence_s: float,
        monotonic: Callable[[], float],
        called: str = "llama-server",
    ) -> None:
        """`translated` is a context that translates the connection's errors into the daemon's. `called` is what errors
        call the server."""
        self._parts = parts
        self._close = close
        self._translated = translated
        self._silence_s = silence_s
        self._monotonic = monotonic
        self._called = called
        self._buffer = bytearray()
        self._searched_bytes = 0
        """At the beginning of the buffer, without an end of line; a long line is searched once, not once per part."""

    def next(self, parse: Callable[[bytes], E | None]) -> E:
        """The next event, which is what `parse` makes of a line; lines of which it makes None are passed over.

        Blocks. Raises UpstreamFailed, also if the answer ends before another event, and UpstreamTimeout.
        """
        heard_s = self._monotonic()
        while True:
            event = self.arrived(parse)
            if event is not None:
                return event
            with self._translated():
                part = next(self._parts, None)
            if part is None:
                raise UpstreamFailed(f"The {self._called} closed its answer before the end. Send the request again.")
            self._buffer += part
            if len(self._buffer) > MOST_EVENT_BYTES:
                raise UpstreamFailed(f"The {self._called} sends an event without an end. Send the request again.")
            # Pings do not count: they show that the server's HTTP thread lives, not that the model makes progress.
            if self._monotonic() - heard_s > self._silence_s:
                raise UpstreamTimeout(
                    f"The {self._called} sent nothing of its answer for {self._silence_s:.0f} s. Check that it "
                    f"still runs, or give it more time with --upstream-timeout."
                )

    def arrived(self, parse: Callable[[bytes], E | None]) -> E | None:
        """As `next`, of what has arrived already; None: no other event has. Never waits."""
        while (line := self._line()) is not None:
            event = parse(line)
            if event is not None:
                return event
        return None

    def close(self) -> None:
        """Closes the connection, which tells the server to stop, unless the answer was read to its end. May be called
        again."""
        self._close()

    def drain(self) -> None:
        """Reads to the end of the answer, so that the connection can be used again. Raises UpstreamFailed."""
        with self._translated():
            for _ in self._parts:
                pass

    def _line(self) -> bytes | None:
        """Removes the next complete line from the buffer and returns it; None if there is none."""
        end = self._buffer.find(b"\n", self._searched_bytes)
        if end < 0:
            self._searched_bytes = len(self._buffer)
            return None
        self._searched_bytes = 0
        line = bytes(self._buffer[:end]).rstrip(b"\r")
        del self._buffer[: end + 1]
        return line


def field_of(line: bytes) -> tuple[bytes, bytes]:
    """The name and the value of a line; both empty for a blank line or a comment."""
    name, _, value = line.partition(b":")
    return name, value.strip()


def error_text(error: Mapping[str, Any]) -> str:
    """A server's error message, as a sentence. A very long one is cut."""
    text = " ".join(str(error.get("message", "")).split()) or "it does not say why"
    if len(text) > MOST_ERROR_CHARS:
        text = f"{text[:MOST_ERROR_CHARS]}..."
    return text if text.endswith((".", "!", "?")) else f"{text}."
