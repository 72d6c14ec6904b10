"""Conversations whose state is exact at checkpoints only: what each kind of turn reads again, to the token."""

from __future__ import annotations

import anyio
import numpy as np
import pytest

from parkd.engine_adapter.base import Rendered
from parkd.lane.checkpoints import CHECKPOINT_STEP_TOKENS, checkpoints_to_take
from parkd.state import BLOCK_TOKENS
from parkd.types import ConversationKey, PromptIdentity
from tests.fakes.engine import FakeEngine
from tests.fakes.opaque import FakeOpaqueEngine
from tests.fakes.text import FakeTemplate
from tests.integration.api.api_harness import Gate, Messages, Running, body_of, running, until
from tests.integration.api.test_api_switching import never_parked, opening, rows_left_by, turn_after

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True, params=[FakeEngine, FakeOpaqueEngine], ids=["rows", "opaque"])
def engine_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything here holds for engines that give rows, and for those that give a conversation whole."""
    monkeypatch.setitem(globals(), "FakeEngine", request.param)


GENERATION_PROMPT = "<|im_start|>assistant\n"


def hybrid(stages: int = 2, **settings: int) -> FakeEngine:
    return FakeEngine(stages=stages, fixed_bytes=40, **settings)


def tokens_before_answer(server: Running, messages: Messages) -> int:
    """Up to the generation prompt."""
    return len(server.prompt_tokens(messages)) - len(server.engine.tokenizer.encode(GENERATION_PROMPT))


@pytest.mark.parametrize("stages", [1, 2, 3])
async def test_a_b_a_resumes_at_the_end_of_the_answer(stages: int) -> None:
    """Replays llama.cpp#25913 and sglang#39830: rows and fixed state come back as one, at one position."""
    async with running(hybrid(stages)) as server:
        a1, b1 = opening("a"), opening("b")
        first = await server.chat(a1)
        left = rows_left_by(server, a1, first.text)
        await server.chat(b1)
        a2 = turn_after(a1, first.text, "And then?")
        second = await server.chat(a2)
        assert (second.cache, second.reused) == ("restored-ram", len(left))
        assert second.text == never_parked(a2, stages=stages)
        b2 = turn_after(b1, "something else", "And then?")
        third = await server.chat(b2)
        # That answer was never given: it is left where the generation prompt begins to be answered.
        assert (third.cache, third.reused) == ("restored-ram", len(server.prompt_tokens(b1)) - 1)
        assert third.text == never_parked(b2, stages=stages)


async def test_asking_again_costs_one_token_live_and_restored() -> None:
    """Replays ds4#668 and omlx#3430: the prompt's end is kept, however short it is."""
    async with running(hybrid()) as server:
        a1 = opening("a")
        first = await server.chat(a1)
        prompt = len(server.prompt_tokens(a1))
        for before, cache in ((None, "live"), (opening("b"), "restored-ram")):
            if before is not None:
                await server.chat(before)
            read = server.engine.read_tokens
            again = await server.chat(a1)
            assert (again.cache, again.reused, again.text) == (cache, prompt - 1, first.text)
            assert server.engine.read_tokens == read


@pytest.mark.parametrize("is_elsewhere", [False, True])
async def test_editing_the_last_message_reads_that_message(is_elsewhere: bool) -> None:
    """Replays Strata#734."""
    async with running(hybrid()) as server:
        a1 = opening("a")
        first = await server.chat(a1)
        await server.chat(turn_after(a1, first.text, "What about the sea?"))
        if is_elsewhere:
            await server.chat(opening("b"))
        edited = turn_after(a1, first.text, "What about the mountains?")
        read = server.engine.read_tokens
        answer = await server.chat(edited)
        kept = tokens_before_answer(server, edited[:-1])
        assert answer.cache == ("restored-ram" if is_elsewhere else "live")
        assert answer.reused == kept
        assert server.engine.read_tokens - read == len(server.prompt_tokens(edited)) - 1 - kept
        assert answer.text == never_parked(edited)


