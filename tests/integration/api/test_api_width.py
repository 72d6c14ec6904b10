"""Several turns under way at once, over HTTP: each answers as if it were alone."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from parkd.config import ProxyConfig
from parkd.errors import EngineFailure, EngineLost
from parkd.lane import seating, turn_runner
from tests.fakes.engine import FakeEngine
from tests.fakes.seats import FakeSeats
from tests.integration.api.api_harness import Messages, Running, body_of, running, until

pytestmark = pytest.mark.anyio
ENDLESS = 1 << 40


def opening(name: str, repeats: int = 6) -> Messages:
    return [{"role": "user", "content": f"{name} asks for something of its own. " * repeats}]


def over(engine: FakeSeats, **settings: Any) -> Any:
    return running(engine, answer_bytes=0, **settings)  # type: ignore[arg-type]


async def cold(messages: Messages, max_tokens: int, end_odds: int = ENDLESS, **fields: Any) -> str:
    """What an engine answers that serves nobody else."""
    async with running(FakeEngine(end_odds=end_odds), answer_bytes=0) as server:
        return (await server.chat(messages, max_tokens=max_tokens, **fields)).text


class Meeting:
    """Lets a step pass only once so many seats are in one, or after `opened`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.at: set[int] = set()
        self.opened = threading.Event()

    def hook_of(self, number: int) -> Callable[[str, int], None]:
        def hook(step: str, _position: int) -> None:
            if step == self.name and not self.opened.is_set():
                self.at.add(number)
                assert self.opened.wait(20)

        return hook


@pytest.mark.parametrize("has_own_threads", [False, True])
async def test_turns_under_way_at_once_answer_as_alone(has_own_threads: bool) -> None:
    engine = FakeSeats(3, has_own_threads=has_own_threads, end_odds=ENDLESS)
    asked = {name: opening(name) for name in ("anna", "ben", "carla")}
    async with over(engine) as server:
        # long enough that the first still answers when the last begins, on a busy machine too
        answers = await asyncio.gather(*(server.stream(each, max_tokens=400) for each in asked.values()))
    for messages, answer in zip(asked.values(), answers, strict=True):
        assert answer.text == await cold(messages, 400)
    if not has_own_threads:
        assert {len(seats) for seats in engine.together} >= {3}


async def test_seats_with_threads_of_their_own_compute_at_the_same_time() -> None:
    meeting = Meeting("token")
    engine = FakeSeats(2, has_own_threads=True, hook_of=meeting.hook_of)
    async with over(engine) as server, anyio.create_task_group() as tasks:
        for name in ("anna", "ben"):
            tasks.start_soon(server.chat, opening(name))
        await until(lambda: meeting.at == {0, 1})
        meeting.opened.set()


async def test_a_prompt_is_read_between_the_steps_of_an_answer() -> None:
    """The short answer goes on while the long prompt is read, and the chunks come one by one."""
    seen: list[tuple[int, str]] = []
    engine = FakeSeats(
        2, hook_of=lambda number: lambda name, _at: seen.append((number, name)), batch_tokens=16, end_odds=ENDLESS
    )
    async with over(engine) as server, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: server.chat(opening("anna"), max_tokens=2000))
        await until(lambda: seen.count((0, "token")) > 20)
        began = len(seen)
        await server.chat(opening("ben", 60), max_tokens=1)
        tasks.cancel_scope.cancel()
    during = seen[began : seen.index((1, "token"))]
    assert during.count((1, "chunk")) > 20
    assert during.count((0, "token")) > 5


async def test_slots_and_now_show_all_that_are_under_way() -> None:
    meeting = Meeting("token")
    engine = FakeSeats(2, has_own_threads=True, hook_of=meeting.hook_of)
    async with over(engine) as server, anyio.create_task_group() as tasks:
        for name in ("anna", "ben", "carla"):
            tasks.start_soon(server.chat, opening(name))
        await until(lambda: meeting.at == {0, 1} and server.server.proxy.lane.waiting == 1)
        slots = (await server.client.get("/slots")).json()
        now = (await server.client.get("/parkd/now")).json()
        assert [slot["is_processing"] for slot in slots] == [True, True]
        assert len({slot["request"]["request_id"] for slot in slots}) == 2
        assert {turn["request_id"] for turn in now["running"]} == {slot["request"]["request_id"] for slot in slots}
        assert len(now["waiting"]) == 1
        meeting.opened.set()
    assert not server.server.proxy.runner.seats.turns


