"""The queue, clients that leave, slow clients, failures and the end of the server, over a real socket."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator

import anyio
import httpx
import pytest

from parkd.errors import EngineFailure, EngineLost
from parkd.lane import events
from parkd.proxy.config import ProxyConfig
from parkd.proxy.proxy import CUT_WAIT_S
from parkd.proxy.server import Server
from parkd.types import NamedKey
from tests.fakes.engine import FakeEngine
from tests.integration.api.api_harness import (
    Gate,
    Messages,
    Running,
    body_of,
    fail_at,
    make_services,
    read_stream,
    running,
    until,
)

pytestmark = pytest.mark.anyio


def prompt(name: str, characters: int = 600) -> Messages:
    return [{"role": "user", "content": (name * characters)[:characters]}]


async def test_a_client_that_hangs_up_in_prefill_leaves_its_prefix() -> None:
    """Reports 27 and 28: reading stops at the next chunk, and what was read is not read again."""
    gate = Gate("chunk", nth=3)
    engine = FakeEngine(batch_tokens=128, hook=gate)
    async with running(engine) as server:
        long = prompt("p", 3000)
        with anyio.move_on_after(10):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(server.stream, long)
                await gate.wait_reached()
                tasks.cancel_scope.cancel()
        await _turn_stopped(server)
        gate.opened.set()
        await server.settled()
        assert engine.position == 3 * 128
        again = await server.chat(long)
        assert again.reused == 3 * 128
        assert again.cache == "live"


async def test_what_was_read_before_a_hang_up_is_parked() -> None:
    gate = Gate("chunk", nth=3)
    engine = FakeEngine(batch_tokens=128, hook=gate)
    async with running(engine) as server:
        long = prompt("p", 3000)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.chat, long)
            await gate.wait_reached()
            tasks.cancel_scope.cancel()
        await _turn_stopped(server)
        gate.opened.set()
        await server.settled()
        await server.chat(prompt("q", 700))
        again = await server.chat(long)
        assert (again.cache, again.reused) == ("restored-ram", 3 * 128)


async def test_a_client_that_hangs_up_in_decode_stops_the_answer() -> None:
    """Report 41: nothing is generated for nobody; the tokens so far stay."""
    gate = Gate("token", nth=20)
    engine = FakeEngine(hook=gate, end_odds=10**9)
    async with running(engine) as server:
        messages = prompt("d")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: server.stream(messages, max_tokens=2000))
            await gate.wait_reached()
            tasks.cancel_scope.cancel()
        await _turn_stopped(server)
        gate.opened.set()
        await server.settled()
        assert engine.position == len(server.prompt_tokens(messages)) - 1 + 20
        assert server.server.proxy.lives[0].rows.position == engine.position


async def test_a_client_that_leaves_the_queue_never_runs() -> None:
    gate = Gate("chunk")
    engine = FakeEngine(hook=gate)
    async with running(engine) as server:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.chat, prompt("a"))
            await gate.wait_reached()
            async with anyio.create_task_group() as leaving:
                leaving.start_soon(server.chat, prompt("b"))
                await _waiting(server, 1)
                leaving.cancel_scope.cancel()
            await _waiting(server, 0)
            gate.opened.set()
        await server.settled()
        assert engine.read_tokens == len(server.prompt_tokens(prompt("a"))) - 1
        assert 'parkd_requests_total{outcome="cancelled"} 1.0' in (await server.client.get("/metrics")).text


async def test_a_full_queue_says_when_to_come_back() -> None:
    gate = Gate("chunk")
    async with running(FakeEngine(hook=gate), config=ProxyConfig(max_queue=1)) as server:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.chat, prompt("a"))
            await gate.wait_reached()
            tasks.start_soon(server.chat, prompt("b"))
            await _waiting(server, 1)
            refused = await server.client.post("/v1/chat/completions", json=body_of(prompt("c")))
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["code"] == "overloaded"
            gate.opened.set()
        assert (await server.chat(prompt("c"))).finish_reason in {"stop", "length"}


async def test_turns_run_in_the_order_they_came() -> None:
    gate = Gate("chunk")
    engine = FakeEngine(hook=gate)
    order: list[str] = []
    async with running(engine) as server:

        async def ask(name: str) -> None:
            await server.chat(prompt(name))
            order.append(name)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, "a")
            await gate.wait_reached()
            for place, name in enumerate("bcde", 1):
                tasks.start_soon(ask, name)
                await _waiting(server, place)
            gate.opened.set()
    assert order == list("abcde")


async def test_health_answers_while_a_prompt_is_read() -> None:
    gate = Gate("chunk")
    async with running(FakeEngine(hook=gate)) as server, anyio.create_task_group() as tasks:
        tasks.start_soon(server.chat, prompt("a"))
        await gate.wait_reached()
        with anyio.fail_after(2):
            health = await server.client.get("/health")
        assert health.json() == {"status": "ok", "waiting": 0, "busy": True}
        gate.opened.set()


async def test_a_stream_that_waits_says_pending_and_stays_alive() -> None:
    gate = Gate("chunk")
    config = ProxyConfig(first_byte_deadline_s=0.05, keep_alive_s=0.05)
    async with running(FakeEngine(hook=gate), config=config) as server, anyio.create_task_group() as tasks:
        tasks.start_soon(server.chat, prompt("a"))
        await gate.wait_reached()
        body = body_of(prompt("b"), stream=True, stream_options={"include_usage": True})
        async with server.client.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.headers["x-parkd-cache"] == "pending"
            lines = response.aiter_lines()
            with anyio.fail_after(10):
                alive = [line async for line in _first(lines, 3)]
            assert alive == [": keep-alive"] * 3
            gate.opened.set()
            rest = [json.loads(line[6:]) async for line in lines if line.startswith("data: {")]
        assert rest[0]["choices"][0]["delta"]["role"] == "assistant"
        assert rest[-1]["timings"]["cache"] in {"live", "cold"}
        assert rest[-1]["timings"]["wait_ms"] > 50


async def test_progress_does_not_silence_the_keep_alive() -> None:
    """Chunks of a long prompt are events, but no bytes: the client must hear something all the same."""
    slow = threading.Event()
    engine = FakeEngine(batch_tokens=64, hook=lambda name, _number: name == "chunk" and slow.wait(0.04))
    config = ProxyConfig(first_byte_deadline_s=5, keep_alive_s=0.1)
    async with running(engine, config=config) as server:
        body = body_of(prompt("a", 1200), stream=True)
        async with server.client.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.headers["x-parkd-cache"] == "cold"
            lines = [line async for line in response.aiter_lines()]
        assert lines.count(": keep-alive") >= 2


async def test_a_client_that_does_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "UNREAD_LIMIT_CHARACTERS", 2000)
    engine = FakeEngine(context_tokens=65536, end_odds=10**9)
    async with running(engine, send_buffer_bytes=4096) as server:
        body = json.dumps(body_of(prompt("s"), max_tokens=60000, stream=True)).encode()
        address = server.url.removeprefix("http://").split(":")
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
        with socket.socket() as mute:  # a plain socket, since an event loop's would read ahead
            mute.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            mute.connect((address[0], int(address[1])))
            mute.sendall(head.encode() + body)
            await until(lambda: server.server.proxy.lane.busy)
            await until(lambda: not server.server.proxy.lane.busy, 60)
        assert engine.position < 30000
        assert (await server.chat(prompt("other"))).text


async def test_an_engine_failure_is_that_requests_error_alone() -> None:
    engine = FakeEngine(hook=fail_at("token", 3, lambda: EngineFailure("The device ran out of memory.")))
    async with running(engine) as server:
        whole = await server.client.post("/v1/chat/completions", json=body_of(prompt("a")))
        assert whole.status_code == 500
        assert whole.json()["error"]["code"] == "engine_failure"
        again = await server.chat(prompt("a"))
        fresh = FakeEngine()
        async with running(fresh) as other:
            assert again.text == (await other.chat(prompt("a"))).text


async def test_a_failure_after_the_headers_is_an_error_in_the_stream() -> None:
    engine = FakeEngine(hook=fail_at("chunk", 2, lambda: ZeroDivisionError("a bug")), batch_tokens=64)
    async with running(engine) as server:
        body = body_of(prompt("a"), stream=True)
        async with server.client.stream("POST", "/v1/chat/completions", json=body) as response:
            answer = await read_stream(response)
        assert response.status_code == 200
        assert answer.chunks[-1]["error"]["type"] == "server_error"
        assert "ZeroDivisionError" not in json.dumps(answer.chunks)
        assert (await server.chat(prompt("a"))).text


async def test_a_lost_engine_fails_everyone_and_ends_the_process() -> None:
    gate = Gate("chunk")

    def hook(name: str, number: int) -> None:
        gate(name, number)
        if name == "chunk":
            raise EngineLost("The device is gone.")

    statuses: list[int] = []
    async with running(FakeEngine(hook=hook)) as server:

        async def ask(name: str) -> None:
            response = await server.client.post("/v1/chat/completions", json=body_of(prompt(name)))
            statuses.append(response.status_code)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, "a")
            await gate.wait_reached()
            for place, name in enumerate("bc", 1):
                tasks.start_soon(ask, name)
                await _waiting(server, place)
            gate.opened.set()
        assert statuses == [500, 500, 500]
        assert server.server.should_exit
        assert server.server.exit_code == 1


async def test_a_stop_lets_the_running_answer_end_and_refuses_those_that_wait() -> None:
    gate = Gate("token", nth=3)
    async with running(FakeEngine(hook=gate)) as server:
        statuses: dict[str, int] = {}

        async def ask(name: str) -> None:
            response = await server.client.post("/v1/chat/completions", json=body_of(prompt(name)))
            statuses[name] = response.status_code

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, "a")
            await gate.wait_reached()
            tasks.start_soon(ask, "b")
            await _waiting(server, 1)
            server.server.handle_exit(signal.SIGTERM, None)
            await _waiting(server, 0)
            gate.opened.set()
        assert statuses == {"a": 200, "b": 503}
    assert server.server.exit_code == 0


async def test_a_stop_cuts_an_answer_that_takes_too_long() -> None:
    engine = FakeEngine(context_tokens=65536, end_odds=10**9, hook=lambda name, _n: threading.Event().wait(0.005))
    async with running(engine, config=ProxyConfig(shutdown_deadline_s=0.2)) as server:
        body = body_of(prompt("a"), max_tokens=60000, stream=True)
        async with server.client.stream("POST", "/v1/chat/completions", json=body) as response:
            server.server.handle_exit(signal.SIGTERM, None)
            with anyio.fail_after(10):
                answer = await read_stream(response)
        assert answer.chunks[-1]["error"]["code"] == "shutting_down"
    assert server.server.exit_code == 0


def test_a_second_signal_does_not_wait_for_the_engines_running_call() -> None:
    """It waited five seconds for a chunk of a prompt."""
    gate = Gate("chunk")
    services, _ = make_services(FakeEngine(hook=gate))
    server = Server(services)
    process = threading.Thread(target=server.run, daemon=True)
    process.start()
    try:
        while not server.started:
            time.sleep(0.005)

        def ask() -> None:
            with contextlib.suppress(httpx.HTTPError):
                httpx.post(f"{server.url}/v1/chat/completions", json=body_of(prompt("a")), trust_env=False)

        threading.Thread(target=ask, daemon=True).start()
        assert gate.reached.wait(10)
        began_s = time.monotonic()
        server.handle_exit(signal.SIGINT, None)
        server.handle_exit(signal.SIGINT, None)
        process.join(4 * CUT_WAIT_S)
        assert time.monotonic() - began_s < CUT_WAIT_S / 2
    finally:
        gate.opened.set()


async def test_each_request_is_one_line_in_the_log_without_its_text(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="parkd.requests")
    async with running(FakeEngine()) as server:
        await server.chat([{"role": "user", "content": "secret words"}])
    [line] = [record.getMessage() for record in caplog.records if record.name == "parkd.requests"]
    assert re.fullmatch(r"key=- prompt=\d+ reused=0 cache=cold wait=\d+\.\ds ttft=\d+\.\ds out=\d+ why=-", line)
    assert "secret" not in caplog.text


async def test_each_refused_request_is_one_line_in_the_log_too(caplog: pytest.LogCaptureFixture) -> None:
    """Found by use 20."""
    caplog.set_level(logging.INFO, logger="parkd.requests")
    chat, long = "/v1/chat/completions", [{"role": "user", "content": "secret " * 9000}]
    config = ProxyConfig(named_keys=(NamedKey("anna", "k1"),))
    async with running(FakeEngine(), config=config) as server:
        key = {"authorization": "Bearer k1"}
        await server.client.post(chat, json={"messages": long})
        await server.client.post(chat, json={"messages": "secret"}, headers=key)
        await server.client.post(chat, json={"messages": long}, headers=key)
        await server.client.post("/v1/responses", json={"input": "secret " * 9000, "stream": True}, headers=key)
        await server.client.get("/v1/nothing")
        await server.client.get("/v1/nothing", headers=key)
        await server.client.get(chat, headers=key)
        await server.client.post("/parkd/conversations/one/pin", headers={**key, "origin": "http://elsewhere"})
        await server.client.get("/metrics", headers=key)
    assert [record.getMessage() for record in caplog.records if record.name == "parkd.requests"] == [
        "key=- refused=invalid_api_key status=401 POST '/v1/chat/completions'",
        "key=anna refused=invalid_request status=400 POST '/v1/chat/completions'",
        "key=anna refused=context_length_exceeded status=400 POST '/v1/chat/completions'",
        "key=anna refused=context_length_exceeded status=400 POST '/v1/responses'",
        "key=- refused=not_found status=404 GET '/v1/nothing'",
        "key=anna refused=not_found status=404 GET '/v1/nothing'",
        "key=anna refused=invalid_request status=405 GET '/v1/chat/completions'",
        "key=anna refused=forbidden status=403 POST '/parkd/conversations/one/pin'",
        "key=anna refused=forbidden status=403 GET '/metrics'",
    ]
    assert "secret" not in caplog.text


async def test_the_time_to_the_first_token_counts_from_the_arrival(caplog: pytest.LogCaptureFixture) -> None:
    """Found by use 34: a client counts the wait in the queue too."""
    caplog.set_level(logging.INFO, logger="parkd.requests")
    gate = Gate("chunk")
    async with running(FakeEngine(hook=gate)) as server, anyio.create_task_group() as tasks:
        tasks.start_soon(server.chat, [{"role": "user", "content": "First."}])
        await gate.wait_reached()
        tasks.start_soon(server.chat, [{"role": "user", "content": "Second."}])
        await until(lambda: server.server.proxy.lane.waiting == 1)
        await anyio.sleep(0.3)
        gate.opened.set()
    lines = [record.getMessage() for record in caplog.records if record.name == "parkd.requests"]
    wait_s, ttft_s = (float(part.partition("=")[2].rstrip("s")) for part in lines[1].split()[4:6])
    assert ttft_s >= wait_s >= 0.3


async def _first(lines: AsyncIterator[str], number: int) -> AsyncIterator[str]:
    """The first lines that are not blank."""
    async for line in lines:
        if line:
            yield line
            number -= 1
        if number == 0:
            return


async def _waiting(server: Running, number: int) -> None:
    await until(lambda: server.server.proxy.lane.waiting == number)


async def _turn_stopped(server: Running) -> None:
    """Returns once the running turn was told to stop."""
    running_turn = server.server.proxy.lane.running
    assert running_turn is not None
    await until(running_turn.channel.cancel.is_set)