async def test_dropping_earlier_reasoning_reads_from_that_answer_on() -> None:
    """The client sends back less of the answer than was generated. Replays opencode#19081."""
    async with running(hybrid()) as server:
        a1 = opening("a")
        first = await server.chat(a1, max_tokens=24)
        prompt = len(server.prompt_tokens(a1))
        a2 = turn_after(a1, first.text[12:], "Go on.")
        second = await server.chat(a2)
        assert (second.cache, second.reused) == ("live", prompt - 1)
        assert second.text == never_parked(a2)
        # The turn after that one has its answer whole again.
        a3 = turn_after(a2, second.text, "And on.")
        third = await server.chat(a3)
        assert third.reused == len(rows_left_by(server, a2, second.text))
        assert third.text == never_parked(a3)


class EmptyThought(FakeTemplate):
    """Writes a block of thought before an answer that is to come, and none before those that were."""

    TAIL = "<think>\n\n</think>\n\n"

    def render(self, messages, tools, kwargs, *, add_generation_prompt=True):  # type: ignore[no-untyped-def]
        rendered = super().render(messages, tools, kwargs, add_generation_prompt=add_generation_prompt)
        return Rendered(rendered.text + self.TAIL) if add_generation_prompt else rendered


async def test_a_generation_prompt_that_vanishes_costs_itself_alone() -> None:
    """Report 44, Qwen3#1826: the next prompt leaves this one inside its tail, and goes on from before it."""
    a1, answers = opening("a"), []
    a2 = turn_after(a1, "Something else.", "And then?")
    for turns in ((a1, a2), (a2,)):
        engine = hybrid()
        engine.template = EmptyThought()
        async with running(engine) as server:
            answers += [await server.chat(messages) for messages in turns]
            tail = len(server.engine.tokenizer.encode(GENERATION_PROMPT + EmptyThought.TAIL))
            before_it = len(server.prompt_tokens(a1)) - tail
    _, second, cold = answers
    assert (second.cache, second.reused, cold.reused) == ("live", before_it, 0)
    assert second.text == cold.text


async def test_siblings_resume_at_the_end_of_their_common_system_prompt() -> None:
    """Replays ninfer#142."""
    async with running(hybrid()) as server:
        system = "Rules: " + " ".join(f"rule{n}" for n in range(200))
        await server.chat(opening("a", system=system))
        sibling = opening("b", system=system)
        answer = await server.chat(sibling)
        kept = tokens_before_answer(server, sibling[:1])
        assert answer.reused == kept
        assert answer.text == never_parked(sibling)


async def test_where_prompts_were_seen_to_fork_the_next_one_resumes() -> None:
    async with running(hybrid()) as server:
        head = "The same long document. " * 60
        prompts = [[{"role": "user", "content": head + question}] for question in ("Alpha?", "Beta?", "Gamma?")]
        answers = [await server.chat(messages) for messages in prompts]
        fork = len(server.engine.tokenizer.encode("<|im_start|>user\n" + head))
        assert [answer.reused for answer in answers] == [0, 0, fork]
        assert answers[2].text == never_parked(prompts[2])


async def test_a_cancelled_prompt_goes_on_where_it_was_stopped() -> None:
    gate = Gate("chunk", nth=3)
    engine = hybrid(batch_tokens=256)
    engine.hook = gate
    async with running(engine) as server:
        a1 = opening("a")
        async with anyio.create_task_group() as tasks:

            async def leave() -> None:
                with anyio.move_on_after(30) as scope:
                    tasks.start_soon(stop, scope)
                    await server.client.post("/v1/chat/completions", json=body_of(a1))

            async def stop(scope: anyio.CancelScope) -> None:
                await gate.wait_reached()
                scope.cancel()
                await until(lambda: server.server.proxy.lane.busy)
                await anyio.sleep(0.1)
                gate.opened.set()

            tasks.start_soon(leave)
        await server.settled()
        await server.chat(opening("b"))
        answer = await server.chat(a1)
        assert answer.cache == "restored-ram"
        assert answer.reused in (512, 768)
        assert answer.text == never_parked(a1)