async def test_who_leaves_touches_nobody_else() -> None:
    engine = FakeSeats(2, end_odds=ENDLESS)
    async with over(engine) as server:
        async with anyio.create_task_group() as tasks:
            answers: list[str] = []

            async def ask() -> None:
                answers.append((await server.chat(opening("anna"), max_tokens=400)).text)

            tasks.start_soon(ask)
            with anyio.move_on_after(0.1):
                await server.chat(opening("ben"), max_tokens=7000)
            await until(lambda: len(server.server.proxy.lane.running_turns) < 2)
        assert answers == [await cold(opening("anna"), 400)]
        assert (await server.chat(opening("ben"), max_tokens=9)).text == await cold(opening("ben"), 9)


@pytest.mark.parametrize("name", ["token", "chunk", "capture"])
@pytest.mark.parametrize("error", [lambda: EngineFailure("broken"), lambda: RuntimeError("no such kernel")])
async def test_what_fails_in_one_seat_is_of_its_turn_alone(name: str, error: Callable[[], Exception]) -> None:
    failing = [True]

    def hook_of(number: int) -> Callable[[str, int], None]:
        def hook(step: str, _position: int) -> None:
            if number == 1 and step == name and failing[0]:
                raise error()

        return hook

    engine = FakeSeats(2, hook_of=hook_of, end_odds=ENDLESS)
    async with over(engine) as server:

        async def ask(who: str) -> tuple[int, str]:
            response = await server.client.post("/v1/chat/completions", json=body_of(opening(who), 200))
            return response.status_code, response.text

        first = asyncio.create_task(ask("anna"))
        await until(lambda: bool(server.server.proxy.lane.running_turns))
        other = await ask("ben")
        status, _ = await first
        assert (status, other[0]) == (200, 200 if name == "capture" else 500)
        await server.settled()
        failing[0] = False
        for who in ("anna", "ben"):
            assert (await server.chat(opening(who), max_tokens=40)).text == await cold(opening(who), 40)


async def test_a_lost_engine_ends_all() -> None:
    meeting = Meeting("token")

    def hook_of(number: int) -> Callable[[str, int], None]:
        met = meeting.hook_of(number)

        def hook(step: str, position: int) -> None:
            met(step, position)
            if step == "token" and number == 1:
                raise EngineLost("gone")

        return hook

    engine = FakeSeats(2, has_own_threads=True, hook_of=hook_of, end_odds=ENDLESS)
    async with over(engine) as server:

        async def ask(who: str) -> tuple[int, str]:
            response = await server.client.post("/v1/chat/completions", json=body_of(opening(who), 5000))
            return response.status_code, response.json()["error"]["message"]

        asked = [asyncio.create_task(ask(who)) for who in ("anna", "ben")]
        await until(lambda: meeting.at == {0, 1})
        meeting.opened.set()
        assert [await each for each in asked] == [(500, "gone")] * 2


async def test_turns_that_are_steered_otherwise_wait() -> None:
    meeting = Meeting("token")
    engine = FakeSeats(2, hook_of=meeting.hook_of, steering={"calm": 1.0}, end_odds=ENDLESS)
    async with over(engine) as server, anyio.create_task_group() as tasks:
        lane = server.server.proxy.lane
        tasks.start_soon(lambda: server.chat(opening("anna"), steering={"calm": 0.5}))
        await until(lambda: bool(meeting.at))
        tasks.start_soon(lambda: server.chat(opening("ben"), steering={"calm": 0.7}))
        await until(lambda: lane.waiting == 1)
        assert len(lane.running_turns) == 1
        meeting.opened.set()


async def test_rows_that_turns_may_come_to_need_are_bounded_together() -> None:
    """Their rows fit: at once. Those of a third would not: it waits for one to end, also if the seat is free."""
    meeting = Meeting("token")
    engine = FakeSeats(3, hook_of=meeting.hook_of, row_tokens=4096, end_odds=ENDLESS)
    async with over(engine) as server, anyio.create_task_group() as tasks:
        lane = server.server.proxy.lane
        tasks.start_soon(lambda: server.chat(opening("anna"), max_tokens=1500))
        await until(lambda: bool(meeting.at))
        tasks.start_soon(lambda: server.chat(opening("ben"), max_tokens=1500))
        await until(lambda: len(lane.running_turns) == 2)
        tasks.start_soon(lambda: server.chat(opening("carla"), max_tokens=1500))
        await until(lambda: lane.waiting == 1)
        await anyio.sleep(0.02)
        assert len(lane.running_turns) == 2
        meeting.opened.set()


