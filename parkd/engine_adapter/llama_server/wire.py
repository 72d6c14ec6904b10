"""HTTP to one server over connections that are kept: as much of it as a llama-server's answers need.

Written out since a client library costs a warm turn more than everything else that is done here: half a millisecond of
a processor for each request, in a process whose caches the model has just emptied.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

import httpx

from parkd.engine_adapter.llama_server.connection import BrokenAnswer, Connection, Head


class CannotConnect(Exception):
    """No connection came about."""


class Wire:
    """Connections to one server, each for one request at a time. Thread-safe."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        *,
        most_connections: int,
        idle_s: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`headers` are sent with every request. A connection that was not used for `idle_s` is not used again."""
        parsed = httpx.URL(url)
        self._tls = httpx.create_ssl_context(trust_env=False) if parsed.scheme == "https" else None
        self._host = parsed.host
        self._port = parsed.port or (443 if self._tls else 80)
        self._prefix = parsed.raw_path.rstrip(b"/")
        lines = {"host": parsed.netloc.decode("ascii"), **headers}
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in lines.items()).encode("latin-1")
        self._room = threading.BoundedSemaphore(most_connections)
        self._idle_s = idle_s
        self._monotonic = monotonic
        self._idle: list[tuple[Connection, float]] = []
        """With when they were last used; the newest last. Appending and popping are atomic."""
        self.opened = 0
        """Connections so far."""

    def send(self, method: str, path: str, content: bytes | None, *, connect_s: float, silence_s: float) -> WireAnswer:
        """Waits for the answer's head; the caller closes the answer. No wait of a read or write is longer than
        `silence_s`.

        Sent once more where no answer began: a server may close a connection in the moment it is used again. Raises
        CannotConnect, BrokenAnswer, TimeoutError.
        """
        if not self._room.acquire(timeout=silence_s):
            raise CannotConnect("too many requests are under way")
        request = self._request(method, path, content or b"")
        try:
            connection = self._kept()
            if connection is not None:
                with suppress(BrokenAnswer):
                    return WireAnswer(self, connection, connection.ask(request, silence_s))
            connection = self._open(connect_s)
            return WireAnswer(self, connection, connection.ask(request, silence_s))
        except BaseException:
            self._room.release()
            raise

    def done(self, connection: Connection, *, reusable: bool) -> None:
        """An answer has been read, or was left."""
        if reusable:
            self._idle.append((connection, self._monotonic()))
        else:
            connection.close()
        self._room.release()

    def close(self) -> None:
        """Of the connections that are not in use."""
        while self._idle:
            self._idle.pop()[0].close()

    def _request(self, method: str, path: str, content: bytes) -> bytes:
        target = self._prefix + path.encode("ascii")
        head = b"%s %s HTTP/1.1\r\n%scontent-length: %d\r\n\r\n"
        return head % (method.encode("ascii"), target, self._headers, len(content)) + content

    def _kept(self) -> Connection | None:
        """A connection that is open still, as far as can be seen."""
        oldest_s = self._monotonic() - self._idle_s
        while True:
            try:
                connection, used_s = self._idle.pop()
            except IndexError:
                return None
            if used_s >= oldest_s and connection.is_quiet():
                return connection
            connection.close()

    def _open(self, timeout_s: float) -> Connection:
        try:
            opened = socket.create_connection((self._host, self._port), timeout_s)
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                opened = self._tls.wrap_socket(opened, server_hostname=self._host)
        except OSError as error:
            raise CannotConnect(str(error)) from error
        self.opened += 1
        return Connection(opened)


class WireAnswer:
    """One answer: its head, and its body as it comes."""

    def __init__(self, wire: Wire, connection: Connection, head: Head) -> None:
        self.status = head.status
        self.headers = head.headers
        """By names in small letters."""
        self._wire = wire
        self._connection = connection
        self._parts = connection.body(head)
        self._keeps = head.keeps
        self._read = False
        self._closed = False

    def __iter__(self) -> Iterator[bytes]:
        """The body's parts. Raises BrokenAnswer, TimeoutError."""
        yield from self._parts
        self._read = True

    def close(self) -> None:
        """Gives the connection back, if the body was read to its end; else the server sees that nobody reads on. May
        be called again."""
        if not self._closed:
            self._closed = True
            self._wire.done(self._connection, reusable=self._read and self._keeps)
