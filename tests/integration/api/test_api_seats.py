"""Several live conversations in the torch engine, over HTTP: a switch copies nothing, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from parkd_engine.moves import snapshot

from parkd.engine_adapter.torch_engine import loading
from parkd.engine_adapter.torch_engine.engine import TorchEngine
from parkd.errors import EngineFailure
from parkd.lane import turn_starter
from tests.integration.api.api_harness import Messages, running
from tests.integration.api.test_api_hybrids import read_cold, tiny

pytestmark = pytest.mark.anyio


def opening(name: str, repeats: int = 18) -> Messages:
    return [
        {"role": "system", "content": "You park conversations."},
        {"role": "user", "content": f"{name} holds one conversation in memory. " * repeats},
    ]


def after(messages: Messages, answer: str) -> Messages:
    return [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": "And then?"}]


@pytest.fixture
def restores(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The first row of each restore."""
    seen: list[int] = []

    def noting(whole: Callable[..., None]) -> Callable[..., None]:
        def noted(session: Any, transfer: Any, *given: Any, **named: Any) -> None:
            seen.append(transfer.start)
            whole(session, transfer, *given, **named)

        return noted

    for name in ("restore", "restore_and_read"):
        monkeypatch.setattr(snapshot, name, noting(getattr(snapshot, name)))
    return seen


def over(engine: TorchEngine) -> Any:
    return running(engine, answer_bytes=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["tiny-qwen3", "tiny-gemma3", "tiny-qwen3.5-mtp", "tiny-lfm2"])
async def test_a_b_a_is_live_with_two_seats(family: str, tmp_path: Path, restores: list[int]) -> None:
    engine = tiny(tmp_path, family, seats=2)
    async with over(engine) as server:
        assert (await server.client.get("/props")).json()["total_slots"] == 2
        said = {name: (await server.chat(opening(name))).text for name in "AB"}
        restores.clear()  # B may have been given the head that it shares with A.
        later = {name: after(opening(name), said[name]) for name in "AB"}
        for name in "ABAB":
            answer = await server.chat(later[name])
            assert answer.cache == "live", name
            said[f"{name}2"] = answer.text
        slots = (await server.client.get("/slots")).json()
        assert [slot["id"] for slot in slots] == [0, 1]
    assert not restores
    for name in "AB":
        assert said[name] == read_cold(engine, opening(name))
        assert said[f"{name}2"] == read_cold(engine, later[name])


async def test_a_third_conversation_takes_the_place_of_the_one_used_longest_ago(tmp_path: Path) -> None:
    engine = tiny(tmp_path, "tiny-qwen3", seats=2)
    async with over(engine) as server:
        said = {name: (await server.chat(opening(name))).text for name in "ABC"}
        later = {name: after(opening(name), said[name]) for name in "ABC"}
        answers = {name: await server.chat(later[name]) for name in "BCA"}
    assert {name: answer.cache for name, answer in answers.items()} == {
        "A": "restored-ram",
        "B": "live",
        "C": "live",
    }
    for name in "ABC":
        assert answers[name].text == read_cold(engine, later[name])


@pytest.fixture
def _one_context_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "choose_seats", lambda _stages, context, asked, **_: (asked, context))


@pytest.mark.usefixtures("_one_context_of_rows")
async def test_who_does_not_fit_beside_a_long_prompt_is_parked_and_comes_back(tmp_path: Path) -> None:
    """All rows together are one context: a prompt may still be as long as that."""
    engine = tiny(tmp_path, "tiny-qwen3.5", seats=2)
    async with over(engine) as server:
        short, long = opening("A", 35), opening("B", 70)
        first = await server.chat(short)
        assert len(server.prompt_tokens(long)) > 512
        other = await server.chat(long)
        assert engine.seats[0].position == 0, "emptied for the long one"
        again = await server.chat(after(short, first.text))
        assert again.cache == "restored-ram"
        assert again.reused >= len(server.prompt_tokens(short)) - 1
        whole = opening("C", 115)
        assert len(server.prompt_tokens(whole)) > 900
        last = await server.chat(whole)
    assert other.text == read_cold(engine, long)
    assert again.text == read_cold(engine, after(short, first.text))
    assert last.text == read_cold(engine, whole)


@pytest.mark.usefixtures("_one_context_of_rows")
async def test_who_makes_way_is_parked_then_if_that_failed_behind_its_reply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny(tmp_path, "tiny-qwen3.5", seats=2)
    async with over(engine) as server:
        short = opening("A", 35)
        with monkeypatch.context() as patch:
            patch.setattr(snapshot, "capture", _failing)
            first = await server.chat(short)
            await server.settled()
        assert server.store is not None
        assert server.store.stats().conversations == 0
        await server.chat(opening("B", 70))
        again = await server.chat(after(short, first.text))
        assert again.cache == "restored-ram"
        assert again.reused >= len(server.prompt_tokens(short)) - 1
    assert again.text == read_cold(engine, after(short, first.text))


def _failing(*_: Any, **__: Any) -> None:
    raise EngineFailure("no room")


@pytest.mark.usefixtures("_one_context_of_rows")
async def test_an_answer_that_grows_into_anothers_rows_empties_its_seat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was parked behind its reply, so nothing is lost; the lane notices before it decides again."""
    monkeypatch.setattr(turn_starter, "ANSWER_TOKENS", 0)
    engine = tiny(tmp_path, "tiny-qwen3", seats=2)
    async with over(engine) as server:
        a, b = opening("A", 16), opening("B", 16)
        first = await server.chat(a)
        assert sum(-(-len(server.prompt_tokens(each)) // 256) * 256 for each in (a, b)) <= 1024
        await server.settled()
        long = await server.chat(b, max_tokens=700, logit_bias=_without_ends(engine))
        assert long.usage["completion_tokens"] > 300
        assert [seat.position == 0 for seat in engine.seats] == [True, False]
        again = await server.chat(after(a, first.text))
        assert again.cache == "restored-ram"
        assert again.reused >= len(server.prompt_tokens(a)) - 1
    assert again.text == read_cold(engine, after(a, first.text))


def _without_ends(engine: TorchEngine) -> dict[str, int]:
    return {str(token): -100 for token in engine.info.end_token_ids}


async def test_a_client_that_leaves_while_its_prompt_is_read_leaves_the_other_seat_as_it_is(tmp_path: Path) -> None:
    engine = tiny(tmp_path, "tiny-qwen3.5", seats=2, batch_tokens=16)
    async with over(engine) as server:
        first = await server.chat(opening("A"))
        with anyio.move_on_after(0.3):
            await server.stream(opening("B", 30))
        await server.settled()
        again = await server.chat(after(opening("A"), first.text))
        assert again.cache == "live"
    assert again.text == read_cold(engine, after(opening("A"), first.text))


async def test_a_failure_in_the_middle_of_a_chunk_leaves_the_other_seat_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny(tmp_path, "tiny-qwen3.5", seats=2)
    async with over(engine) as server:
        first = await server.chat(opening("A"))
        layer = engine.session.stages[1].layers[1]
        with monkeypatch.context() as patch:
            patch.setattr(layer, "forward", _broken)
            failed = await server.client.post(
                "/v1/chat/completions", json={"messages": opening("B"), "max_tokens": 4, "model": "any"}
            )
        assert failed.status_code == 500
        again = await server.chat(after(opening("A"), first.text))
        other = await server.chat(opening("B"))
        assert again.cache == "live"
    assert again.text == read_cold(engine, after(opening("A"), first.text))
    assert other.text == read_cold(engine, opening("B"))


def _broken(*_: Any, **__: Any) -> None:
    raise RuntimeError("no such kernel")
