"""HTTP to one server over connections that are kept open, by the standard library's client.

A request through httpx costs a warm turn three to four times the processor time.
"""

from __future__ import annotations

import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from urllib.parse import urlsplit

READ_BYTES = 64 * 1024
MOST_LINE_BYTES = 64 * 1024
"""Of a line between two chunks, and of a trailer."""
_CHUNK_SIZE = re.compile(rb"[0-9a-fA-F]{1,15}")


class CannotConnect(Exception):
    """No connection could be established."""


class NotTrusted(CannotConnect):
    """The server's certificate was refused."""


class NoTls(CannotConnect):
    """Something listens at the address, but the TLS handshake failed."""


class BrokenAnswer(Exception):
    """The server closed the connection early, or does not speak HTTP."""


class Hold:
    """A request under way, which another thread can cut off. One for each request; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._is_cut = False

    @property
    def is_cut(self) -> bool:
        return self._is_cut

    def cut(self) -> None:
        """Closes the connection under the thread that waits on it, which then meets its end. May be called again."""
        with self._lock:
            self._is_cut = True
            if self._socket is not None:
                _shut(self._socket)

    def on(self, connection: socket.socket | None) -> None:
        """The request uses this connection from now on; None: it has ended."""
        with self._lock:
            self._socket = connection
            if connection is not None and self._is_cut:
                _shut(connection)


def _shut(connection: socket.socket) -> None:
    # Not the method of a TLS socket, which would take the session away from the thread that reads.
    with suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


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
        parsed = urlsplit(url)
        kind: Callable[..., HTTPConnection] = HTTPConnection
        if parsed.scheme == "https":
            kind = partial(HTTPSConnection, context=ssl.create_default_context())
        self._connection = partial(kind, parsed.hostname or "", parsed.port)
        self._prefix = parsed.path.rstrip("/")
        self._headers = dict(headers)
        self._room = threading.BoundedSemaphore(most_connections)
        self._idle_s = idle_s
        self._monotonic = monotonic
        self._idle: list[tuple[HTTPConnection, float]] = []
        """Idle connections and the time of their last use, most recent last. Append and pop are atomic."""
        self.opened = 0
        """Connections opened so far."""

    def send(
        self,
        method: str,
        path: str,
        content: bytes | None,
        *,
        connect_s: float,
        silence_s: float,
        hold: Hold | None = None,
    ) -> WireAnswer:
        """Sends a request and waits for the answer's headers; the caller closes the answer. No single read or write
        waits longer than `silence_s`. With a `hold`, another thread can cut the request off.

        If no answer begins on a reused connection, the request is sent again on a new one, since a server may close a
        connection just as it is reused. Raises CannotConnect, BrokenAnswer, TimeoutError.
        """
        if not self._room.acquire(timeout=silence_s):
            raise CannotConnect("too many requests are under way")
        hold = Hold() if hold is None else hold
        ask = partial(self._ask, method=method, path=path, content=content, silence_s=silence_s, hold=hold)
        try:
            connection = self._kept()
            if connection is not None:
                with suppress(BrokenAnswer):
                    return WireAnswer(self, connection, ask(connection), hold)
            if hold.is_cut:
                raise BrokenAnswer("it was cut off")
            connection = self._open(connect_s)
            return WireAnswer(self, connection, ask(connection), hold)
        except BaseException:
            self._room.release()
            raise

    def done(self, connection: HTTPConnection, *, reusable: bool) -> None:
        """Takes back a connection after its answer. Keeps it if `reusable`, else closes it."""
        if reusable:
            self._idle.append((connection, self._monotonic()))
        else:
            connection.close()
        self._room.release()

    def close(self) -> None:
        """Closes idle connections."""
        while self._idle:
            self._idle.pop()[0].close()

    def _ask(
        self, connection: HTTPConnection, *, method: str, path: str, content: bytes | None, silence_s: float, hold: Hold
    ) -> HTTPResponse:
        """Sends a request and returns the response, of which only the headers are read. Closes the connection if this
        raises."""
        try:
            with broken_answers():
                connection.sock.settimeout(silence_s)
                hold.on(connection.sock)
                connection.request(method, self._prefix + path, content, self._headers)
                return connection.getresponse()
        except BaseException:
            hold.on(None)
            connection.close()
            raise

    def _kept(self) -> HTTPConnection | None:
        """An idle connection that seems to be still open, or None. Closes those that are too old or closed."""
        oldest_s = self._monotonic() - self._idle_s
        while True:
            try:
                connection, used_s = self._idle.pop()
            except IndexError:
                return None
            if used_s >= oldest_s and is_quiet(connection):
                return connection
            connection.close()

    def _open(self, timeout_s: float) -> HTTPConnection:
        connection = self._connection(timeout=timeout_s)
        try:
            connection.connect()
        except OSError as error:
            connection.close()  # After a failed TLS handshake, the socket is still open.
            raise cannot_connect(error, is_tls=isinstance(connection, HTTPSConnection)) from error
        self.opened += 1
        return connection


class WireAnswer:
    """One answer: its status, its headers, and an iterator over its body as it arrives."""

    def __init__(self, wire: Wire, connection: HTTPConnection, response: HTTPResponse, hold: Hold) -> None:
        self.status = response.status
        self.headers = response.headers
        """Looked up without regard to case."""
        self._wire = wire
        self._connection = connection
        self._response = response
        self._hold = hold
        self._was_read = False
        self._closed = False

    def __iter__(self) -> Iterator[bytes]:
        """The body, in pieces: each is all that has arrived. Raises BrokenAnswer, TimeoutError."""
        if self._response.chunked:  # the library would give each chunk alone, and a chunk is a token
            yield from self._chunked()
            return
        with broken_answers():
            while part := self._response.read1(READ_BYTES):
                yield part
        if self._response.length:  # The library reports no error if a body is shorter than its Content-Length.
            raise BrokenAnswer("it closed the connection")
        self._was_read = True

    def _chunked(self) -> Iterator[bytes]:
        chunks = Chunks()
        with broken_answers():
            while not chunks.is_over:
                data = self._response.fp.read1(READ_BYTES)
                if not data:
                    raise BrokenAnswer("it closed the connection")
                part = chunks.take(data)
                if part:
                    yield part
        self._was_read = not chunks.has_more

    def close(self) -> None:
        """Returns the connection for reuse if the body was read completely; otherwise closes it, which tells the server
        to stop. May be called again."""
        if not self._closed:
            self._closed = True
            self._hold.on(None)
            self._response.close()
            self._wire.done(self._connection, reusable=self._is_reusable)

    @property
    def _is_reusable(self) -> bool:
        return self._was_read and not self._response.will_close and not self._hold.is_cut


class Chunks:
    """Reads a body that is sent in chunks (RFC 9112, 7.1), however the connection cuts it."""

    def __init__(self) -> None:
        self.is_over = False
        self._unread = bytearray()
        """Less than a line, unless the body is over."""
        self._left_bytes = 0
        """Of the present chunk."""
        self._is_behind_data = False
        """What comes next is the end of a chunk's line."""
        self._is_behind_last = False
        """What comes next are trailers."""

    @property
    def has_more(self) -> bool:
        """Something came behind the end, which nobody asked for."""
        return bool(self._unread)

    def take(self, data: bytes) -> bytes:
        """The part of the body in the next piece of the connection's bytes. Raises BrokenAnswer."""
        unread, parts, at = self._unread, list[bytes](), 0
        unread += data
        while not self.is_over:
            if self._left_bytes:
                part = bytes(unread[at : at + self._left_bytes])
                if not part:
                    break
                parts.append(part)
                at += len(part)
                self._left_bytes -= len(part)
                continue
            end = unread.find(b"\n", at)
            if end < 0:
                break
            self._line(bytes(unread[at:end]).rstrip(b"\r"))
            at = end + 1
        del unread[:at]
        if not self.is_over and len(unread) > MOST_LINE_BYTES:
            raise BrokenAnswer("a line between two chunks has no end")
        return b"".join(parts)

    def _line(self, line: bytes) -> None:
        if self._is_behind_last:
            self.is_over = not line
        elif self._is_behind_data:
            if line:
                raise BrokenAnswer("a chunk is longer than it says")
            self._is_behind_data = False
        else:
            size = line.split(b";")[0].strip()
            if not _CHUNK_SIZE.fullmatch(size):
                raise BrokenAnswer("a chunk does not say how long it is")
            self._left_bytes = int(size, 16)
            self._is_behind_data, self._is_behind_last = self._left_bytes > 0, self._left_bytes == 0


def cannot_connect(error: OSError, *, is_tls: bool) -> CannotConnect:
    """The exception for a failed attempt to connect."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return NotTrusted(error.verify_message.rstrip("."))
    if isinstance(error, ssl.SSLError) or (is_tls and isinstance(error, ConnectionResetError)):
        return NoTls(str(error))
    return CannotConnect(str(error))


@contextmanager
def broken_answers() -> Iterator[None]:
    """Translates errors of the library, except TimeoutError, to BrokenAnswer."""
    try:
        yield
    except TimeoutError:
        raise
    except (OSError, HTTPException) as error:
        raise BrokenAnswer(str(error) or type(error).__name__) from error


def is_quiet(connection: HTTPConnection) -> bool:
    """Whether an idle connection has nothing to read. If it has, the server has closed it."""
    try:
        connection.sock.settimeout(0)
        connection.sock.recv(1)
    except (BlockingIOError, ssl.SSLWantReadError):
        return True
    except OSError:
        pass
    return False
