"""llama.cpp in process with several live conversations: each computes what it computes alone, and a switch copies
nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from parkd.errors import ModelError
from parkd.state import Bytes, Transfer
from parkd.types import SamplingParams, TokenIds
from tests.integration.api.api_harness import Messages, running
from tests.integration.llama.llama_cpp_kit import BATCH, loaded, opening, turn_after
from tests.integration.llama.test_llama_cpp_bits import NEVER, capture, logits_of, some_tokens, whole_state

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed (pip install parkd[llama-cpp])")
pytestmark = pytest.mark.anyio

MODELS = ["tiny", "tiny-dense", "tiny-sliding"]
READ, DECODED = 3 * BATCH + 40, 6
"""Tokens of a prompt, more than the cells over which attention is computed as one, and of an answer."""


@dataclass
class Life:
    """A conversation as its seat sees it: two prompts, each in pieces, and two answers."""

    seed: int
    seen: list[np.ndarray | Bytes] = field(default_factory=list)

    def read(self, seat: Any, count: int) -> None:
        seat.extend(self._tokens(seat, count), cancel=NEVER)

    def answer(self, seat: Any) -> None:
        seat.checkpoint()
        self.seen.append(logits_of(seat, self._tokens(seat, DECODED)))
        self.seen.append(whole_state(seat))

    def _tokens(self, seat: Any, count: int) -> TokenIds:
        return some_tokens(100 * self.seed + seat.position, count)


def lead(lives: list[tuple[Life, Any]]) -> None:
    """All of them, a piece of each in turn."""
    for seat in {id(seat): seat for _, seat in lives}.values():
        seat.reset()
    for count in (READ, 1, 70):
        for life, seat in lives:
            life.read(seat, count)
        for life, seat in lives:
            life.answer(seat)


@pytest.mark.parametrize(("name", "threads"), [*((name, 1) for name in MODELS), ("tiny-dense", 2)])
def test_each_seat_has_the_logits_and_the_state_that_it_has_alone(name: str, threads: int, tmp_path: Path) -> None:
    alone = [Life(seed) for seed in (1, 2)]
    with loaded(name, tmp_path, threads=threads) as engine:
        for life in alone:
            lead([(life, engine)])
    beside = [Life(seed) for seed in (1, 2)]
    with loaded(name, tmp_path, threads=threads, seats=2) as engine:
        lead(list(zip(beside, engine.seats, strict=True)))
    for one, other in zip(alone, beside, strict=True):
        assert len(one.seen) == 6
        for here, there in zip(one.seen, other.seen, strict=True):
            assert np.array_equal(here, there)
    assert not np.array_equal(alone[0].seen[0], alone[1].seen[0])


@pytest.mark.parametrize("name", MODELS)
async def test_who_fits_stays_live_and_the_one_used_longest_ago_makes_way(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, questions = {}, {}, {}
    with loaded(name, tmp_path) as engine:
        for each in "abc":
            async with running(engine, answer_bytes=0) as server:
                first[each] = (await server.chat(opening(each))).text
                questions[each] = turn_after(opening(each), first[each])
                second[each] = (await server.chat(questions[each])).text
    with loaded(name, tmp_path, seats=2) as engine:
        restores = noted_restores(engine.seats, monkeypatch)
        async with running(engine, answer_bytes=0) as server:
            assert (await server.client.get("/props")).json()["total_slots"] == 2
            for each in "ab":
                assert (await server.chat(opening(each))).text == first[each]
            restores.clear()  # the second may have been given the beginning that it shares with the first
            for each in "abab":
                answer = await server.chat(questions[each])
                assert (answer.cache, answer.text) == ("live", second[each])
            assert not restores
            assert (await server.chat(opening("c"))).text == first["c"]
            kept = [await server.chat(questions[each]) for each in "bca"]
        assert [answer.cache for answer in kept] == ["live", "live", "restored-ram"]
        assert [answer.text for answer in kept] == [second[each] for each in "bca"]


@pytest.mark.parametrize("name", MODELS)
async def test_answers_at_once_are_those_of_one_after_the_other(name: str, tmp_path: Path) -> None:
    asked: list[tuple[Messages, dict[str, Any]]] = [
        (opening("a", 150), {"temperature": 0}),
        (opening("b"), {"temperature": 1.0, "seed": 5, "repetition_penalty": 1.2, "logprobs": True, "top_logprobs": 2}),
        (opening("c", 90), {"temperature": 1.0, "seed": 6}),
    ]
    expected, together = [], {}
    with loaded(name, tmp_path) as engine:
        for messages, fields in asked:
            async with running(engine, answer_bytes=0) as server:
                expected.append((await server.chat(messages, max_tokens=24, **fields)).text)
            engine.reset()

    async def ask(server: Any, place: int) -> None:
        messages, fields = asked[place]
        together[place] = (await server.chat(messages, max_tokens=24, **fields)).text

    with loaded(name, tmp_path, seats=2) as engine:
        assert engine.turns_at_once == 2
        async with running(engine, answer_bytes=0) as server, anyio.create_task_group() as tasks:
            for place in range(len(asked)):
                tasks.start_soon(ask, server, place)
    assert [together[place] for place in range(len(asked))] == expected


def test_an_answer_that_was_set_aside_goes_on_in_another_seat(tmp_path: Path) -> None:
    """With its sampler and its logprobs; the seat that it left knows it no more."""
    ids = some_tokens(1, 70)
    sampling = SamplingParams(temperature=1.0, seed=5, repetition_penalty=1.2, top_logprobs=2)
    with loaded("tiny", tmp_path, seats=2) as engine:
        one, other = engine.seats
        for begun in (one, other):
            begun.begin(ids, sampling)
            begun.extend(ids[:-1], cancel=NEVER)
        stayed, moved = one.generate(), other.generate()
        expected = [next(stayed) for _ in range(8)]
        seen = [next(moved) for _ in range(4)]
        other.checkpoint()
        parked, scored = capture(other, None), list(one.logprobs)
        put_back = other.set_aside()
        for seat in (one, other):
            seat.reset()
        one.restore(parked)
        put_back(one)
        seen += [next(moved) for _ in range(4)]
        assert (other.position, list(other.logprobs)) == (0, [])
        assert one.position == len(ids) - 1 + len(expected)
        assert list(one.logprobs) == scored
    assert seen == expected


def test_contexts_that_do_not_fit_are_refused_with_what_to_lower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import llama_cpp.llama_cpp as low

    opened, whole = [], low.llama_init_from_model

    def once(*given: Any) -> Any:
        opened.append(given)
        return whole(*given) if len(opened) == 1 else None

    monkeypatch.setattr(low, "llama_init_from_model", once)
    with pytest.raises(ModelError, match="--parallel"), loaded("tiny", tmp_path, seats=2):
        pass


def noted_restores(seats: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    seen: list[int] = []

    def note(seat: Any) -> None:
        whole = seat.restore

        def noted(transfer: Transfer) -> None:
            seen.append(transfer.stop)
            whole(transfer)

        monkeypatch.setattr(seat, "restore", noted)

    for seat in seats:
        note(seat)
    return seen
