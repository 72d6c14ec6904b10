"""Turns that are paused, over the engine of arithmetic: answers, counts, what is left in the store, how they end."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from parkd.errors import EngineLost
from parkd.lane.reading import ChunkEnd
from parkd.proxy.config import ProxyConfig
from parkd.proxy.dialects.nested import CACHE_MODE_HEADER as HEADER
from parkd.store.records import Tier
from tests.fakes.engine import FakeEngine
from tests.fakes.opaque import FakeOpaqueEngine
from tests.integration.api.api_harness import Gate, Messages, Running, body_of, fail_at, running, until
from tests.integration.api.disk_harness import running_on
from tests.integration.lives.life_dialects import DIALECTS
from tests.integration.lives.life_talks import Ask
from tests.integration.pauses.pause_kit import NOISE, Pauser, post, steady

pytestmark = pytest.mark.anyio

A1: Messages = [
    {"role": "system", "content": "You park conversations."},
    {"role": "user", "content": "A server holds one conversation in memory. " * 30},
]
ENGINES = {
    "rows": lambda: FakeEngine(batch_tokens=256),
    "fixed": lambda: FakeEngine(batch_tokens=256, fixed_bytes=64),
    "opaque": lambda: FakeOpaqueEngine(batch_tokens=256),
    "opaque-fixed": lambda: FakeOpaqueEngine(batch_tokens=256, fixed_bytes=64),
}


async def answer(engine: FakeEngine, body: dict[str, Any]) -> dict[str, Any]:
    """Of a turn that is never paused."""
    async with running(engine) as server:
        return await post(server, body)


@pytest.mark.parametrize("kind", ENGINES)
async def test_every_boundary(kind: str) -> None:
    body = body_of(A1, 20, temperature=1, seed=7, logprobs=True, top_logprobs=3)
    expected = await answer(ENGINES[kind](), body)
    async with running(ENGINES[kind]()) as server:
        pauser = Pauser(server, noise=NOISE)
        document = await post(server, body)
        assert steady(document) == steady(expected)
        chunks = -(-document["usage"]["prompt_tokens"] // 256)
        tokens = document["usage"]["completion_tokens"]
        assert pauser.pauses >= chunks + tokens - 3
        assert document["timings"]["pauses"] == pauser.pauses
        await server.settled()
        again = await post(server, body)
        assert again["timings"]["cache_n"] == document["usage"]["prompt_tokens"] - 1
        assert steady(again)["choices"] == steady(expected)["choices"]


def keepers(server: Running) -> int:
    """Conversations that the store keeps for paused turns."""
    assert server.store is not None
    return sum(each.keepers for each in server.store.table.all())


async def test_the_state_may_be_gone_when_the_turn_goes_on() -> None:
    """Then its tokens are read again, and the answer goes on where it was."""
    body = body_of(A1, 12)
    expected = await answer(FakeEngine(batch_tokens=256), body)
    engine = FakeEngine(batch_tokens=256)
    async with running(engine) as server:

        async def lose() -> None:
            assert server.store is not None
            for each in server.store.table.all():
                server.store.drop(each.id, "a test took it")

        pauser = Pauser(server, noise=NOISE, between=lose)
        document = await post(server, body)
        assert steady(document) == steady(expected)
        assert pauser.pauses > 10
        assert engine.read_tokens > 10 * document["usage"]["prompt_tokens"]


async def test_damaged_state_is_not_gone_on_from() -> None:
    body = body_of(A1, 12)
    expected = await answer(FakeEngine(batch_tokens=256), body)
    async with running(FakeEngine(batch_tokens=256)) as server:
        damaged = 0

        async def damage() -> None:
            nonlocal damaged
            assert server.store is not None
            for each in server.store.table.all():
                with server.store.lease(each.id, each.parked.position) as lease:
                    buffer = lease.transfer.stages[0].rows[0].buffer
                    buffer.flags.writeable = True
                    buffer[0] ^= 1
                    damaged += 1

        Pauser(server, noise=NOISE, between=damage)
        assert steady(await post(server, body)) == steady(expected)
        assert damaged
        assert server.server.proxy.metrics.restore_failures._value.get() > 10


@pytest.mark.parametrize("mode", ["off", "read"])
@pytest.mark.parametrize("kind", ["rows", "fixed"])
async def test_a_turn_that_keeps_nothing_leaves_nothing(kind: str, mode: str) -> None:
    body = body_of(A1, 12)
    expected = await answer(ENGINES[kind](), body)
    async with running(ENGINES[kind]()) as server:
        pauser = Pauser(server, noise=NOISE)
        assert steady(await post(server, body, **{HEADER: mode})) == steady(expected)
        assert pauser.pauses > 10
        await server.settled()
        assert server.store is not None
        assert len(server.store.table.all()) == 1  # the noise
        assert (await server.chat(A1)).cache == "cold"


async def test_nobody_finds_what_a_turn_that_keeps_nothing_parks_meanwhile() -> None:
    async with running(FakeEngine(batch_tokens=256)) as server:
        pauser = Pauser(server, lambda boundary: boundary == 8, noise=A1)
        await post(server, body_of(A1, 12), **{HEADER: "off"})
        assert pauser.pauses == 1
        starts = server.server.proxy.metrics.starts
        assert starts.labels("cold")._value.get() == 2


async def test_a_client_that_leaves_while_its_turn_is_paused() -> None:
    gate = Gate("chunk", 7)
    async with running(FakeEngine(batch_tokens=256, hook=gate)) as server:
        pauser = Pauser(server, lambda boundary: boundary == 8, noise=NOISE)
        lane = server.server.proxy.lane
        async with server.client.stream("POST", "/v1/chat/completions", json=body_of(A1, 50, stream=True)) as response:
            assert response.status_code == 200
            await gate.wait_reached()  # the noise is being read
            assert (pauser.pauses, lane.paused, keepers(server)) == (1, 1, 1)
        await until(lambda: lane.paused == 0)
        assert lane.busy
        gate.opened.set()
        await server.settled()
        assert keepers(server) == 0
        assert server.store is not None
        assert server.store.stats().leased == 0
        # What was computed stays a prefix of a later turn.
        assert (await server.chat(A1)).cache == "restored-ram"


async def test_a_turn_that_ends_in_its_pause_leaves_the_seat_to_the_other() -> None:
    gate = Gate("chunk", 7)
    async with running(FakeEngine(batch_tokens=256, hook=gate)) as server:
        Pauser(server, lambda boundary: boundary == 8, noise=NOISE)
        lane, body = server.server.proxy.lane, body_of(A1, 50, stream=True)
        async with server.client.stream("POST", "/v1/chat/completions", json=body, headers={HEADER: "off"}):
            await gate.wait_reached()
        await until(lambda: lane.paused == 0)
        gate.opened.set()
        await server.settled()
        assert (await server.chat(NOISE)).cache == "live"


async def test_it_is_not_paused_where_memory_has_no_room_for_it() -> None:
    body = body_of(A1, 12)
    expected = await answer(FakeEngine(batch_tokens=256), body)
    async with running(FakeEngine(batch_tokens=256), budget_bytes=32 * 1024) as server:
        pauser = Pauser(server, lambda boundary: boundary > 4)  # the prompt does not fit
        document = await post(server, body)
        assert steady(document) == steady(expected)
        assert pauser.boundaries > 10
        assert pauser.pauses == 0
        assert "pauses" not in document["timings"]


async def test_a_stream_is_kept_alive_and_sees_nothing_of_its_pause() -> None:
    body = body_of(A1, 12, stream=True, stream_options={"include_usage": True})
    async with running(FakeEngine(batch_tokens=256)) as server:
        unbroken = await server.stream(A1, max_tokens=12)
    config = ProxyConfig(keep_alive_s=0.02)
    async with running(FakeEngine(batch_tokens=256), config=config) as server:

        async def rest() -> None:
            await asyncio.sleep(0.5)

        pauser = Pauser(server, lambda boundary: boundary == 10, noise=NOISE, between=rest)
        async with server.client.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = [line async for line in response.aiter_lines()]
        assert pauser.pauses == 1
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        first = next(at for at, line in enumerate(lines) if '"content":"' in line)
        assert [line for line in lines[first:] if line.startswith(":")], "a silent stream is kept alive"
        text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
        assert text == unbroken.text
        timings = next(chunk["timings"] for chunk in chunks if "timings" in chunk)
        assert timings["pauses"] == 1
        assert timings["paused_ms"] >= 500
        assert timings["predicted_ms"] < timings["paused_ms"]


@pytest.mark.parametrize("deadline_s", [20.0, 0.05])
async def test_the_server_stops_while_a_turn_is_paused(deadline_s: float) -> None:
    """It goes on if it can end in time; otherwise it is cut like one that runs."""
    gate = Gate("chunk", 7)
    config = ProxyConfig(shutdown_deadline_s=deadline_s)
    expected = (await answer(FakeEngine(batch_tokens=256), body_of(A1, 12)))["choices"][0]["message"]["content"]
    async with running(FakeEngine(batch_tokens=256, hook=gate), config=config) as server:
        pauser = Pauser(server, lambda boundary: boundary == 8, noise=NOISE)
        asked = asyncio.create_task(server.client.post("/v1/chat/completions", json=body_of(A1, 12)))
        await gate.wait_reached()
        assert pauser.pauses == 1
        server.server.should_exit = True
        await until(lambda: server.server.proxy.lane.closed)
        if deadline_s < 1:
            await until(lambda: server.server.proxy.lane.paused == 0)
        gate.opened.set()
        response = await asked
        if deadline_s < 1:
            assert response.status_code == 503
        else:
            assert response.json()["choices"][0]["message"]["content"] == expected
        assert keepers(server) == 0


async def test_an_engine_that_is_lost_meanwhile_fails_both() -> None:
    hook = fail_at("chunk", 7, lambda: EngineLost("The device is gone."))
    async with running(FakeEngine(batch_tokens=256, hook=hook)) as server:
        pauser = Pauser(server, lambda boundary: boundary == 8, noise=NOISE)
        with pytest.raises(AssertionError, match="gone"):
            await post(server, body_of(A1, 12))
        assert pauser.pauses == 1
        assert server.server.proxy.lost is not None
        assert keepers(server) == 0


@pytest.mark.parametrize("name", DIALECTS)
async def test_streams_of_every_dialect(name: str) -> None:
    """A client makes the same of a stream that was paused at every boundary."""
    dialect, words = DIALECTS[name], "Some words, and ünïcödé: 媽🤗. " * 2
    body = dialect.body(Ask(A1, max_tokens=40, streams=True, dialect=name))
    heard = []
    for pauses in (False, True):
        async with running(FakeEngine(batch_tokens=256, script=lambda _prompt: words)) as server:
            pauser = Pauser(server, noise=NOISE) if pauses else None
            response = await server.client.post(dialect.path, json=body, timeout=60)
            assert response.status_code == 200, response.text
            heard.append(dialect.from_stream(response.content))
            if pauser is not None:
                assert pauser.pauses > 30
    assert heard[0] == heard[1]


async def test_steering_is_that_of_the_turn_again() -> None:
    engines = [FakeEngine(batch_tokens=256, steering={"calm": 0.0}) for _ in range(2)]
    body = body_of(A1, 20, steering={"calm": 2.0})
    expected = await answer(engines[0], body)
    async with running(engines[1]) as server:
        Pauser(server, noise=NOISE)
        assert steady(await post(server, body)) == steady(expected)


async def test_state_that_went_to_disk_meanwhile(tmp_path: Path) -> None:
    body = body_of(A1, 16)
    expected = await answer(FakeEngine(batch_tokens=256, fixed_bytes=64), body)
    engine = FakeEngine(batch_tokens=256, fixed_bytes=64)
    async with running_on(tmp_path, engine) as server:

        async def push_out() -> None:
            store = server.store
            assert store is not None
            await until(lambda: not store.has_writes)
            for each in list(store.table.in_ram.values()):
                store.table.evict(each, "a test")
            assert all(each.parked.tier is Tier.DISK for each in store.table.all())

        pauser = Pauser(server, noise=NOISE, between=push_out)
        assert steady(await post(server, body)) == steady(expected)
        assert pauser.pauses > 16
        assert server.store is not None
        assert server.store.disk_stats().reads_total >= pauser.pauses
        assert engine.read_tokens < 3 * expected["usage"]["prompt_tokens"], "only the noise is read again"


async def test_nothing_is_copied_back_if_nobody_took_the_seat() -> None:
    engine = FakeEngine(batch_tokens=256)
    async with running(engine) as server:
        pauser = Pauser(server)
        await post(server, body_of(A1, 12))
        assert pauser.pauses > 12
    assert [move for move in engine.transfers if move[0] == "restore"] == []


async def test_an_engine_that_cannot_pause_runs_a_turn_to_its_end() -> None:
    engine = FakeEngine(batch_tokens=256)
    engine.info = replace(engine.info, can_pause=False)
    async with running(engine) as server:
        pauser = Pauser(server, noise=NOISE)
        await post(server, body_of(A1, 12))
        assert pauser.boundaries == pauser.pauses == 0


def test_a_pause_ends_no_chunk_inside() -> None:
    """Engines that look at the flag inside a chunk would read it again, and get nowhere in short slices."""
    cancel, pause = threading.Event(), threading.Event()
    end = ChunkEnd(cancel, pause)
    pause.set()
    assert not end.is_set()
    end.passed()
    assert end.is_set()
    cancel.set()
    assert ChunkEnd(cancel, threading.Event()).is_set()
