"""Paused turns where several conversations are live: whatever becomes of their seat, they go on bit for bit."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from parkd_engine.moves import snapshot

from parkd.config import ModelConfig
from parkd.engine_adapter.torch_engine import loading
from parkd.engine_adapter.torch_engine.engine import TorchEngine
from parkd.lane.turn import Turn
from parkd.state import EngineConfig
from tests.fakes.engine import FakeEngine
from tests.fakes.seats import FakeSeats
from tests.integration.api.api_harness import Messages, body_of, running, until
from tests.integration.pauses.pause_kit import NOISE, Pauser, PausesOne, at_random, post, steady
from tests.integration.pauses.test_pauses_families import A1, SAMPLED, SCORED

pytestmark = pytest.mark.anyio
LONG_NOISE: Messages = [{"role": "user", "content": "Something else altogether, which needs all rows there are. " * 24}]
FAMILIES = ("tiny-llama", "tiny-gemma3", "tiny-qwen3.5-mtp")


def load(folder: Path, family: str, seats: int) -> TorchEngine:
    layout = EngineConfig(devices=("cpu", "cpu"), context_tokens=1024, batch_tokens=128, draft_tokens=2, seats=seats)
    return TorchEngine.load(ModelConfig(f"random:{family}", folder, layout=layout), fresh_seed=lambda: 4)


@pytest.fixture
def restores(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The position of each restore."""
    seen: list[int] = []
    whole = snapshot.restore

    def noted(session: Any, transfer: Any, **named: Any) -> None:
        seen.append(transfer.position)
        whole(session, transfer, **named)

    monkeypatch.setattr(snapshot, "restore", noted)
    return seen


async def never_paused(folder: Path, family: str, body: dict[str, Any]) -> dict[str, Any]:
    engine = load(folder, family, 1)
    async with running(engine, answer_bytes=0) as server:  # type: ignore[arg-type]
        document = steady(await post(server, body))
    engine.close()
    return document


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_turn_that_is_paused_while_another_seat_runs_copies_nothing_back(
    family: str, tmp_path: Path, restores: list[int]
) -> None:
    body = body_of(A1, 16, **SAMPLED, **SCORED)
    expected = await never_paused(tmp_path, family, body)
    engine = load(tmp_path, family, 2)
    async with running(engine, answer_bytes=0) as server:  # type: ignore[arg-type]
        pauser = Pauser(server, at_random(3, 0.5), noise=NOISE)
        assert steady(await post(server, body)) == expected
    assert pauser.pauses > 1
    assert not [position for position in restores if position > 8], "but of the few tokens that all prompts share"
    engine.close()


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_paused_turn_whose_rows_others_need_comes_back_to_them(
    family: str, tmp_path: Path, restores: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    body = body_of(A1, 16, **SAMPLED, **SCORED)
    expected = await never_paused(tmp_path, family, body)
    monkeypatch.setattr(loading, "choose_seats", lambda _stages, context, asked, **_: (asked, context))
    engine = load(tmp_path, family, 2)
    async with running(engine, answer_bytes=0) as server:  # type: ignore[arg-type]
        assert 768 < len(server.prompt_tokens(LONG_NOISE)) < 1000
        pauser = Pauser(server, at_random(3, 0.5), noise=LONG_NOISE)
        assert steady(await post(server, body)) == expected
    assert pauser.pauses > 1
    assert len([position for position in restores if position > 8]) >= pauser.pauses
    engine.close()


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_paused_turn_notices_that_its_seat_was_emptied(family: str, tmp_path: Path) -> None:
    """As an answer in another seat does that grows longer than was foreseen."""
    body = body_of(A1, 16, **SAMPLED, **SCORED)
    expected = await never_paused(tmp_path, family, body)
    engine = load(tmp_path, family, 2)
    async with running(engine, answer_bytes=0) as server:  # type: ignore[arg-type]
        proxy, emptied = server.server.proxy, list[int]()

        async def empty_all() -> None:
            for seat in engine.seats:
                emptied.append(seat.position)
                await proxy.thread.run(seat.reset)

        pauser = Pauser(server, at_random(3, 0.5), between=empty_all, noise=NOISE)
        assert steady(await post(server, body)) == expected
    assert pauser.pauses > 1
    assert any(emptied)
    engine.close()


async def test_a_paused_turn_goes_on_in_another_seat_and_what_was_forgotten_there_is_not_its_own() -> None:
    """Two others run in its pause, the second in its seat; the first is then forgotten."""
    engine = FakeSeats(2, end_odds=1 << 40)
    async with running(engine, answer_bytes=0) as server:  # type: ignore[arg-type]
        proxy, seen = server.server.proxy, list[int]()
        proxy.lane.schedule, proxy.lane.width = PausesOne(1), 1
        pause, is_to_pause = proxy.lane.pause, proxy.lane.is_to_pause

        async def pause_for_two(turn: Turn) -> None:
            others = [asyncio.create_task(server.chat([{"role": "user", "content": name}])) for name in ("b", "c")]
            await until(lambda: proxy.lane.waiting == 2)
            await pause(turn)
            await asyncio.gather(*others)
            seen.extend(live.rows.position for live in proxy.lives)
            proxy.lives[1].discard()

        proxy.lane.pause = pause_for_two  # type: ignore[method-assign]
        proxy.lane.is_to_pause = lambda turn: is_to_pause(turn) and not seen  # type: ignore[method-assign]
        answer = await server.chat(A1, max_tokens=40)
        await server.settled()
        assert len(seen) == 2
        assert all(position < len(server.prompt_tokens(A1)) for position in seen), "others had both seats"
        assert proxy.lives[1].rows.position > len(server.prompt_tokens(A1))
        assert proxy.lives[1].rows.parked_id is not None
    async with running(FakeEngine(end_odds=1 << 40), answer_bytes=0) as server:
        assert (await server.chat(A1, max_tokens=40)).text == answer.text
