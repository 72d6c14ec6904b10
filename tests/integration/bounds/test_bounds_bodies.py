"""What request bodies hold of memory is bounded together, whatever becomes of each."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anyio
import orjson
import pytest

from parkd.errors import QueueFull
from parkd.identity import lengths
from parkd.proxy import requests
from parkd.proxy.bodies import LARGE_BODY_BYTES, BodyRoom, MemoryReturn
from parkd.proxy.config import ProxyConfig
from tests.fakes.engine import FakeEngine
from tests.integration.api.api_harness import Gate, Running, body_of, running, until

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
LIMIT_BYTES = 20_000
LARGE = [{"role": "user", "content": "Large. ", "name": "x" * 12_000}]
"""Its text is small: what counts is what was sent."""
SMALL = [{"role": "user", "content": "Small."}]


def test_what_was_taken_is_given_back_once() -> None:
    room = BodyRoom(100, lambda: 7)
    with room.charge() as one, room.charge() as two:
        one.reach(60)
        one.reach(30)  # less than is held already
        two.reach(40)
        assert room.held_bytes == 100
        with pytest.raises(QueueFull, match="--max-queue-mib") as refused:
            two.reach(41)
        assert refused.value.retry_after_s == 7
        release = one.keep()
    assert room.held_bytes == 60
    release()
    release()
    assert room.held_bytes == 0
    with room.charge() as alone:
        alone.reach(1000)  # alone it is bounded by its own limit only
        assert room.held_bytes == 1000


def test_one_key_leaves_room_for_the_others() -> None:
    """Found by use 3: what one key sends, however much, refuses no other key's request."""
    room = BodyRoom(100, lambda: 7, owners=2)
    with room.charge("one") as first, room.charge("one") as second, room.charge("two") as other:
        first.reach(40)
        with pytest.raises(QueueFull, match="of this key hold"):
            second.check(11)
        with pytest.raises(QueueFull, match="of this key hold"):
            second.reach(11)
        second.reach(10)
        other.reach(50)
        assert room.held_bytes == 100
        with pytest.raises(QueueFull, match="Waiting requests hold"):
            other.reach(51)
    assert room.held_bytes == 0


@pytest.fixture
async def held() -> AsyncIterator[tuple[Running, Gate]]:
    """A server that reads a large body's prompt and does not go on."""
    gate = Gate("chunk")
    config = ProxyConfig(bodies_limit_bytes=LIMIT_BYTES)
    async with running(FakeEngine(hook=gate), config=config) as server, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: server.client.post(CHAT, json=body_of(LARGE)))
        await gate.wait_reached()
        yield server, gate
        gate.opened.set()


async def test_one_too_many_is_told_when_to_come_back_and_others_are_not(held: tuple[Running, Gate]) -> None:
    server, gate = held
    refused = await server.client.post(CHAT, json=body_of(LARGE))
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
    assert int(refused.headers["retry-after"]) >= 1
    anthropic = await server.client.post("/v1/messages", json=body_of(LARGE))
    assert (anthropic.status_code, anthropic.json()["error"]["type"]) == (529, "overloaded_error")

    async def pieces() -> AsyncIterator[bytes]:
        """Of a length that is not told before."""
        for _ in range(20):
            yield b" " * 1000

    assert (await server.client.post(CHAT, content=pieces())).status_code == 503
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.chat, SMALL)
        await until(lambda: server.server.proxy.lane.waiting == 1)
        gate.opened.set()
    assert (await server.client.post(CHAT, json=body_of(LARGE))).status_code == 200
    assert server.server.proxy.bodies.held_bytes == 0


async def test_a_client_that_leaves_the_queue_takes_its_body_along(held: tuple[Running, Gate]) -> None:
    server, _ = held
    before = server.server.proxy.bodies.held_bytes
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.chat, SMALL)
        await until(lambda: server.server.proxy.lane.waiting == 1)
        assert server.server.proxy.bodies.held_bytes > before
        tasks.cancel_scope.cancel()
    await until(lambda: server.server.proxy.bodies.held_bytes == before)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (CHAT, body_of(SMALL), 200),
        (CHAT, body_of(SMALL, stream=True), 200),
        (CHAT, body_of([]), 400),
        (CHAT, body_of([{"role": "user", "content": "x" * 9000}]), 400),
        ("/v1/responses", {"input": "x" * 9000, "stream": True}, 200),
        ("/v1/messages/count_tokens", body_of(SMALL), 200),
        ("/tokenize", {"content": "x"}, 200),
        ("/apply-template", body_of(SMALL), 200),
    ],
)
async def test_whatever_the_answer_nothing_is_held_behind_it(path: str, body: dict[str, Any], status: int) -> None:
    async with running(FakeEngine()) as server:
        response = await server.client.post(path, json=body)
        assert response.status_code == status, response.text
        await until(lambda: server.server.proxy.bodies.held_bytes == 0)


@pytest.mark.parametrize(("path", "kind"), [(CHAT, b"invalid_request_error"), ("/v1/messages", b"timeout_error")])
async def test_a_body_that_stops_coming_gives_its_room_back(path: str, kind: bytes) -> None:
    """Only what has arrived is charged (found by use 3: four bodies that declared 64 MiB kept all others out)."""
    config = ProxyConfig(bodies_limit_bytes=LIMIT_BYTES, body_silence_s=0.3)
    async with running(FakeEngine(), config=config) as server:
        url, bodies = server.client.base_url, server.server.proxy.bodies
        head = f"POST {path} HTTP/1.1\r\nhost: {url.host}\r\ncontent-length: 19000\r\n\r\n{{"
        async with await anyio.connect_tcp(url.host, url.port or 80) as stalled:
            await stalled.send(head.encode())
            await until(lambda: bodies.held_bytes == 1)
            assert (await server.client.post(CHAT, json=body_of(LARGE))).status_code == 200
            with anyio.fail_after(10):
                refused = await stalled.receive()
        assert refused.startswith(b"HTTP/1.1 408 ")
        assert kind in refused
        await until(lambda: bodies.held_bytes == 0)
        assert (await server.client.post(CHAT, json=body_of(LARGE))).status_code == 200


