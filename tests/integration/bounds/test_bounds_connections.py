"""Connections on which no request comes, and requests for another protocol."""

from __future__ import annotations

import itertools
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import httpx
import orjson
import pytest
from anyio.abc import SocketStream
from uvicorn.protocols.http.h11_impl import H11Protocol

from parkd.proxy import connections, server
from parkd.proxy.config import ProxyConfig
from tests.fakes.engine import FakeEngine
from tests.integration.api.api_harness import Gate, Running, body_of, running

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello there"}]
SHORT = ProxyConfig(idle_connection_s=1)
HALF = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
WEBSOCKET = {
    "connection": "Upgrade",
    "upgrade": "websocket",
    "sec-websocket-version": "13",
    "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
}


@asynccontextmanager
async def connected(running_server: Running) -> AsyncIterator[SocketStream]:
    url = running_server.client.base_url
    async with await anyio.connect_tcp(url.host, url.port or 80) as stream:
        yield stream


async def is_closed(stream: SocketStream, within_s: float = 10.0) -> bool:
    with anyio.move_on_after(within_s):
        try:
            await stream.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            return True
    return False


@pytest.mark.parametrize("sent", [b"", b"POST", HALF])
async def test_a_request_that_does_not_come_closes_its_connection(sent: bytes) -> None:
    async with running(FakeEngine(), config=SHORT) as parkd, connected(parkd) as stream:
        if sent:
            await stream.send(sent)
        assert await is_closed(stream)