@pytest.mark.parametrize(("schedule", "budget_bytes"), [("fair", 0), ("fair", 1 << 24), ("fifo", 1 << 24)])
async def test_answers_without_a_limit_run_beside_each_other_and_wait_for_rows_in_the_end(
    schedule: str, budget_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows together are less than two contexts: each began with the reserve of a whole one, so one ran after the
    other."""
    for module in (seating, turn_runner):
        monkeypatch.setattr(module, "ANSWER_TOKENS", 64)
    monkeypatch.setattr(turn_runner, "ROOM_STEP_S", 0.005)
    rows, context, most, at_once = 1280, 768, [0], [0]

    def hook(_step: str, _position: int) -> None:
        held = [fake.position for fake in engine.fakes if fake.is_held]
        most[0] = max(most[0], sum(-(-each // 256) * 256 for each in held))
        at_once[0] = max(at_once[0], len(held))

    settings: Any = {"context_tokens": context, "end_odds": ENDLESS}
    engine = FakeSeats(3, hook=hook, row_tokens=rows, **settings)
    asked = [opening(name, 2) for name in ("anna", "ben", "carla", "dora")]
    body = {"max_tokens": None}
    config = ProxyConfig(schedule=schedule)
    async with over(engine, budget_bytes=budget_bytes, config=config) as server:
        answers = await asyncio.gather(*(server.chat(each, **body) for each in asked))  # type: ignore[arg-type]
    assert at_once[0] == 3
    assert most[0] <= rows
    async with running(FakeEngine(**settings), answer_bytes=0) as server:
        alone = [await server.chat(each, **body) for each in asked]  # type: ignore[arg-type]
    assert [each.text for each in answers] == [each.text for each in alone]
    assert {each.usage["total_tokens"] for each in alone} == {context + 1}


async def ask_at_random(server: Running, rng: random.Random, talk: Messages, name: str, turns: int) -> None:
    """A client that talks, sometimes starts anew, and sometimes leaves; each answer is compared with a cold one."""
    for number in range(turns):
        await anyio.sleep(rng.choice([0, 0, 0.01, 0.05]))
        tokens = rng.choice([1, 7, 40, 150])
        fields: dict[str, Any] = {"temperature": 0.7, "seed": rng.randrange(1000)} if rng.random() < 0.4 else {}
        if rng.random() < 0.2:
            with anyio.move_on_after(rng.choice([0.0, 0.01, 0.03])):
                await server.chat([*talk], max_tokens=3000)
            continue
        ask = server.stream if rng.random() < 0.5 else server.chat
        answer = await ask(talk, max_tokens=tokens, **fields)
        assert answer.text == await cold(talk, tokens, 97, **fields), (name, number)
        if rng.random() < 0.3:
            talk = opening(f"{name} {number}", rng.randint(1, 40))
        else:
            talk = [*talk, {"role": "assistant", "content": answer.text}, {"role": "user", "content": "And then?"}]


@pytest.mark.parametrize("seed", range(6))
async def test_random_clients_are_answered_as_if_alone(seed: int) -> None:
    rng = random.Random(seed)
    seats = rng.randint(2, 4)
    fixed = rng.choice([0, 64])
    engine = FakeSeats(
        seats,
        has_own_threads=seed % 3 == 2,
        batch_tokens=rng.choice([32, 512]),
        row_tokens=rng.choice([0, 8192]),
        fixed_bytes=fixed,
    )
    budget = rng.choice([1 << 16, 1 << 24])
    schedule = rng.choice(["fair", "fifo"])
    async with over(engine, budget_bytes=budget, config=ProxyConfig(schedule=schedule)) as server:
        async with anyio.create_task_group() as tasks:
            for number in range(seats + 2):
                name = f"client {number}"
                tasks.start_soon(ask_at_random, server, random.Random(seed * 100 + number), opening(name), name, 5)
        await server.settled()
        assert server.store is not None
        stats = server.store.stats()
        assert stats.bytes_in_use <= stats.budget_bytes
        assert not server.server.proxy.runner.seats.turns
        for fake, live in zip(engine.fakes, server.server.proxy.lives, strict=True):
            assert (live.rows.position, live.seat.is_held) == (fake.position, False)
