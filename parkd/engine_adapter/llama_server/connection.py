"""One connection to an HTTP/1.1 server: requests that are whole, answers as they come.

    request   one head and one body, in one write
    answer    a body of a known length, in chunks, or to the connection's end

Standard: RFC 9112.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator

MOST_HEAD_BYTES = 64 * 1024
"""Of a status line with its headers, and of the lines between chunks."""
READ_BYTES = 64 * 1024


class BrokenAnswer(Exception):
    """The server broke off, or answers what is no HTTP."""


class Head:
    """A status line and headers."""

    def __init__(self, raw: bytes) -> None:
        """Raises ValueError."""
        first, *lines = raw.decode("latin-1").split("\r\n")
        version, status, *_ = first.split(" ", 2)
        if not version.startswith("HTTP/1."):
            raise ValueError(first)
        self.status = int(status)
        self.headers = {}
        for line in lines:
            name, colon, value = line.partition(":")
            if not colon:
                raise ValueError(line)
            self.headers[name.lower()] = value.strip()
        coding = self.headers.get("transfer-encoding")
        if coding not in (None, "chunked"):
            raise ValueError(coding)
        self.is_chunked = coding is not None
        length = self.headers.get("content-length")
        self.length = None if length is None or self.is_chunked else _number(length, 10)
        ends = self.length is not None or self.is_chunked
        self.keeps = ends and version != "HTTP/1.0" and self.headers.get("connection", "").lower() != "close"
        """The connection can be used again."""


class Connection:
    """A socket and what was read of it ahead."""

    def __init__(self, opened: socket.socket) -> None:
        self._socket = opened
        self._buffer = bytearray()

    def is_quiet(self) -> bool:
        """Nothing lies there to be read: what comes without a question is the end, or nonsense. Not to be used then."""
        try:
            self._socket.settimeout(0)
            self._socket.recv(1)
        except (BlockingIOError, ssl.SSLWantReadError):
            return not self._buffer
        except OSError:
            pass
        return False

    def ask(self, request: bytes, silence_s: float) -> Head:
        """Raises BrokenAnswer, TimeoutError; the connection is closed then."""
        try:
            self._socket.settimeout(silence_s)
            self._send(request)
            head = self._head()
            while head.status < 200:  # it may say first that it is still there
                head = self._head()
        except BaseException:
            self.close()
            raise
        return head

    def body(self, head: Head) -> Iterator[bytes]:
        """Raises BrokenAnswer, TimeoutError."""
        if head.is_chunked:
            return self._chunks()
        return self._rest() if head.length is None else self._counted(head.length)

    def close(self) -> None:
        self._socket.close()

    def _head(self) -> Head:
        raw = self._until(b"\r\n\r\n")
        try:
            return Head(raw)
        except ValueError as error:
            raise BrokenAnswer(f"it answers no HTTP: {bytes(raw[:80])!r}") from error

    def _chunks(self) -> Iterator[bytes]:
        while size := self._chunk_size():
            yield from self._counted(size)
            if self._until(b"\r\n"):
                raise BrokenAnswer("a chunk is longer than it says")
        while self._until(b"\r\n"):
            pass  # headers behind the body

    def _chunk_size(self) -> int:
        line = self._until(b"\r\n").partition(b";")[0]
        try:
            return _number(line.decode("latin-1"), 16)
        except ValueError as error:
            raise BrokenAnswer("a chunk does not say how long it is") from error

    def _counted(self, size: int) -> Iterator[bytes]:
        """`size` bytes in parts, as they come."""
        while size:
            if not self._buffer:
                self._need()
            part = bytes(self._buffer[:size])
            del self._buffer[:size]
            size -= len(part)
            yield part

    def _rest(self) -> Iterator[bytes]:
        """All that comes until the server closes."""
        while self._buffer or self._fill():
            part = bytes(self._buffer)
            self._buffer.clear()
            yield part

    def _until(self, mark: bytes) -> bytes:
        """What comes before a mark, which is passed over."""
        while (end := self._buffer.find(mark)) < 0:
            if len(self._buffer) > MOST_HEAD_BYTES:
                raise BrokenAnswer("its headers have no end")
            self._need()
        found = bytes(self._buffer[:end])
        del self._buffer[: end + len(mark)]
        return found

    def _need(self) -> None:
        if not self._fill():
            raise BrokenAnswer("it closed the connection")

    def _fill(self) -> bool:
        """Reads what is there, or waits for it; False at the connection's end."""
        try:
            part = self._socket.recv(READ_BYTES)
        except TimeoutError:
            raise
        except OSError as error:
            raise BrokenAnswer(str(error)) from error
        self._buffer += part
        return bool(part)

    def _send(self, request: bytes) -> None:
        try:
            self._socket.sendall(request)
        except TimeoutError:
            raise
        except OSError as error:
            raise BrokenAnswer(str(error)) from error


def _number(text: str, base: int) -> int:
    """Raises ValueError, for a negative one too."""
    number = int(text, base)
    if number < 0:
        raise ValueError(text)
    return number