async def test_headers_that_drip_behind_an_answer_do_not_hold_the_connection() -> None:
    async with (
        running(FakeEngine(), config=SHORT) as parkd,
        connected(parkd) as stream,
        anyio.create_task_group() as tasks,
    ):
        await stream.send(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        assert (await stream.receive()).startswith(b"HTTP/1.1 200")

        async def drip() -> None:
            for byte in HALF * 10:
                await stream.send(bytes([byte]))
                await anyio.sleep(0.1)

        tasks.start_soon(drip)
        try:
            while await stream.receive():
                pass
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            tasks.cancel_scope.cancel()


async def test_a_request_that_takes_longer_than_that_is_answered() -> None:
    gate = Gate("chunk")
    async with running(FakeEngine(hook=gate), config=SHORT) as parkd, anyio.create_task_group() as tasks:

        async def ask() -> None:
            assert (await parkd.client.post(CHAT, json=body_of(HELLO))).status_code == 200

        tasks.start_soon(ask)
        await gate.wait_reached()
        await anyio.sleep(1.5)
        gate.opened.set()


class _Transport:
    is_closed = False

    def close(self) -> None:
        self.is_closed = True


class _Request:
    response_complete = False


class _Connection:
    def __init__(self) -> None:
        self.transport = _Transport()
        self.cycle: _Request | None = None


def test_a_wait_begins_anew_behind_each_request() -> None:
    lobby, connection = connections.Lobby(10.0), _Connection()

    def is_closed_at(now_s: float) -> bool:
        lobby.sweep([connection], now_s)  # type: ignore[list-item]
        return connection.transport.is_closed

    assert not is_closed_at(0)
    assert not is_closed_at(9.9)
    connection.cycle = _Request()
    assert not is_closed_at(50)
    connection.cycle.response_complete = True
    assert not is_closed_at(100)
    connection.cycle = _Request()  # began and ended between two looks
    connection.cycle.response_complete = True
    assert not is_closed_at(109)
    assert not is_closed_at(118)
    assert is_closed_at(119)


def test_the_oldest_without_a_request_go_where_there_are_too_many() -> None:
    lobby, opened = connections.Lobby(60.0, most=3), [_Connection() for _ in range(7)]

    def closed_at(now_s: float, count: int) -> list[int]:
        lobby.sweep([one for one in opened[:count] if not one.transport.is_closed], now_s)  # type: ignore[misc]
        return [index for index, one in enumerate(opened) if one.transport.is_closed]

    opened[0].cycle = _Request()
    assert closed_at(0, 1) == []
    assert closed_at(1, 2) == []
    assert closed_at(2, 4) == []
    assert closed_at(2.1, 6) == [1]
    assert closed_at(2.2, 6) == [1]  # too many, and too young to be given up
    assert closed_at(3.2, 7) == [1, 2, 3]


@pytest.mark.parametrize("path", ["/v1/responses", CHAT, "/v1/realtime", "/ws"])
async def test_a_websocket_is_refused_in_the_way_that_sends_clients_to_http(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Codex tries one first; only 426 lets it go on at once."""
    caplog.set_level(logging.INFO)
    with server.quiet():
        async with running(FakeEngine()) as parkd:
            refused = await parkd.client.get(path, headers=WEBSOCKET)
    assert refused.status_code == 426
    assert refused.headers["upgrade"] == "HTTP/1.1"
    assert "POST" in refused.json()["error"]["message"]
    told = [record.getMessage() for record in caplog.records if record.name.startswith(("parkd", "uvicorn"))]
    assert [line for line in told if "pgrade" in line or "WebSocket" in line] == [
        f"a client requested a WebSocket at {path!r} and was told to use HTTP"
    ]


async def test_a_request_that_offers_another_http_is_answered_in_this_one() -> None:
    """As clients in Java do with every request."""
    offer = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": "AAMAAABkAARAAAAAAAIAAAAA"}
    async with running(FakeEngine()) as parkd:
        protocol = parkd.server.config.http
        assert isinstance(protocol, type)
        assert issubclass(protocol, H11Protocol), "whatever else is installed"
        answer = await parkd.client.post(CHAT, json=body_of(HELLO), headers=offer)
        assert answer.status_code == 200
        async with httpx.AsyncClient(trust_env=False) as other:
            assert (await other.get(f"{parkd.url}/health", headers=offer)).status_code == 200


def test_what_libraries_say_of_clients_that_left_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    for name, words in (
        ("asyncio", "socket.send() raised exception."),
        ("uvicorn.error", "Unsupported upgrade request."),
    ):
        with server.quiet():
            logging.getLogger(name).warning(words)
            logging.getLogger(name).warning("a fault")
        logging.getLogger(name).warning(words)
        assert [record.getMessage() for record in caplog.records] == ["a fault", words]
        caplog.clear()


async def test_a_flood_of_connections_leaves_turns_of_the_loop_to_those_that_are_there() -> None:
    """Each turn of the event loop accepted all that waited, 2,048 connections: with a client that connects without end,
    a request that was there already took 40 s."""
    async with running(FakeEngine()) as parkd:
        held = parkd.server.server_state.connections
        address = (parkd.client.base_url.host, parkd.client.base_url.port)
        before = len(held)
        # The loop stands still meanwhile: the system's queue takes them all, and none is refused or tried again.
        flood = [socket.create_connection(address, timeout=0.5) for _ in range(200)]
        grown = [before]
        with anyio.fail_after(10):
            while len(held) < before + len(flood):
                await anyio.lowlevel.checkpoint()
                grown.append(len(held))
        assert max(later - earlier for earlier, later in itertools.pairwise(grown)) <= server.ACCEPTS_A_TURN
        for one in flood:
            one.close()


@pytest.mark.parametrize("path", [CHAT, "/nowhere"])
async def test_a_body_with_two_lengths_is_refused_and_nothing_behind_it_is_read(path: str) -> None:
    """Where a proxy goes by the length, the second request is part of the first one's body (RFC 9112, 6.1)."""
    body = orjson.dumps({"messages": HELLO, "max_tokens": 1})
    chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    behind = b"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
    head = b"POST %s HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n" % path.encode()
    for lengths, answers in ((b"content-length: %d\r\n" % len(chunked + behind), 1), (b"", 2)):
        async with running(FakeEngine()) as parkd, connected(parkd) as stream:
            await stream.send(head + lengths + b"\r\n" + chunked + behind)
            said = b""
            with anyio.fail_after(10):
                while said.count(b"HTTP/1.1 ") < answers or not said.endswith((b"}", b"\r\n0\r\n\r\n")):
                    said += await stream.receive()
            if lengths:
                assert await is_closed(stream)
                assert said.startswith(b"HTTP/1.1 400" if path == CHAT else b"HTTP/1.1 404")
                assert path != CHAT or b"so where it ends is ambiguous" in said
            assert said.count(b"HTTP/1.1 ") == answers
