"""A client that loses its connection and sends the same request again finds its turn where it left it: report 40."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import anyio
import httpx
import pytest

from parkd.proxy.config import ProxyConfig
from parkd.types import NamedKey
from tests.fakes.engine import FakeEngine
from tests.integration.api.api_harness import Gate, Messages, Running, body_of, read_stream, running, until

pytestmark = pytest.mark.anyio
ASK: Messages = [{"role": "user", "content": "Tell me. " * 50}]
GRACE = ProxyConfig(resend_grace_s=20.0)


async def dropped(server: Running, gate: Gate, headers: dict[str, str] | None = None, **more: Any) -> None:
    """Asks, and leaves once the engine is at the gate."""
    body = body_of(ASK, stream=True, max_tokens=12, **more)
    async with httpx.AsyncClient(base_url=server.url, trust_env=False) as client:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:

                async def ask() -> None:
                    async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
                        await response.aread()

                tasks.start_soon(ask)
                await gate.wait_reached()
                scope.cancel()
    await until(lambda: len(server.server.proxy.resends) == 1)


async def test_the_same_request_takes_over_and_reads_all_of_the_answer() -> None:
    gate = Gate("token", nth=4)
    async with running(FakeEngine(hook=gate), config=GRACE) as server:
        alone = FakeEngine()
        async with running(alone) as other:
            expected = await other.chat(ASK, max_tokens=12)
        await dropped(server, gate)
        body = body_of(ASK, stream=True, max_tokens=12)
        async with server.client.stream("POST", "/v1/chat/completions", json=body) as response:
            gate.opened.set()
            answer = await read_stream(response)
        assert answer.text == expected.text
        assert server.server.proxy.resends.joined == 1
        assert server.engine.read_tokens == alone.read_tokens, "nothing was read twice"
        await server.settled()
        assert server.engine.transfers == alone.transfers


async def test_another_request_or_key_does_not() -> None:
    gate = Gate("token", nth=2)
    keys = (NamedKey("anna", "k1", "team"), NamedKey("ben", "k2", "team"))
    config = ProxyConfig(resend_grace_s=20.0, named_keys=keys)
    async with running(FakeEngine(hook=gate), config=config) as server, anyio.create_task_group() as tasks:
        await dropped(server, gate, {"x-api-key": "k1"})
        for key, changes in (("k2", {}), ("k1", {"seed": 1})):
            body = body_of(ASK, stream=True, **{"max_tokens": 12, **changes})
            tasks.start_soon(
                lambda body=body, key=key: server.client.post(
                    "/v1/chat/completions", json=body, headers={"x-api-key": key}
                )
            )
        await until(lambda: server.server.proxy.lane.waiting == 2)
        assert server.server.proxy.resends.joined == 0
        gate.opened.set()


async def test_after_the_grace_time_the_turn_is_given_up() -> None:
    gate = Gate("token", nth=2)
    async with running(FakeEngine(hook=gate), config=ProxyConfig(resend_grace_s=0.05)) as server:
        await dropped(server, gate)
        running_turn = server.server.proxy.lane.running
        assert running_turn is not None
        await until(running_turn.channel.cancel.is_set)
        gate.opened.set()
        await server.settled()
        assert running_turn.timings.output_tokens < 12


async def test_with_others_waiting_it_is_given_up_at_once() -> None:
    gate = Gate("token", nth=2)
    async with running(FakeEngine(hook=gate), config=GRACE) as server, anyio.create_task_group() as tasks:
        body = body_of(ASK, stream=True, max_tokens=12)
        async with httpx.AsyncClient(base_url=server.url, trust_env=False) as client:
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as inner:
                    inner.start_soon(lambda: client.post("/v1/chat/completions", json=body))
                    await gate.wait_reached()
                    running_turn = server.server.proxy.lane.running
                    tasks.start_soon(lambda: server.client.post("/v1/chat/completions", json=body_of(ASK, 2)))
                    await until(lambda: server.server.proxy.lane.waiting == 1)
                    scope.cancel()
        assert running_turn is not None
        await until(running_turn.channel.cancel.is_set)
        gate.opened.set()


async def test_who_comes_while_a_left_turn_is_in_its_grace_does_not_wait_for_it() -> None:
    """Found by use 31: who waits was looked at only when the client left, so a new message waited out the grace."""
    gate = Gate("token", nth=2)
    async with running(FakeEngine(hook=gate), config=GRACE) as server, anyio.create_task_group() as tasks:
        await dropped(server, gate)
        left = server.server.proxy.lane.running
        assert left is not None
        assert not left.channel.cancel.is_set()
        tasks.start_soon(lambda: server.client.post("/v1/chat/completions", json=body_of(ASK, 2)))
        await until(left.channel.cancel.is_set)
        assert len(server.server.proxy.resends) == 0
        gate.opened.set()


async def test_a_left_turn_does_not_begin_while_others_wait() -> None:
    """Found by use 31: a turn whose client left while it waited ran for its grace, though others waited behind it."""
    gate = Gate("token", nth=2)
    config = replace(GRACE, schedule="fifo")
    async with running(FakeEngine(hook=gate), config=config) as server, anyio.create_task_group() as tasks:
        proxy = server.server.proxy
        tasks.start_soon(lambda: server.client.post("/v1/chat/completions", json=body_of(ASK, 4)))
        await gate.wait_reached()
        async with httpx.AsyncClient(base_url=server.url, trust_env=False) as client:
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as inner:
                    inner.start_soon(lambda: client.post("/v1/chat/completions", json=body_of(ASK, 12, seed=1)))
                    await until(lambda: proxy.lane.waiting == 1)
                    scope.cancel()
        await until(lambda: len(proxy.resends) == 1)
        (left,) = proxy.resends._alone
        tasks.start_soon(lambda: server.client.post("/v1/chat/completions", json=body_of(ASK, 2, seed=2)))
        await until(lambda: proxy.lane.waiting == 2)
        assert not left.channel.cancel.is_set(), "while it waits, its client may come back"
        gate.opened.set()
        await until(left.channel.cancel.is_set)
        await server.settled()
        assert left.timings.output_tokens == 0


async def test_a_request_that_only_python_calls_equal_does_not_take_over() -> None:
    """Found by use 13: `{"n": true}` got the answer to `{"n": 1}`."""
    gate = Gate("token", nth=4)
    async with running(FakeEngine(hook=gate), config=GRACE) as server:
        await dropped(server, gate, chat_template_kwargs={"n": 1})
        gate.opened.set()
        body = body_of(ASK, stream=True, max_tokens=12, chat_template_kwargs={"n": True})
        assert (await server.client.post("/v1/chat/completions", json=body)).status_code == 200
        assert server.server.proxy.resends.joined == 0
