"""A -> B -> A and its relatives: what is reused, and that answers are those of a conversation that never left."""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import count
from typing import Any

import anyio
import numpy as np
import pytest

from parkd.errors import EngineFailure, LogitsNotFinite, RestoreFailed
from parkd.proxy.config import ProxyConfig
from parkd.state import BLOCK_TOKENS, Transfer
from parkd.types import SamplingParams, TurnRequest
from tests.fakes.engine import FakeEngine
from tests.fakes.opaque import FakeOpaqueEngine
from tests.integration.api.api_harness import MIB, Messages, Running, body_of, fail_at, running

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True, params=[FakeEngine, FakeOpaqueEngine], ids=["rows", "opaque"])
def engine_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything here holds for engines that give rows, and for those that give a conversation whole."""
    monkeypatch.setitem(globals(), "FakeEngine", request.param)


def opening(name: str, characters: int = 1200, *, system: str = "You are helpful.") -> Messages:
    document = " ".join(f"{name}{number}" for number in range(characters))[:characters]
    return [{"role": "system", "content": system}, {"role": "user", "content": document}]


def turn_after(messages: Messages, answer: str, question: str) -> Messages:
    return [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": question}]


def never_parked(messages: Messages, *, stages: int = 2, max_tokens: int = 8) -> str:
    """What the model says when it reads the whole prompt at once: no server, no store, another chunking."""
    engine = FakeEngine(stages=stages, batch_tokens=384)
    ids = np.array(engine.tokenizer.encode(engine.template.render(messages, (), {}).text), dtype=np.int64)
    engine.extend(ids[:-1], cancel=threading.Event())
    engine.begin(ids, SamplingParams(temperature=0))
    steps = engine.generate()
    answer: list[int] = []
    for step in steps:
        if step[0] in engine.info.end_token_ids:
            break
        answer.extend(step)
        if len(answer) == max_tokens:
            break
    return engine.tokenizer.decode(answer)


def resumable(known: list[int], prompt: list[int]) -> int:
    """The oracle: the longest common prefix, less the prompt's last token."""
    common = 0
    while common < min(len(known), len(prompt) - 1) and known[common] == prompt[common]:
        common += 1
    return common


def rows_left_by(server: Running, messages: Messages, text: str) -> list[int]:
    """Tokens whose state a turn leaves: the prompt and all of the answer but its last token, which was never read."""
    return [*server.prompt_tokens(messages), *server.engine.tokenizer.encode(text)[:-1]]


@pytest.mark.parametrize("stages", [1, 2, 3])
async def test_a_b_a_restores_exactly_the_resumable_position(stages: int) -> None:
    async with running(FakeEngine(stages=stages)) as server:
        a1, b1 = opening("a"), opening("b")
        first = await server.chat(a1)
        left = rows_left_by(server, a1, first.text)
        await server.chat(b1)
        a2 = turn_after(a1, first.text, "And then?")
        second = await server.chat(a2)
        expected = resumable(left, server.prompt_tokens(a2))
        assert second.cache == "restored-ram"
        assert second.headers["x-parkd-cache"] == "restored-ram"
        assert second.reused == expected == second.usage["prompt_tokens_details"]["cached_tokens"]
        assert int(second.headers["x-parkd-reused-tokens"]) == expected
        assert expected >= 0.99 * len(server.prompt_tokens(a1))
        assert second.text == never_parked(a2, stages=stages)


async def test_a_conversation_that_stays_is_reused_without_a_copy() -> None:
    async with running(FakeEngine()) as server:
        a1 = opening("a")
        first = await server.chat(a1)
        second = await server.chat(turn_after(a1, first.text, "More."))
        assert (first.cache, second.cache) == ("cold", "live")
        assert second.reused == len(rows_left_by(server, a1, first.text))
        assert not [move for move in server.engine.transfers if move[0] == "restore"]


async def test_asking_again_costs_one_token() -> None:
    async with running(FakeEngine()) as server:
        a1 = opening("a")
        first = await server.chat(a1)
        again = await server.chat(a1)
        assert again.reused == len(server.prompt_tokens(a1)) - 1
        assert again.text == first.text


async def test_branches_of_one_prefix_both_stay() -> None:
    """Report 1: a restore copies, so the branch that shares A's prefix does not consume it."""
    async with running(FakeEngine()) as server:
        root = opening("root", 2000)
        # So long that reading one of them anew costs more than a restore, however fast the fake engine reads.
        left = [*root[:1], {"role": "user", "content": root[1]["content"] + " left?" * 60}]
        right = [*root[:1], {"role": "user", "content": root[1]["content"] + " right?" * 60}]
        first = {name: await server.chat(branch) for name, branch in (("left", left), ("right", right))}
        for _ in range(2):
            for name, branch in (("left", left), ("right", right)):
                answer = await server.chat(turn_after(branch, first[name].text, "Go on."))
                assert answer.reused >= len(server.prompt_tokens(branch))
        assert server.store is not None
        if not server.engine.info.layout.is_opaque:
            assert server.store.stats().shared_blocks >= len(root[1]["content"]) // BLOCK_TOKENS - 1