async def test_a_body_that_drips_is_given_up_as_one_that_stops() -> None:
    config = ProxyConfig(body_silence_s=0.5)
    async with running(FakeEngine(), config=config) as server:
        url, refused = server.client.base_url, bytearray()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: {url.host}\r\ncontent-length: 19000\r\n\r\n"
        async with await anyio.connect_tcp(url.host, url.port or 80) as stream, anyio.create_task_group() as tasks:

            async def drip() -> None:
                await stream.send(head.encode())
                for _ in range(200):
                    await stream.send(b" ")
                    await anyio.sleep(0.05)

            tasks.start_soon(drip)
            with anyio.fail_after(5):
                refused += await stream.receive()
            tasks.cancel_scope.cancel()
        assert refused.startswith(b"HTTP/1.1 408 ")
        assert b"bytes a second" in refused
        await until(lambda: server.server.proxy.bodies.held_bytes == 0)


async def test_a_slow_body_that_goes_on_is_read() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        body = orjson.dumps(body_of(LARGE))
        for start in range(0, len(body), 1000):
            yield body[start : start + 1000]
            await anyio.sleep(0.05)

    async with running(FakeEngine(), config=ProxyConfig(body_silence_s=0.3)) as server:
        assert (await server.client.post(CHAT, content=pieces())).status_code == 200


async def test_a_body_of_very_many_values_is_refused_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "MOST_VALUES", 1000)
    async with running(FakeEngine()) as server:
        long = [{"role": "user", "content": "Long. ", "name": "x" * 12_000}]
        assert (await server.client.post(CHAT, json=body_of(long))).status_code == 200
        for many in ([[]] * 600, [{}] * 600, [1] * 1200):
            refused = await server.client.post(CHAT, json=body_of(SMALL, many=many))
            assert refused.status_code == 413
            assert "commas and brackets" in refused.json()["error"]["message"]
        few = await server.client.post(CHAT, json=body_of(SMALL, many=[[]] * 400))
        assert few.status_code == 200


async def test_a_turn_taken_over_holds_its_body_until_its_answer_is_out() -> None:
    gate = Gate("chunk")
    async with running(FakeEngine(hook=gate), config=ProxyConfig(resend_grace_s=5)) as server:
        bodies = server.server.proxy.bodies
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.chat, LARGE)
            await gate.wait_reached()
            tasks.cancel_scope.cancel()
        await until(lambda: len(server.server.proxy.resends) == 1)
        assert bodies.held_bytes > 12_000
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.chat, LARGE)
            await until(lambda: server.server.proxy.resends.joined == 1)
            assert 12_000 < bodies.held_bytes < 24_000
            gate.opened.set()
        await until(lambda: bodies.held_bytes == 0)


@pytest.mark.parametrize(
    ("path", "field", "said"),
    [
        (CHAT, "messages", b"context_length_exceeded"),
        ("/v1/completions", "prompt", b"context_length_exceeded"),
        ("/v1/messages", "messages", b"prompt is too long: "),
        ("/v1/messages/count_tokens", "messages", b"prompt is too long: "),
        ("/v1/responses", "input", b"context_length_exceeded"),
        ("/tokenize", "content", b"context_length_exceeded"),
    ],
)
async def test_a_text_far_beyond_the_context_is_an_overflow_and_is_never_tokenised_whole(
    path: str, field: str, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lengths, "LEAST_CHARS", 1000)
    monkeypatch.setattr(lengths, "PIECE_CHARS", 100)
    engine, longest = FakeEngine(), [0]
    encode = engine.tokenizer.encode

    def watched(text: str) -> list[int]:
        longest[0] = max(longest[0], len(text))
        return encode(text)

    async with running(engine) as server:
        monkeypatch.setattr(engine.tokenizer, "encode", watched)
        text = "x" * 200_000
        value = [{"role": "user", "content": text}] if field == "messages" else text
        answer = await server.client.post(path, json={field: value, "max_tokens": 8, "stream": True})
        assert answer.status_code == (200 if path == "/v1/responses" else 400), "Responses tell it in the stream"
        assert said in answer.content
        assert longest[0] <= 100


@pytest.mark.parametrize("path", [CHAT, "/v1/messages/count_tokens", "/tokenize", "/apply-template"])
async def test_memory_is_returned_behind_a_large_body_however_it_ended(path: str) -> None:
    async with running(FakeEngine()) as server:
        asked: list[str] = []
        server.server.proxy._memory_return = MemoryReturn(lambda: asked.append("return"), delay_s=0.05)
        await server.client.post(path, content=b"x" * 1000)
        await server.client.post(path, content=b"x" * LARGE_BODY_BYTES)
        await server.client.post(path, json={"x": "x" * LARGE_BODY_BYTES, "content": "x", **body_of(SMALL)})
        await until(lambda: len(asked) > 0)
        assert server.server.proxy.bodies.held_bytes == 0


async def test_several_that_ask_for_memory_to_be_returned_are_one() -> None:
    asked: list[str] = []
    returns = MemoryReturn(lambda: asked.append("return"), delay_s=0.05)
    for expected in (1, 2):
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                returns.ask(tasks)
        assert len(asked) == expected
