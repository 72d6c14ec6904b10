"""HTTP as it goes over the wire: what is sent, every way in which an answer can come or break, and which connections
are used again."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from typing import Any

import pytest

from parkd.engine_adapter.http.wire import MOST_LINE_BYTES, BrokenAnswer, CannotConnect, Chunks, Wire, is_quiet

OK = b"HTTP/1.1 200 OK\r\n"
PLAIN = OK + b"Content-Length: 2\r\n\r\nok"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n5;x=y\r\ndefgh\r\n0\r\nBehind: it\r\n\r\n"
CLOSE = None
"""In a script: the server closes."""
WAIT_S = 5.0

Script = list[bytes | None]


Serve = Callable[..., "ScriptedServer"]
"""Of the scripts of one connection after the other."""


class ScriptedServer:
    """Takes connections one after the other; after each request it sends the next of that connection's scripts."""

    def __init__(self, *connections: list[Script]) -> None:
        self.requests: list[bytes] = []
        self.left = threading.Event()
        """The client closed a connection on which it was answered."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._scripts = iter(connections)
        self._wires: list[Wire] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        for scripts in self._scripts:
            try:
                taken, _ = self._listener.accept()
            except OSError:
                return
            with taken:
                self._answer(taken, scripts)

    def _answer(self, taken: socket.socket, scripts: list[Script]) -> None:
        for script in scripts:
            if not self._request(taken):
                return
            for part in script:
                if part is CLOSE:
                    return
                taken.sendall(part)
        if not self._request(taken):
            self.left.set()

    def _request(self, taken: socket.socket) -> bool:
        """False if the client closed."""
        raw = b""
        while b"\r\n\r\n" not in raw:
            part = taken.recv(65536)
            if not part:
                return False
            raw += part
        head, _, body = raw.partition(b"\r\n\r\n")
        lengths = [line[16:] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length: ")]
        length = int(lengths[0]) if lengths else 0
        while len(body) < length:
            body += taken.recv(65536)
        self.requests.append(head + b"\r\n\r\n" + body)
        return True

    def wire(self, path: str = "", **options: Any) -> Wire:
        """One to this server, closed with it."""
        settings = {"most_connections": 4, "idle_s": 60.0, **options}
        self._wires.append(Wire(self.url + path, {"authorization": "Bearer k"}, **settings))
        return self._wires[-1]

    def close(self) -> None:
        for wire in self._wires:
            wire.close()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers: list[ScriptedServer] = []

    def started(*connections: list[Script]) -> ScriptedServer:
        servers.append(ScriptedServer(*connections))
        return servers[-1]

    yield started
    for server in servers:
        server.close()


def get(wire: Wire, content: bytes | None = None, silence_s: float = WAIT_S) -> bytes:
    answer = wire.send("POST", "/x?y=1", content, connect_s=WAIT_S, silence_s=silence_s)
    try:
        return b"".join(answer)
    finally:
        answer.close()


def test_a_request_is_whole_and_names_its_host(serve: Serve) -> None:
    server = serve([[PLAIN]])
    assert get(server.wire("/base"), b'{"a": 1}') == b"ok"
    host = server.url.removeprefix("http://").encode()
    (request,) = server.requests
    first, *lines = request.partition(b"\r\n\r\n")[0].lower().split(b"\r\n")
    assert first == b"post /base/x?y=1 http/1.1"
    assert {b"host: " + host, b"authorization: bearer k", b"content-length: 8"} <= set(lines)
    assert request.endswith(b'\r\n\r\n{"a": 1}')


@pytest.mark.parametrize(
    ("raw", "body"),
    [(PLAIN, b"ok"), (CHUNKED, b"abcdefgh"), (OK + b"\r\nto the end", b"to the end")],
    ids=["counted", "chunked", "to the end"],
)
def test_a_body_is_the_same_however_it_is_cut(serve: Serve, raw: bytes, body: bytes) -> None:
    for cut in range(1, len(raw)):
        server = serve([[raw[:cut], raw[cut:], CLOSE]])
        assert get(server.wire()) == body


def test_chunks_that_came_together_are_one_part(serve: Serve) -> None:
    """A server sends a chunk for each token; those that wait are read at once."""
    many = b"".join(b"3\r\nabc\r\n" for _ in range(100))
    server = serve([[OK + b"Transfer-Encoding: chunked\r\n\r\n" + many + b"0\r\n\r\n"]])
    answer = server.wire().send("GET", "/", None, connect_s=WAIT_S, silence_s=WAIT_S)
    parts = list(answer)
    answer.close()
    assert b"".join(parts) == b"abc" * 100
    assert len(parts) < 10


def test_what_follows_the_last_chunk_is_nobodys() -> None:
    chunks = Chunks()
    assert chunks.take(b"1\r\na\r\n0\r\n\r\n") == b"a"
    assert (chunks.is_over, chunks.has_more) == (True, False)
    chunks = Chunks()
    assert chunks.take(b"1\r\na\r\n0\r\nx: y\r\n\r\nHTTP/1.1 200 OK") == b"a"
    assert (chunks.is_over, chunks.has_more) == (True, True)


@pytest.mark.parametrize(
    "raw", [b"-1\r\n", b"\r\n", b"0x1\r\n", b"1_0\r\n", b"f" * 16 + b"\r\n", b"1" * (MOST_LINE_BYTES + 1)]
)
def test_a_chunk_that_does_not_say_its_length_breaks_the_answer(raw: bytes) -> None:
    with pytest.raises(BrokenAnswer):
        Chunks().take(raw)


def test_parts_are_given_out_as_they_come(serve: Serve) -> None:
    server = serve([[CHUNKED[: CHUNKED.index(b"5;")]]])
    answer = server.wire().send("GET", "/", None, connect_s=WAIT_S, silence_s=WAIT_S)
    assert (answer.status, answer.headers["transfer-encoding"]) == (200, "chunked")
    assert next(iter(answer)) == b"abc"
    answer.close()


def test_a_connection_is_used_again_once_its_answer_was_read(serve: Serve) -> None:
    server = serve([[PLAIN], [CHUNKED], [b"HTTP/1.1 100 Continue\r\n\r\n" + PLAIN]])
    wire = server.wire()
    assert [get(wire) for _ in range(3)] == [b"ok", b"abcdefgh", b"ok"]
    assert wire.opened == 1


@pytest.mark.parametrize(
    "first",
    [
        [PLAIN, CLOSE],
        [OK + b"Connection: close\r\nContent-Length: 2\r\n\r\nok"],
        [b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok"],
    ],
    ids=["closed by the server", "said to be closed", "of an old server"],
)
def test_a_connection_that_is_not_kept_is_not_used_again(serve: Serve, first: Script) -> None:
    server = serve([first], [[PLAIN]])
    wire = server.wire()
    assert [get(wire), get(wire)] == [b"ok", b"ok"]
    assert (wire.opened, len(server.requests)) == (2, 2)


def test_the_end_of_a_connection_is_seen_before_it_is_used() -> None:
    connection = HTTPConnection("upstream.test")
    connection.sock, theirs = socket.socketpair()
    assert is_quiet(connection)
    theirs.close()
    assert not is_quiet(connection)
    connection.sock.close()
    assert not is_quiet(connection)


def test_a_connection_that_lay_idle_for_long_is_not_used_again(serve: Serve) -> None:
    now_s = 0.0
    server = serve([[PLAIN], [PLAIN]], [[PLAIN]])
    wire = server.wire(monotonic=lambda: now_s, idle_s=4.0)
    get(wire)
    now_s = 3.9
    get(wire)
    now_s = 8.0
    get(wire)
    assert wire.opened == 2


def test_a_connection_closed_as_it_was_used_again_is_opened_anew(serve: Serve) -> None:
    server = serve([[PLAIN], [CLOSE]], [[PLAIN]])
    wire = server.wire()
    assert [get(wire), get(wire)] == [b"ok", b"ok"]
    assert (wire.opened, len(server.requests)) == (2, 3)


def test_what_a_new_connection_breaks_off_is_not_sent_again(serve: Serve) -> None:
    server = serve([[CLOSE]], [[PLAIN]])
    with pytest.raises(BrokenAnswer, match="closed"):
        get(server.wire())
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "raw",
    [
        b"220 mail.example ESMTP\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1\r\n\r\n",
        OK + b"X: " + b"x" * 70_000,
        OK[:9],
        OK + b"Content-Length: 5\r\n\r\nabc",
        OK + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nabc\r\n0\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",
    ],
    ids=lambda raw: repr(raw)[-24:],
)
def test_an_answer_that_breaks_is_no_answer(serve: Serve, raw: bytes) -> None:
    with pytest.raises(BrokenAnswer):
        get(serve([[raw, CLOSE]]).wire())


@pytest.mark.parametrize("raw", [b"", OK, OK + b"Content-Length: 5\r\n\r\nabc"], ids=["nothing", "a head", "a part"])
def test_silence_ends(serve: Serve, raw: bytes) -> None:
    with pytest.raises(TimeoutError):
        get(serve([[raw]]).wire(), silence_s=0.05)


def test_nobody_there_is_told_apart() -> None:
    server = ScriptedServer()
    server.close()
    with pytest.raises(CannotConnect):
        get(server.wire())


def test_a_server_sees_that_an_answer_is_left(serve: Serve) -> None:
    server = serve([[CHUNKED[:-2]]], [[PLAIN]])
    wire = server.wire()
    answer = wire.send("GET", "/", None, connect_s=WAIT_S, silence_s=WAIT_S)
    answer.close()
    answer.close()
    assert server.left.wait(WAIT_S)
    assert get(wire) == b"ok"


def test_connections_have_a_bound(serve: Serve) -> None:
    wire = serve([[PLAIN], [PLAIN]]).wire(most_connections=1)
    answer = wire.send("GET", "/", None, connect_s=WAIT_S, silence_s=WAIT_S)
    with pytest.raises(CannotConnect, match="too many"):
        get(wire, silence_s=0.05)
    assert list(answer) == [b"ok"]
    answer.close()
    assert get(wire) == b"ok"