async def test_short_prompts_that_share_a_head_reuse_their_own_tail_too() -> None:
    """Report 2 and 18: two prompts under a block, switching: each reads one token."""
    async with running(FakeEngine()) as server:
        one, two = opening("x", 150), opening("x", 150)
        one[1]["content"] += " first ending of the two"
        two[1]["content"] += " second one, and another"
        tokens = {id(prompt): len(server.prompt_tokens(prompt)) for prompt in (one, two)}
        assert max(tokens.values()) < BLOCK_TOKENS
        texts = {id(prompt): (await server.chat(prompt)).text for prompt in (one, two)}
        for prompt in (one, two, one, two):
            answer = await server.chat(prompt)
            assert answer.reused == tokens[id(prompt)] - 1
            assert answer.text == texts[id(prompt)]


async def test_look_up_does_not_depend_on_what_is_live() -> None:
    """Report 3: after a reset nothing is live, and what is parked is found all the same."""
    async with running(FakeEngine()) as server:
        a1 = opening("a")
        first = await server.chat(a1)
        await server.settled()
        await server.server.proxy.lives[0].reset()
        second = await server.chat(turn_after(a1, first.text, "More."))
        assert second.cache == "restored-ram"
        assert second.reused == len(rows_left_by(server, a1, first.text))


async def test_nine_agents_take_turns() -> None:
    """Report 4: any number of conversations, each finds its own."""
    async with running(FakeEngine()) as server:
        agents = {name: opening(name, 600) for name in "abcdefghi"}
        texts = {name: (await server.chat(messages)).text for name, messages in agents.items()}
        for name, messages in agents.items():
            follow = turn_after(messages, texts[name], "Next.")
            answer = await server.chat(follow)
            assert answer.reused == len(rows_left_by(server, messages, texts[name]))
        assert answer.text == never_parked(follow)


async def test_a_b_a_reads_little_of_a_again() -> None:
    """Report 5 and 16: what a restore reports as reused is not read again."""
    async with running(FakeEngine()) as server:
        a1 = opening("a", 3000)
        first = await server.chat(a1)
        await server.chat(opening("b", 3000))
        before = server.engine.read_tokens
        a2 = turn_after(a1, first.text, "More.")
        second = await server.chat(a2)
        read = server.engine.read_tokens - before
        assert read == len(server.prompt_tokens(a2)) - 1 - second.reused < 40


async def test_five_conversations_under_a_budget_for_three() -> None:
    # Turns come at regular times and reading costs what is assumed of a model, however busy the machine is.
    async with running(FakeEngine(stages=2), slots=3, clock=map(float, count()).__next__) as server:
        server.server.proxy.costs.note_read = lambda *_: None
        names = "abcde"
        talks = {name: opening(name, 900) for name in names}
        for _ in range(3):
            answers = {}
            for name in names:
                answer = answers[name] = await server.chat(talks[name])
                assert answer.text == never_parked(talks[name])
                assert server.store is not None
                stats = server.store.stats()
                assert stats.conversations <= 3
                assert stats.bytes_allocated <= stats.budget_bytes
                talks[name] = turn_after(talks[name], answer.text, "Next.")
        back = [name for name in names if answers[name].cache == "restored-ram"]
        assert len(back) == 3, "agents that go round: three keep their places, instead of each losing its own in turn"
        assert all("not parked" in answers[name].timings["why"] for name in names if name not in back)