async def test_a_turn_that_asked_to_leave_no_trace_leaves_what_it_found() -> None:
    async with running(hybrid()) as server:
        a1 = opening("a")
        first = await server.chat(a1)
        a2 = turn_after(a1, first.text, "Secret question")
        for mode in ("read", "off"):
            server.client.headers["x-parkd-cache-mode"] = mode
            assert (await server.chat(a2)).text == never_parked(a2)
        del server.client.headers["x-parkd-cache-mode"]
        third = await server.chat(turn_after(a1, first.text, "Open question"))
        assert third.text == never_parked(turn_after(a1, first.text, "Open question"))


async def test_few_checkpoints_cost_rereading_never_answers() -> None:
    async with running(hybrid(ctx_checkpoints=1)) as server:
        messages = opening("a")
        for turn in range(4):
            answer = await server.chat(messages)
            assert answer.text == never_parked(messages)
            if turn == 1:
                await server.chat(opening("b"))
            messages = turn_after(messages, answer.text, f"Question {turn}")


def prompt_of(length: int, boundaries: tuple[int, ...], *, stays: bool = False) -> PromptIdentity:
    units = np.arange(length, dtype=np.uint64)
    key = ConversationKey("", b"")
    return PromptIdentity(
        key, units.astype(np.int64), units, (), boundaries=boundaries, generation_stays=stays and bool(boundaries)
    )


def test_which_places_are_kept() -> None:
    prompt = prompt_of(4000, (100, 1300, 2500, 3900, 3980))
    assert checkpoints_to_take(prompt, 0, 0, 8) == (100, 1300, 2500, 3900, 3980, 3999)
    assert checkpoints_to_take(prompt, 1300, 2700, 8) == (2500, 2700, 3900, 3980, 3999)
    assert checkpoints_to_take(prompt, 0, 2700, 5) == (100, 2700, 3900, 3980, 3999)
    assert checkpoints_to_take(prompt, 0, 0, 1) == (3999,)
    assert checkpoints_to_take(prompt, 3999, 3999, 8) == ()
    assert checkpoints_to_take(prompt, 0, 0, 0) == ()
    # A generation prompt that stays needs no place of its own: later prompts fork behind it.
    staying = prompt_of(4000, (100, 1300, 2500, 3900, 3980), stays=True)
    assert checkpoints_to_take(staying, 0, 0, 8) == (100, 1300, 2500, 3900, 3999)
    assert checkpoints_to_take(staying, 0, 0, 2) == (3900, 3999)
    assert checkpoints_to_take(staying, 3930, 0, 8) == (3999,)
    # Earlier turns are worth a cut only where that saves more than it costs; the others are exact however close.
    close = prompt_of(4000, (100, 500, 1000, 1300, 1700, 3870, 3900, 3980))
    assert checkpoints_to_take(close, 0, 0, 8) == (100, 1000, 1700, 3870, 3900, 3980, 3999)
    long = prompt_of(3 * CHECKPOINT_STEP_TOKENS, ())
    assert checkpoints_to_take(long, 5, 0, 8) == (
        CHECKPOINT_STEP_TOKENS,
        2 * CHECKPOINT_STEP_TOKENS,
        3 * CHECKPOINT_STEP_TOKENS - 1,
    )


async def test_a_checkpoint_at_the_end_of_a_block_comes_back_where_all_its_rows_are_live() -> None:
    async with running(hybrid()) as server:
        ask: Messages = [{"role": "user", "content": ""}]
        ask[0]["content"] = "x" * (2 * BLOCK_TOKENS + 1 - len(server.prompt_tokens(ask)))
        first = await server.chat(ask)
        talk = turn_after(ask, first.text, "And then?")
        second = await server.chat(talk)
        await server.chat(opening("b"))
        await server.chat(
            turn_after(talk, second.text, "And now?")
        )  # only what it resumes at is restored with its rows
        again = await server.chat(ask)
        assert (again.cache, again.reused, again.text) == ("restored-ram", 2 * BLOCK_TOKENS, first.text)
