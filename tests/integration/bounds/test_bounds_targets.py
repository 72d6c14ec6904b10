"""Requests whose target is a whole address, and clients that close their sending side behind a request."""

from __future__ import annotations

import socket

import anyio.to_thread
import orjson
import pytest

from parkd.proxy.config import ProxyConfig
from tests.fakes.engine import FakeEngine
from tests.integration.api.api_harness import Gate, Running, body_of, running, until

pytestmark = pytest.mark.anyio
HELLO = [{"role": "user", "content": "Hello there"}]
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def connected(server: Running) -> socket.socket:
    url = server.client.base_url
    return socket.create_connection((url.host, url.port or 80), timeout=20)


def request(target: str, body: bytes = b"", host: str = "127.0.0.1", version: str = "1.1") -> bytes:
    method = "POST" if body else "GET"
    return f"{method} {target} HTTP/{version}\r\nhost: {host}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def all_of(one: socket.socket) -> bytes:
    got = b""
    while piece := one.recv(1 << 16):
        got += piece
    return got


async def told(server: Running, sent: bytes) -> bytes:
    """What a client gets that closes its sending side at once."""
    with connected(server) as one:
        one.sendall(sent)
        one.shutdown(socket.SHUT_WR)
        return await anyio.to_thread.run_sync(all_of, one)


def final(got: bytes) -> bytes:
    while got.startswith(CONTINUE):
        got = got.removeprefix(CONTINUE)
    return got


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        ("/v1/models", "127.0.0.1", b"200"),
        ("http://127.0.0.1:8080/v1/models", "127.0.0.1", b"200"),
        ("HTTP://localhost/v1/models?limit=3", "elsewhere", b"200"),
        ("http://user@127.0.0.1/v1%2Fmodels", "127.0.0.1", b"200"),
        ("http://127.0.0.1", "127.0.0.1", b"200"),
        ("http://127.0.0.1?x=1", "127.0.0.1", b"200"),
        ("http://127.0.0.1/v1/nothing", "127.0.0.1", b"404"),
        ("http://elsewhere/v1/models", "127.0.0.1", b"403"),  # the target's host counts, as if it had been the header
        ("/http://127.0.0.1/v1/models", "127.0.0.1", b"404"),
    ],
)
async def test_found_by_use_an_absolute_target_is_its_path(target: str, host: str, status: bytes) -> None:
    async with running(FakeEngine()) as server:
        assert final(await told(server, request(target, host=host))).split(b" ")[1] == status


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("stream", [False, True])
async def test_found_by_use_a_client_that_only_closes_its_sending_side_is_answered(version: str, stream: bool) -> None:
    """It is told to go on waiting, and then what anybody is told; an older one nothing before the answer."""
    gate = Gate("chunk")
    async with running(FakeEngine(hook=gate)) as server:
        expected = ""
        body = orjson.dumps(body_of(HELLO, stream=stream))
        with connected(server) as one:
            one.sendall(request("/v1/chat/completions", body, version=version))
            one.shutdown(socket.SHUT_WR)
            await gate.wait_reached()
            await anyio.sleep(0.5)  # longer than it takes to notice one that left
            gate.opened.set()
            got = await anyio.to_thread.run_sync(all_of, one)
        assert got.startswith(CONTINUE) is (version == "1.1")
        assert final(got).startswith(b"HTTP/1.1 200")
        expected = (await server.chat(HELLO)).text
    if stream:
        assert got.rstrip().endswith(b"[DONE]") or b"data: [DONE]" in got
    else:
        assert orjson.loads(got.rpartition(b"\r\n\r\n")[2])["choices"][0]["message"]["content"] == expected


@pytest.mark.parametrize("stream", [False, True])
async def test_one_that_leaves_before_its_answer_still_ends_its_turn_soon(stream: bool) -> None:
    gate = Gate("chunk")
    config = ProxyConfig(resend_grace_s=0.0)
    async with running(FakeEngine(hook=gate), config=config) as server:
        with connected(server) as one:
            one.sendall(request("/v1/chat/completions", orjson.dumps(body_of(HELLO, stream=stream))))
            await gate.wait_reached()
        turn = server.server.proxy.lane.running
        assert turn is not None
        with anyio.fail_after(1.0):
            await until(turn.channel.cancel.is_set)
        gate.opened.set()


async def test_half_a_request_and_an_end_close_the_connection() -> None:
    async with running(FakeEngine()) as server:
        sent = request("/v1/chat/completions", orjson.dumps(body_of(HELLO)))
        for cut in (0, 10, len(sent) - 1):
            assert await told(server, sent[:cut]) == b""