async def test_a_budget_in_bytes_holds_and_long_conversations_are_parked_in_part() -> None:
    async with running(FakeEngine(stages=2), budget_bytes=MIB // 4) as server:
        long = opening("a", 7000)
        first = await server.chat(long)
        await server.chat(opening("b", 300))
        assert server.store is not None
        assert server.store.stats().peak_bytes_allocated <= MIB // 4
        again = await server.chat(long)
        assert again.text == first.text


async def test_parking_off_keeps_single_conversation_reuse() -> None:
    async with running(FakeEngine(), budget_bytes=0) as server:
        a1, b1 = opening("a"), opening("b")
        first = await server.chat(a1)
        a2 = turn_after(a1, first.text, "More.")
        second = await server.chat(a2)
        assert second.cache == "live"
        assert second.reused == len(rows_left_by(server, a1, first.text))
        await server.chat(b1)
        back = await server.chat(a2)
        assert back.reused < 60  # the system prompt that both share
        assert back.text == second.text
        assert server.engine.transfers == []


@pytest.mark.parametrize("stage", [0, 1, 2])
async def test_damage_in_any_stage_reads_cold_with_the_right_text(stage: int) -> None:
    async with running(FakeEngine(stages=3)) as server:
        a1 = opening("a")
        first = await server.chat(a1)
        await server.chat(opening("b"))
        assert server.store is not None
        stage = min(stage, len(server.engine.info.layout.stages) - 1)
        found = next(
            parked
            for parked, _ in server.store.candidates(
                server.identity.build(_request(a1)).key.digest, server.identity.build(_request(a1)).prefix_hashes
            )
        )
        with server.store.lease(found.id, found.position) as lease:
            buffer = lease.transfer.stages[stage].rows[0].buffer
            buffer.flags.writeable = True
            buffer[buffer.size // 2] ^= 1
        a2 = turn_after(a1, first.text, "More.")
        second = await server.chat(a2)
        assert second.cache == "cold"
        assert second.reused == 0
        assert "restore failed" in second.headers["x-parkd-why"]
        assert second.text == never_parked(a2, stages=3)
        assert server.store.get(found.id) is None
        third = await server.chat(turn_after(a2, second.text, "And?"))
        assert third.cache == "live"


@pytest.mark.parametrize("step", ["restore", "restored"])
async def test_a_restore_that_fails_at_any_step_reads_cold(step: str) -> None:
    engine = FakeEngine(stages=2)
    async with running(engine) as server:
        a1 = opening("a")
        first = await server.chat(a1)
        await server.chat(opening("b"))
        engine.hook = fail_at(step, 1, lambda: RestoreFailed("The copy was refused."))
        a2 = turn_after(a1, first.text, "More.")
        second = await server.chat(a2)
        assert (second.cache, second.reused) == ("cold", 0)
        assert second.text == never_parked(a2)


async def test_an_engine_that_restores_to_another_position_is_not_believed() -> None:
    class Overshooting(FakeEngine):
        def restore(self, transfer: Transfer) -> None:
            super().restore(replace(transfer, resume_at=transfer.position - 1))

    async with running(Overshooting(stages=2)) as server:
        a1 = opening("a")
        first = await server.chat(a1)
        await server.chat(opening("b"))
        a2 = turn_after(a1, first.text, "More.")
        second = await server.chat(a2)
        assert (second.cache, second.reused) == ("cold", 0)
        assert second.text == never_parked(a2)


async def test_restored_state_without_finite_logits_is_not_restored_again() -> None:
    engine, is_damaged = FakeEngine(stages=2), False

    def give_up(step: str, _: int) -> None:
        nonlocal is_damaged
        if is_damaged and step == "token":
            is_damaged = False
            engine.reset()  # as the engines do
            raise LogitsNotFinite("The model's logits are not finite. Send the request again.")

    engine.hook = give_up
    async with running(engine) as server:
        a1 = opening("a")
        a2 = turn_after(a1, (await server.chat(a1)).text, "More.")
        await server.chat(opening("b"))
        is_damaged = True
        failed = await server.client.post("/v1/chat/completions", json=body_of(a2))
        assert failed.status_code == 500
        again = await server.chat(a2)
        assert again.reused < 60  # the system prompt that B shares
        assert "no finite logits" in again.timings["why"]
        assert again.text == never_parked(a2)


async def test_a_failed_copy_behind_the_reply_costs_nothing_but_the_copy() -> None:
    engine = FakeEngine(stages=2, hook=fail_at("capture", 1, lambda: RuntimeError("no such stream")))
    async with running(engine) as server:
        a1 = opening("a")
        first = await server.chat(a1)
        await server.settled()
        assert server.store is not None
        assert server.store.stats().conversations == 0
        assert server.store.stats().captures_in_flight == 0
        again = await server.chat(a1)
        assert again.text == first.text


async def test_a_checkpoint_that_fails_behind_the_reply_costs_the_next_client_nothing() -> None:
    engine, answered = FakeEngine(stages=2, fixed_bytes=40), False

    def fail_once_answered(step: str, _: int) -> None:
        nonlocal answered
        answered = step == "token"

    take = engine.checkpoint

    def checkpoint() -> None:
        if answered:
            raise EngineFailure("There is no memory for a checkpoint.")
        take()

    engine.hook = fail_once_answered
    engine.checkpoint = checkpoint  # type: ignore[method-assign]
    async with running(engine) as server:
        first = await server.chat(opening("a"))
        other = await server.chat(opening("b"))
        assert other.text == never_parked(opening("b"))
        assert first.text == never_parked(opening("a"))
        assert server.store is not None
        assert server.store.stats().captures_in_flight == 0


async def test_two_streams_at_once_are_each_their_own() -> None:
    async with running(FakeEngine()) as server:
        talks = {name: opening(name) for name in "ab"}
        for _ in range(3):
            answers: dict[str, Any] = {}

            async def ask(name: str, answers: dict[str, Any] = answers) -> None:
                answers[name] = await server.stream(talks[name], max_tokens=30)

            async with anyio.create_task_group() as tasks:
                for name in talks:
                    tasks.start_soon(ask, name)
            for name in talks:
                assert answers[name].text == never_parked(talks[name], max_tokens=30)
                talks[name] = turn_after(talks[name], answers[name].text, "Next.")
        assert {answers[name].cache for name in talks} <= {"restored-ram", "live"}


async def test_keys_do_not_share_state() -> None:
    config = ProxyConfig(api_keys=("first-key", "second-key"))
    async with running(FakeEngine(), config=config) as server:
        a1 = opening("a")
        server.client.headers["authorization"] = "Bearer first-key"
        first = await server.chat(a1)
        del server.client.headers["authorization"]
        server.client.headers["x-api-key"] = "second-key"
        other = await server.chat(a1)
        assert (other.cache, other.reused, other.timings["why"]) == ("cold", 0, "")
        server.client.headers["x-api-key"] = "first-key"
        back = await server.chat(a1)
        assert back.reused == len(server.prompt_tokens(a1)) - 1
        assert first.text == other.text == back.text


@pytest.mark.parametrize("mode", ["off", "read"])
async def test_a_request_that_asks_for_no_trace_leaves_none(mode: str) -> None:
    async with running(FakeEngine()) as server:
        a1 = opening("a")
        server.client.headers["x-parkd-cache-mode"] = mode
        first = await server.chat(a1)
        del server.client.headers["x-parkd-cache-mode"]
        assert server.store is not None
        assert server.store.stats().conversations == 0
        again = await server.chat(a1)
        assert (again.cache, again.reused, again.text) == ("cold", 0, first.text)


def _request(messages: Messages) -> Any:
    return TurnRequest(messages=messages)


async def test_with_two_seats_two_conversations_are_live_at_once_and_a_third_takes_the_place_of_the_older() -> None:
    """The lane knows no current conversation: each turn goes on in the seat that its start names."""
    engine = _two_seats()
    async with running(engine) as server:
        said = {name: await server.chat(opening(name)) for name in "ab"}
        left = {name: rows_left_by(server, opening(name), said[name].text) for name in "ab"}
        restores = [[kind for kind, _, _ in seat.transfers].count("restore") for seat in engine.seats]
        assert restores == [0, 1], "b's seat was given the head that it shares with a, which stays live"
        later = {}
        for name in "ab":
            messages = turn_after(opening(name), said[name].text, "And then?")
            answer = later[name] = await server.chat(messages)
            expected = resumable(left[name], server.prompt_tokens(messages))
            assert (answer.cache, answer.reused, answer.text) == ("live", expected, never_parked(messages))
        await server.settled()
        assert [[kind for kind, _, _ in seat.transfers].count("restore") for seat in engine.seats] == restores
        await server.chat(opening("c"))
        live, parked = (turn_after(opening(name), said[name].text, "And then?") for name in "ba")
        assert (await server.chat(live)).cache == "live", "c took the seat of a, which was used before b"
        again = await server.chat(parked)
        assert (again.cache, again.text) == ("restored-ram", later["a"].text)


async def test_with_two_seats_a_restarted_engine_holds_nothing_in_either() -> None:
    engine = _two_seats()
    async with running(engine) as server:
        for name in "ab":
            await server.chat(opening(name))
        engine.restarted = True
        for name in "ba":
            again = await server.chat(opening(name))
            assert (again.cache, again.text) == ("restored-ram", never_parked(opening(name)))


def _two_seats() -> Any:
    """An engine like the test's, with a seat more. It can be restarted, as one in another process."""

    class TwoSeats(FakeEngine):
        def __init__(self) -> None:
            super().__init__()
            self.beside, self.restarted = FakeEngine(), False

        @property
        def seats(self) -> tuple[FakeEngine, ...]:
            return (self, self.beside)

        @property
        def is_awake(self) -> bool:
            return not self.restarted

        def awake(self) -> None:
            self.restarted = False
            for seat in self.seats:
                seat.reset()

    return TwoSeats()
