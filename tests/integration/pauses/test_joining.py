"""Turns that would read the same: one reads it, the others go on from there, and each answers as if it were alone."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from parkd.config import ProxyConfig
from parkd.errors import EngineFailure
from parkd.lane.schedule import Job
from parkd.lane.turn_runner import START_LIMIT
from parkd.store.records import ConversationGone
from tests.fakes.engine import FakeEngine
from tests.fakes.seats import FakeSeats
from tests.integration.api.api_harness import Gate, Messages, Running, body_of, running, until
from tests.integration.pauses.pause_kit import Pauser, PausesOne

pytestmark = pytest.mark.anyio
ENDLESS = 1 << 40
HISTORY: Messages = [
    {"role": "system", "content": "You are one of several workers. " * 12},
    {"role": "user", "content": "The history that all of them know. " * 24},
    {"role": "assistant", "content": "It is known."},
]
SEEDED: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 9}


class GivesWay(PausesOne):
    """Pauses the first turn at each chunk and token if there is another one to run."""

    def until_s(self, running: Job, others: Sequence[Job], now_s: float) -> float | None:
        return super().until_s(running, others, now_s) if others else None


def worker(name: str, words: int = 4) -> Messages:
    return [*HISTORY, {"role": "user", "content": f"{name} has a task of its own. " * words}]


@asynccontextmanager
async def over(engine: FakeSeats, **settings: Any) -> AsyncIterator[Running]:
    async with running(engine, answer_bytes=0, **settings) as server:  # type: ignore[arg-type]
        # The fake engine reads faster than memory is copied; a model does not.
        server.server.proxy.costs.note_read = lambda *_: None  # type: ignore[method-assign]
        yield server


def read_tokens(engine: FakeSeats) -> int:
    return sum(fake.read_tokens for fake in engine.fakes)


def common(server: Running, one: Messages, other: Messages) -> int:
    pairs = zip(server.prompt_tokens(one), server.prompt_tokens(other), strict=False)
    return next(at for at, (a, b) in enumerate(pairs) if a != b)


async def cold(*asked: Messages, max_tokens: int = 8, **fields: Any) -> list[str]:
    """What an engine answers that serves one of these at a time, and keeps nothing."""
    async with running(FakeEngine(end_odds=ENDLESS), answer_bytes=0) as server:
        alone = {"max_tokens": max_tokens, "cache_prompt": False}
        return [(await server.chat(each, **{**fields, **alone})).text for each in asked]


async def cold_by_seed(messages: Messages, seeds: range) -> list[str]:
    async with running(FakeEngine(end_odds=ENDLESS), answer_bytes=0) as server:
        asked = [{**SEEDED, "seed": seed, "cache_prompt": False} for seed in seeds]
        return [(await server.chat(messages, **each)).text for each in asked]


async def ask_at_once(server: Running, gate: Gate, *asked: Messages, **fields: Any) -> list[str]:
    """The first begins to read, then the others come; all go on once all are there."""
    first = asyncio.create_task(server.chat(asked[0], **fields))
    await gate.wait_reached()
    others = [asyncio.create_task(server.chat(each, **fields)) for each in asked[1:]]
    lane = server.server.proxy.lane
    await until(lambda: lane.waiting + len(lane.running_turns) == len(asked))
    gate.opened.set()
    return [(await each).text for each in (first, *others)]


@pytest.mark.parametrize("has_own_threads", [False, True])
@pytest.mark.parametrize("fixed_bytes", [0, 64], ids=["rows", "hybrid"])
async def test_answers_to_one_prompt_are_made_beside_each_other_and_it_is_read_once(
    fixed_bytes: int, has_own_threads: bool
) -> None:
    """`n` of chat: also more answers than seats."""
    ask = worker("anna")
    expected = await cold_by_seed(ask, range(5, 11))
    assert len(set(expected)) == 6
    engine = FakeSeats(4, end_odds=ENDLESS, fixed_bytes=fixed_bytes, batch_tokens=64, has_own_threads=has_own_threads)
    async with over(engine) as server:
        body = body_of(ask, **SEEDED, n=6, stream=True, stream_options={"include_usage": True})
        async with server.client.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = [line async for line in response.aiter_lines() if line]
        prompt = len(server.prompt_tokens(ask))
        await server.settled()
        assert read_tokens(engine) == prompt - 1
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line[6:]) for line in lines[:-1]]
    texts, ends = [""] * 6, list[int]()
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        texts[choice["index"]] += choice["delta"].get("content") or ""
        ends += [choice["index"]] if choice["finish_reason"] else []
    assert (texts, sorted(ends)) == (expected, list(range(6)))
    assert [chunk["usage"] for chunk in chunks if chunk.get("usage")] == [chunks[-1]["usage"]]
    assert (chunks[-1]["usage"]["prompt_tokens"], chunks[-1]["usage"]["completion_tokens"]) == (prompt, 54)


async def test_a_document_of_several_answers_has_them_in_order() -> None:
    async with over(FakeSeats(3, end_odds=ENDLESS)) as server:
        body = {"prompt": "Once upon a time " * 30, **SEEDED, "n": 3}
        document = (await server.client.post("/v1/completions", json=body)).json()
    assert [choice["index"] for choice in document["choices"]] == [0, 1, 2]
    async with running(FakeEngine(end_odds=ENDLESS)) as server:
        for seed, choice in zip((5, 6, 7), document["choices"], strict=True):
            alone = await server.client.post("/v1/completions", json={**body, "n": 1, "seed": seed})
            assert alone.json()["choices"][0]["text"] == choice["text"]


async def test_one_answer_of_several_that_fails_ends_them_all() -> None:
    failing = [True]

    def hook_of(number: int) -> Callable[[str, int], None]:
        def hook(step: str, _position: int) -> None:
            if number == 2 and step == "token" and failing[0]:
                raise EngineFailure("broken")

        return hook

    engine = FakeSeats(3, hook_of=hook_of, end_odds=ENDLESS)
    async with over(engine) as server:
        ask = worker("anna")
        failed = await server.client.post(
            "/v1/chat/completions", json=body_of(ask, **{**SEEDED, "max_tokens": 5000}, n=3)
        )
        assert (failed.status_code, failed.json()["error"]["message"]) == (500, "broken")
        await server.settled()
        failing[0] = False
        assert [(await server.chat(ask, **SEEDED)).text] == await cold_by_seed(ask, range(5, 6))


async def test_other_requests_have_places_beside_many_answers() -> None:
    """A queue for one: a second answer waits in it, the third is asked for when there is room."""
    ask = worker("anna")
    engine = FakeSeats(2, end_odds=ENDLESS)
    async with over(engine, config=ProxyConfig(max_queue=1)) as server:
        document = (await server.client.post("/v1/chat/completions", json=body_of(ask, **SEEDED, n=4))).json()
    texts = [choice["message"]["content"] for choice in document["choices"]]
    assert texts == await cold_by_seed(ask, range(5, 9))


@pytest.mark.parametrize("fixed_bytes", [0, 64], ids=["rows", "hybrid"])
async def test_a_history_that_several_send_at_once_is_read_once(fixed_bytes: int) -> None:
    asked = [worker(name) for name in ("anna", "ben", "carla", "dora")]
    gate = Gate("chunk", 3)
    engine = FakeSeats(4, hook=gate, end_odds=ENDLESS, fixed_bytes=fixed_bytes, batch_tokens=64)
    async with over(engine) as server:
        said = await ask_at_once(server, gate, *asked, max_tokens=30)
        await server.settled()
        page = (await server.client.get("/metrics")).text
        assert "parkd_joined_total 0.0" not in page
        first, *lengths = [len(server.prompt_tokens(each)) for each in asked]
        shared = [common(server, asked[0], each) for each in asked[1:]]
        boundary = common(server, asked[0], [*HISTORY, {"role": "system", "content": "x"}])
        if fixed_bytes:  # up to the last message, where the first one takes a checkpoint
            assert 0 < min(shared) - boundary < 16
            assert read_tokens(engine) <= first - 1 + sum(n - 1 - boundary + 8 for n in lengths)
        else:
            assert read_tokens(engine) == first - 1 + sum(n - 1 - at for n, at in zip(lengths, shared, strict=True))
        assert server.store is not None
        stats = server.store.stats()
        assert stats.kept_tokens_total >= 4 * (min(shared) // 256 * 256), "what all share is stored once"
        assert stats.blocks <= math.ceil(first / 256) + 3 * 2
    assert said == await cold(*asked, max_tokens=30)


async def test_who_waits_begins_once_the_common_part_is_read_not_the_whole_prompt() -> None:
    order: list[str] = []
    gate = Gate("chunk", 2)

    def hook_of(number: int) -> Callable[[str, int], None]:
        def hook(step: str, position: int) -> None:
            order.append(f"{number} {step}")
            gate(step, position)
            time.sleep(0.004 if step == "chunk" else 0)  # so that a turn has time to begin beside it

        return hook

    engine = FakeSeats(2, hook_of=hook_of, end_odds=ENDLESS, batch_tokens=64)
    async with over(engine) as server:
        long, short = worker("anna", 80), worker("ben")
        said = await ask_at_once(server, gate, long, short)
        assert len(server.prompt_tokens(long)) > 2 * len(server.prompt_tokens(short))
    assert "1 token" in order
    assert order.index("1 token") < order.index("0 token")
    assert said == await cold(long, short)


async def test_whoever_reads_leaves_and_the_others_go_on_from_there() -> None:
    gate = Gate("chunk", 5)
    engine = FakeSeats(2, hook=gate, end_odds=ENDLESS, batch_tokens=64)
    async with over(engine, config=ProxyConfig(resend_grace_s=0)) as server:
        lane = server.server.proxy.lane
        first, other = worker("anna"), worker("ben")
        gone = asyncio.create_task(server.chat(first))
        await gate.wait_reached()
        stays = asyncio.create_task(server.chat(other))
        await until(lambda: lane.waiting == 1)
        gone.cancel()
        reader = lane.running
        assert reader is not None
        await until(reader.channel.cancel.is_set)
        gate.opened.set()
        assert [(await stays).text] == await cold(other)
        await server.settled()
        assert read_tokens(engine) <= len(server.prompt_tokens(other)) - 1 + 64, "a chunk may be read meanwhile"


async def test_nobody_is_paused_for_one_that_waits_for_its_prompt() -> None:
    """One seat: if the reader gave way, the other would read what it was about to read."""
    gate = Gate("chunk", 2)
    engine = FakeSeats(1, hook=gate, end_odds=ENDLESS, batch_tokens=64)
    async with over(engine) as server:
        server.server.proxy.lane.schedule = GivesWay()
        asked = worker("anna", 30), worker("ben", 30)
        said = await ask_at_once(server, gate, *asked, max_tokens=20)
        await server.settled()
        one, other = (len(server.prompt_tokens(each)) for each in asked)
        assert read_tokens(engine) == one - 1 + other - 1 - common(server, *asked)
    assert said == await cold(*asked, max_tokens=20)


@pytest.mark.parametrize("mode", ["read", "off"])
async def test_nobody_waits_for_what_is_not_kept(mode: str) -> None:
    gate = Gate("chunk", 2)
    engine = FakeSeats(2, hook=gate, end_odds=ENDLESS, batch_tokens=64)
    async with over(engine) as server:
        lane = server.server.proxy.lane
        body = body_of(worker("anna"))
        headers = {"x-parkd-cache-mode": mode}
        first = asyncio.create_task(server.client.post("/v1/chat/completions", json=body, headers=headers))
        await gate.wait_reached()
        other = asyncio.create_task(server.chat(worker("ben")))
        await until(lambda: len(lane.running_turns) == 2)
        gate.opened.set()
        await first
        assert [(await other).text] == await cold(worker("ben"))
        await server.settled()
        assert read_tokens(engine) == sum(len(server.prompt_tokens(worker(name))) - 1 for name in ("anna", "ben"))


@pytest.mark.parametrize("error", [lambda: EngineFailure("broken"), lambda: RuntimeError("no such kernel")])
async def test_what_cannot_be_parked_for_another_harms_nobody(error: Callable[[], Exception]) -> None:
    gate, failing = Gate("chunk", 2), [True]

    def hook(step: str, position: int) -> None:
        gate(step, position)
        if step == "capture" and failing[0]:
            failing[0] = False
            raise error()

    engine = FakeSeats(2, hook=hook, end_odds=ENDLESS, batch_tokens=64)
    async with over(engine) as server:
        asked = worker("anna"), worker("ben")
        said = await ask_at_once(server, gate, *asked, max_tokens=60)
        await server.settled()
        assert not failing[0]
        again = [(await server.chat(each)).text for each in asked]
    assert again == await cold(*asked)
    assert said == await cold(*asked, max_tokens=60)


async def test_without_room_to_park_each_reads_for_itself() -> None:
    gate = Gate("chunk", 2)
    engine = FakeSeats(2, hook=gate, end_odds=ENDLESS, batch_tokens=64)
    async with over(engine, budget_bytes=1 << 12) as server:
        asked = worker("anna"), worker("ben")
        assert await ask_at_once(server, gate, *asked) == await cold(*asked)


async def test_in_the_order_of_arrival_nobody_goes_before_one_that_waits_for_a_prompt() -> None:
    gate = Gate("chunk", 2)
    engine = FakeSeats(2, hook=gate, end_odds=ENDLESS, batch_tokens=64)
    async with over(engine, config=ProxyConfig(schedule="fifo")) as server:
        lane = server.server.proxy.lane
        asked = [worker("anna"), worker("ben"), [{"role": "user", "content": "Something else."}]]
        first = asyncio.create_task(server.chat(asked[0]))
        await gate.wait_reached()
        others = [asyncio.create_task(server.chat(asked[1]))]
        await until(lambda: lane.waiting == 1)
        others.append(asyncio.create_task(server.chat(asked[2])))
        await until(lambda: lane.waiting == 2)
        await anyio.sleep(0.02)
        assert len(lane.running_turns) == 1
        gate.opened.set()
        assert [(await each).text for each in (first, *others)] == await cold(*asked)


@pytest.mark.parametrize("fixed_bytes", [0, 64], ids=["rows", "hybrid"])
async def test_a_turn_whose_seat_is_emptied_by_a_pause_that_fails_reads_its_tokens_again(fixed_bytes: int) -> None:
    """An error that no engine should raise resets the seat; the answer went on from nothing."""
    captures = [0]

    def hook(step: str, _position: int) -> None:
        captures[0] += step == "capture"
        if step == "capture" and captures[0] in (2, 5):
            raise RuntimeError("no such kernel")

    async with running(FakeEngine(end_odds=ENDLESS, hook=hook, fixed_bytes=fixed_bytes), answer_bytes=0) as server:
        pauser = Pauser(server)
        answer = await server.chat(worker("anna"), max_tokens=20)
    assert pauser.pauses > 5
    assert [answer.text] == await cold(worker("anna"), max_tokens=20)


@pytest.mark.parametrize("times", [1, 2, 1000])
async def test_what_goes_before_it_is_leased_is_looked_for_again(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a turn beside it ends, and what it parks takes the place of its beginning."""
    engine = FakeSeats(1, end_odds=ENDLESS)
    async with over(engine) as server:
        await server.chat(worker("anna"))
        await server.chat([{"role": "user", "content": "Something else."}])
        await server.settled()
        assert server.store is not None
        lease, left = server.store.lease, [times]

        def lease_later(*asked: Any) -> Any:
            left[0] -= 1
            if left[0] >= 0:
                raise ConversationGone("it went")
            return lease(*asked)

        monkeypatch.setattr(server.store, "lease", lease_later)
        answer = await server.chat(worker("ben"))
        assert answer.cache == ("restored-ram" if times < START_LIMIT else "cold")
        assert [answer.text] == await cold(worker("ben"))
