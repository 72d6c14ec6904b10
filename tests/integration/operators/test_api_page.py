"""The page and what it reads: `/`, `/parkd/now`, `/parkd/events`, `/parkd/budget`."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.routing import Route

from parkd.errors import QueueFull
from parkd.lane import disk_worker
from parkd.ledger.ledger import Ledger
from parkd.proxy.config import ProxyConfig
from parkd.proxy.page.events import FIRST_LISTENERS, LISTENERS, LISTENERS_PER_KEY, STEP_S, Listeners
from parkd.store.files.disk_jobs import ReadJob, RunAll
from parkd.store.files.fs import FileSystem
from parkd.types import NamedKey
from tests.fakes.engine import FakeEngine
from tests.integration.api.api_harness import Gate, Running, body_of, running, running_in_thread, until
from tests.integration.api.disk_harness import running_on

pytestmark = pytest.mark.anyio
LONG = [{"role": "user", "content": "A long question. " * 200}]
KEYS = ProxyConfig(
    named_keys=(NamedKey("anna", "k1", "team"), NamedKey("ben", "k2", "team"), NamedKey("carl", "k3")),
    operator_keys=("op",),
)
BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


async def now(server: Running, name: str = "none") -> dict[str, Any]:
    response = await server.client.get("/parkd/now", headers=key(name))
    assert response.status_code == 200, response.text
    return dict(response.json())


@asynccontextmanager
async def listening(server: Running, name: str = "none") -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    async with server.client.stream("GET", "/parkd/events", headers=key(name)) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")

        async def states() -> AsyncIterator[dict[str, Any]]:
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    yield json.loads(line[6:])

        yield states()


async def test_a_browser_gets_the_page_and_a_program_what_it_always_got() -> None:
    async with running(FakeEngine(), config=KEYS) as server:
        page = await server.client.get("/", headers=BROWSER)
        assert page.headers["content-type"].startswith("text/html")
        assert "script-src 'self'" in page.headers["content-security-policy"]
        assert page.headers["x-frame-options"] == "DENY"
        assert "Accept" in page.headers["vary"]
        script = await server.client.get("/parkd/page/main.js")
        assert (script.status_code, script.headers["x-content-type-options"]) == (200, "nosniff")
        for headers in ({}, {"accept": "*/*"}, {"accept": "application/json"}):
            assert (await server.client.get("/", headers=headers)).json()["name"] == "parkd"
        assert (await server.client.get("/api/hello", headers=BROWSER)).json()["name"] == "parkd"
        assert (await server.client.get("/parkd/page/none.js")).status_code == 404
        assert (await server.client.head("/", headers=BROWSER)).content == b""


async def test_found_by_use_an_unknown_field_of_a_query_is_refused_everywhere(tmp_path: Path) -> None:
    """It was passed over, so that a mistyped `limit` gave another answer than was asked for."""
    with closing(Ledger(tmp_path / "ledger.sqlite3")) as ledger:
        async with running(FakeEngine(), ledger=ledger) as server:
            app: Any = server.server.config.app
            routes = [route for route in app.routes if isinstance(route, Route)]
            own = [route for route in routes if route.path.startswith("/parkd/")]
            assert len(own) > 12
            for route in own:
                path = re.sub(r"\{.*?\}", "x", route.path)
                for method in (route.methods or set()) - {"HEAD"}:
                    refused = await server.client.request(method, f"{path}?limits=5", headers={"x-parkd-action": "1"})
                    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "limits"), path
            for taken in ("turns?limit=5&since=1d", "bill?since=1d", "budget?ram_mib=64", "now", "conversations"):
                assert (await server.client.get(f"/parkd/{taken}")).status_code == 200, taken
            twice = await server.client.get("/parkd/turns?limit=5&limit=6")
            assert (twice.status_code, twice.json()["error"]["param"]) == (400, "limit")
            assert (await server.client.get("/slots?fail_on_no_slot=1")).status_code == 200, "of llama-server's clients"


def test_found_by_use_a_few_keys_do_not_shut_all_others_out_of_the_events() -> None:
    listeners = Listeners()
    with ExitStack() as held:
        for number in range(LISTENERS):
            held.enter_context(listeners.place(f"key {number // LISTENERS_PER_KEY}"))
        for owner in ("key 0", f"key {LISTENERS // LISTENERS_PER_KEY - 1}"):
            with pytest.raises(QueueFull):
                listeners.check(owner)
        for number in range(FIRST_LISTENERS):
            held.enter_context(listeners.place(f"other {number}"))
        for owner in ("other 0", "another"):
            with pytest.raises(QueueFull):
                listeners.check(owner)
    assert len(listeners) == 0


async def test_without_a_page_a_browser_gets_json_and_the_data_stay() -> None:
    async with running(FakeEngine(), config=ProxyConfig(has_page=False)) as server:
        assert (await server.client.get("/", headers=BROWSER)).json()["name"] == "parkd"
        assert (await server.client.get("/parkd/page/main.js")).status_code == 404
        assert (await now(server))["state"] == "ok"


@pytest.mark.parametrize("path", ["/parkd/now", "/parkd/events", "/parkd/budget"])
async def test_what_the_page_reads_asks_for_a_key_and_refuses_other_origins(path: str) -> None:
    async with running(FakeEngine(), config=KEYS) as server:
        assert (await server.client.get(path)).status_code == 401
        assert (await server.client.get(path, headers=key("wrong"))).status_code == 401
        foreign = key("op") | {"origin": "https://evil.example"}
        assert (await server.client.get(path, headers=foreign)).status_code == 403
        rebound = key("op") | {"host": "evil.example"}
        assert (await server.client.get(path, headers=rebound)).status_code == 403
        assert (await server.client.get("/", headers=BROWSER | {"host": "evil.example"})).status_code == 403


async def test_a_running_turn_tells_how_far_it_is() -> None:
    gate, tokens = Gate("chunk", 3), Gate("token", 4)

    def hook(name: str, number: int) -> None:
        gate(name, number)
        tokens(name, number)

    async with running(FakeEngine(hook=hook, end_odds=10**9)) as server, anyio.create_task_group() as tasks:
        tasks.start_soon(server.chat, LONG)
        await gate.wait_reached()
        length = len(server.prompt_tokens(LONG))
        await until(lambda: server.server.proxy.lane.running.explained.progress.read_tokens == 1024)  # type: ignore[union-attr]
        tasks.start_soon(server.chat, [{"role": "user", "content": "Another"}])
        await until(lambda: server.server.proxy.lane.waiting == 1)
        shown = await now(server)
        [turn], [waits] = shown["running"], shown["waiting"]
        assert (turn["phase"], turn["prompt_tokens"], turn["cache"]) == ("reading", length, "cold")
        assert (turn["reading"]["read_tokens"], turn["reading"]["total_tokens"]) == (1024, length - 1)
        assert turn["reading"]["tokens_per_s"] > 0
        assert turn["reading"]["left_s"] >= 0
        assert (waits["place"], waits["request_id"] != turn["request_id"]) == (1, True)
        gate.opened.set()
        await tokens.wait_reached()
        [turn] = (await now(server))["running"]
        assert turn["phase"] == "answering"
        assert turn["answer"]["tokens"] == 3
        assert turn["answer"]["limit_tokens"] == 8
        tokens.opened.set()
        await server.settled()
        shown = await now(server)
        assert (shown["running"], shown["waiting"]) == ([], [])
        [seat] = shown["seats"]
        assert seat["tokens"] > 0
        assert shown["budget"]["conversations"] == 2


async def test_a_key_is_told_of_its_own_turns_only() -> None:
    """Found by use 1: of what another key said no text, no size and no place is shown."""
    gate = Gate("token", 2)
    async with running(FakeEngine(hook=gate), config=KEYS) as server, anyio.create_task_group() as tasks:

        async def ask(name: str) -> None:
            await server.client.post("/v1/chat/completions", json=body_of(LONG), headers=key(name))

        tasks.start_soon(ask, "k1")
        await gate.wait_reached()
        tasks.start_soon(ask, "k2")
        await until(lambda: server.server.proxy.lane.waiting == 1)
        mine, mates, others, all_ = [await now(server, name) for name in ("k1", "k2", "k3", "op")]
        assert [len(shown["running"]) for shown in (mine, mates, others, all_)] == [1, 0, 0, 1]
        assert [len(shown["waiting"]) for shown in (mine, mates, others, all_)] == [0, 1, 0, 1]
        assert mates["waiting"][0]["place"] is None
        assert all_["waiting"][0]["place"] == 1
        assert [shown["budget"] is None for shown in (mine, mates, others, all_)] == [True, True, True, False]
        gate.opened.set()
    # The seat is anna's and ben's same prompt by now; carl, in another namespace, is told of none.


async def test_found_by_use_a_seat_is_told_to_whom_it_belongs_while_its_turn_runs() -> None:
    """A seat that were gone when another key had run would tell that it did."""
    apart = replace(KEYS, named_keys=(*KEYS.named_keys, NamedKey("dora", "k4")))
    gates = {name: Gate("token", nth) for name, nth in (("k4", 2), ("k3", 6))}

    def hook(name: str, number: int) -> None:
        for gate in gates.values():
            gate(name, number)

    async with (
        running(FakeEngine(hook=hook, end_odds=1 << 40), config=apart) as server,
        anyio.create_task_group() as tasks,
    ):
        said = [{"role": "user", "content": "Mine alone. " * 60}]
        post, names = server.client.post, ("k1", "k3", "k4", "op")

        async def seats() -> dict[str, int]:
            told = {name: (await now(server, name))["seats"] for name in names}
            return {name: shown[0]["tokens"] for name, shown in told.items() if shown}

        for who in ("k4", "k3"):
            body = body_of(said, 4)
            tasks.start_soon(lambda body=body, who=who: post("/v1/chat/completions", json=body, headers=key(who)))
            await gates[who].wait_reached()
            told = await seats()
            assert set(told) == {who, "op"}
            assert told[who] == told["op"] >= len(server.prompt_tokens(said)) - 1
            gates[who].opened.set()
            await server.settled()
            assert set(await seats()) == {"op"}


async def test_events_tell_each_new_state_once() -> None:
    gate = Gate("token", 2)
    async with running(FakeEngine(hook=gate)) as server, listening(server) as states:
        first = await anext(states)
        assert (first["state"], first["running"]) == ("ok", [])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.chat, LONG)
            await gate.wait_reached()
            with anyio.fail_after(10):
                while not (state := await anext(states))["running"]:
                    pass
            assert state["running"][0]["prompt_tokens"] == len(server.prompt_tokens(LONG))
            gate.opened.set()
        await server.settled()
        with anyio.fail_after(10):
            while (state := await anext(states))["running"]:
                pass
        with anyio.move_on_after(4 * STEP_S) as silence:
            await anext(states)
        assert silence.cancelled_caught, "nothing changed, and an event came"


async def test_whoever_asks_for_the_headers_of_events_gets_them_alone() -> None:
    async with running(FakeEngine()) as server:
        with anyio.fail_after(5):
            head = await server.client.head("/parkd/events")
            assert (head.status_code, head.content) == (200, b"")
            assert head.headers["content-type"].startswith("text/event-stream")
            assert (await now(server))["state"] == "ok"  # on the same connection


async def test_a_listener_does_not_hold_up_a_stop() -> None:
    began_s = 0.0
    async with running(FakeEngine()) as server, listening(server) as states:
        await anext(states)
        server.server.should_exit = True
        began_s = time.monotonic()
        with anyio.fail_after(10):
            last = [state async for state in states][-1]
        assert last["state"] == "stopping"
    assert time.monotonic() - began_s < 5


async def test_a_key_has_so_many_listeners_and_others_have_theirs() -> None:
    async with running(FakeEngine(), config=KEYS) as server, anyio.create_task_group() as tasks:
        listening_now = anyio.Event()
        count = 0

        async def listen() -> None:
            nonlocal count
            async with listening(server, "k1") as states:
                await anext(states)
                count += 1
                if count == LISTENERS_PER_KEY:
                    listening_now.set()
                await anyio.sleep_forever()

        for _ in range(LISTENERS_PER_KEY):
            tasks.start_soon(listen)
        await listening_now.wait()
        refused = await server.client.get("/parkd/events", headers=key("k1"))
        assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
        async with listening(server, "k3") as states:
            assert (await anext(states))["state"] == "ok"
        tasks.cancel_scope.cancel()
    async with running(FakeEngine(), config=KEYS) as server:
        for _ in range(2 * LISTENERS_PER_KEY):  # places are given back
            async with listening(server, "k1") as states:
                await anext(states)


async def test_a_client_that_floods_the_events_and_reads_none_slows_no_turn() -> None:
    """Each flooding connection asks again and again, and never reads. Turns take as long as before."""
    async with running(FakeEngine(end_odds=10**9), send_buffer_bytes=4096) as server:

        async def turn_s() -> float:
            began_s = time.monotonic()
            await server.stream(LONG, max_tokens=200)
            return time.monotonic() - began_s

        await turn_s()
        quiet_s = min([await turn_s() for _ in range(3)])
        host, port = server.url.removeprefix("http://").split(":")
        asked = f"GET /parkd/events HTTP/1.1\r\nhost: {host}:{port}\r\n\r\n".encode()
        async with anyio.create_task_group() as tasks:

            async def flood() -> None:
                stream = await anyio.connect_tcp(host, int(port))
                async with stream:
                    await stream.send(asked)
                    await anyio.sleep_forever()

            for _ in range(2 * LISTENERS_PER_KEY):
                tasks.start_soon(flood)
            await anyio.sleep(2 * STEP_S)
            flooded_s = min([await turn_s() for _ in range(3)])
            health = await server.client.get("/health")
            assert health.status_code == 200
            tasks.cancel_scope.cancel()
        assert flooded_s < 3 * quiet_s + 0.5


async def test_the_budget_adds_up_and_plans() -> None:
    async with running(FakeEngine()) as server:
        await server.chat(LONG)
        await server.settled()
        store = server.store
        assert store is not None
        shown = (await server.client.get("/parkd/budget?ram_mib=1")).json()
        stats = store.stats()
        assert sum(part["bytes"] for part in shown["ram"]["parts"]) == stats.bytes_allocated
        [parked] = [each.position for each in store.inspect().conversations.values()]
        [fits] = shown["holds"]["fits"]
        assert (fits["tokens"], shown["lengths_are_seen"]) == (parked, True)
        assert 0 < fits["more"] < fits["conversations"]
        assert shown["what_if"]["budget_bytes"] == 1 << 20
        assert shown["what_if"]["fits"][0]["conversations"] < fits["conversations"]
        assert "what_if" not in (await server.client.get("/parkd/budget")).json()
        for wrong in ("-1", "1.5", "x", "", "1e3", str(1 << 40), "٣"):
            assert (await server.client.get("/parkd/budget", params={"ram_mib": wrong})).status_code == 400, wrong


async def test_a_key_may_plan_and_is_told_of_nothing_that_is_held() -> None:
    async with running(FakeEngine(), config=KEYS) as server:
        await server.client.post("/v1/chat/completions", json=body_of(LONG), headers=key("k1"))
        await server.settled()
        before = (await server.client.get("/parkd/budget?ram_mib=9", headers=key("k2"))).json()
        await server.client.post("/v1/chat/completions", json=body_of(LONG * 3), headers=key("k1"))
        await server.settled()
        after = (await server.client.get("/parkd/budget?ram_mib=9", headers=key("k2"))).json()
        assert before == after, "another key's turn changed what this one is told"
        assert (after["ram"], after["process"], after["refusals"]) == (None, None, [])
        assert after["what_if"]["fits"][0]["conversations"] > 0
        assert (await server.client.get("/parkd/budget", headers=key("op"))).json()["ram"]["conversations"] > 0


async def test_a_read_from_disk_tells_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In the log and to an operator: of two calls, one of nothing and one that waits, half has ended."""
    opened, read = threading.Event(), disk_worker.read

    def slow(fs: FileSystem, job: ReadJob, run_all: RunAll) -> None:
        def held(calls: Sequence[Callable[[], None]]) -> None:
            def all_of_it() -> None:
                assert opened.wait(20)
                for call in calls:
                    call()

            run_all([lambda: None, all_of_it])

        read(fs, job, held)

    monkeypatch.setattr(disk_worker, "read", slow)
    monkeypatch.setattr(disk_worker, "PROMOTION_LINE_S", 0.02)
    caplog.set_level(logging.INFO, "parkd")
    async with running_on(tmp_path / "park") as server:
        first = await server.chat(LONG)
    async with running_on(tmp_path / "park") as server, anyio.create_task_group() as tasks:
        tasks.start_soon(server.chat, [*LONG, {"role": "assistant", "content": first.text}, *LONG])
        with anyio.fail_after(10):
            while not (told := (await now(server))["from_disk"]) or not told["read_bytes"]:
                pass
        assert told["total_bytes"] > 3000 * server.engine.info.layout.row_bytes
        assert told["read_bytes"] == told["total_bytes"] // 2
        assert (await now(server))["running"][0]["phase"] == "starting"
        lines = [
            record.getMessage() for record in caplog.records if "reading a conversation from disk" in record.message
        ]
        assert any("left" in line for line in lines)
        opened.set()
        await server.settled()
        assert (await now(server))["from_disk"] is None


def test_whatever_is_asked_of_what_the_page_reads_is_answered() -> None:
    """Paths, queries and headers at random: nothing but 200 and 4xx, and the server answers afterwards."""
    texts = st.text(st.characters(codec="utf-8"), max_size=30)
    with running_in_thread(FakeEngine()) as server, httpx.Client(base_url=server.url, trust_env=False) as client:

        @settings(max_examples=150, deadline=None)
        @given(
            st.sampled_from(["/", "/parkd/now", "/parkd/budget", "/parkd/page/"]),
            texts,
            st.dictionaries(st.sampled_from(["ram_mib", "since", "x"]), texts, max_size=2),
            st.sampled_from(["accept", "accept-encoding", "if-none-match", "authorization", "x-request-id"]),
            st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=30),
        )
        def ask(path: str, more: str, query: dict[str, str], name: str, value: str) -> None:
            whole = path + (httpx.URL("/", params={"q": more}).query.decode()[2:] if path.endswith("page/") else "")
            response = client.get(whole, params=query, headers={name: value.strip()})
            assert response.status_code in (200, 304, 400, 401, 404), (whole, query, response.text)

        ask()
        assert client.get("/parkd/now").status_code == 200
