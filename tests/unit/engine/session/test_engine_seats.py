"""Several live conversations in one engine: each is what it would be alone, in every bit, whatever the others do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from parkd_engine import Session, capture, host_transfer, restore

from parkd.words.steering import Steering
from tests.unit.engine.kit.core_models import tiny_model, token_ids
from tests.unit.engine.kit.hybrid_models import model_of
from tests.unit.engine.kit.logged_session import BATCH, CONTEXT
from tests.unit.engine.kit.quantised_models import quantised_model
from tests.unit.engine.kit.recordings import record_chunks, record_steps, without_triton
from tests.unit.engine.kit.seats import opened_seats, shared_lives

EVENTS = 24
CROWDED_ROWS = CONTEXT + 48
PLAIN = (
    *("qwen3", "qwen3-mtp", "qwen3-moe", "gemma3", "qwen2-window", "gpt-oss", "qwen3-next", "qwen3.5-mtp"),
    *("qwen4-exp-mtp", "lfm2", "granite-h", "falcon-h1", "deepseek-v3-mtp", "qwen3.5-vl", "gemma3-vl"),
)
INT8 = ("qwen3", "gemma3", "qwen3.5-mtp", "deepseek-v2")
RECORDED = ("qwen3", "gemma3", "qwen3.5-mtp", "lfm2", "qwen3.5-vl")
"""Those whose decoding cards replay from graphs."""

pytestmark = pytest.mark.filterwarnings("ignore:.*falling back to its reference")


def live_together(
    model: Any, seats: int, row_tokens: int, seed: int = 0, *, crowded: bool = False, **settings: Any
) -> tuple[int, int]:
    """How often rows moved for those of another, and how often a seat was emptied for another."""

    def alone(slack: int) -> Session:
        [session] = opened_seats(model, 1, slack_tokens=slack, **settings)
        return session

    lives = shared_lives(alone, opened_seats(model, seats, row_tokens, **settings), row_tokens, seed)
    lives.go_on(EVENTS, crowded=crowded)
    return lives.slid, lives.emptied


@pytest.mark.parametrize("family", PLAIN)
def test_two_seats_are_what_each_read(family: str) -> None:
    """Rows for both: nothing is ever lost."""
    assert live_together(model_of(family), 2, 2 * CONTEXT) == (0, 0)


@pytest.mark.parametrize("family", PLAIN)
def test_three_seats_that_are_in_each_others_way_are_what_each_read(family: str) -> None:
    """Ranges of rows slide; one is emptied if all do not fit, and reads anew."""
    slid, emptied = live_together(model_of(family), 3, CROWDED_ROWS, crowded=True)
    assert slid
    assert emptied


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("family", ["qwen3", "qwen3.5-mtp"])
def test_seats_are_what_each_read_on_any_number_of_stages(family: str, stages: int) -> None:
    live_together(model_of(family), 3, CROWDED_ROWS, 1, crowded=True, stages=stages)


@pytest.mark.parametrize("family", INT8)
def test_seats_of_int8_rows_are_what_each_read(family: str) -> None:
    live_together(model_of(family), 3, CROWDED_ROWS, 2, crowded=True, kv_format="int8")


@pytest.mark.parametrize("family", ["qwen3", "qwen3.5"])
def test_seats_over_quantised_weights_are_what_each_read(family: str) -> None:
    live_together(quantised_model(family, "int4"), 3, CROWDED_ROWS, 3, crowded=True, stages=1)


@pytest.fixture
def _no_triton() -> Iterator[None]:
    with without_triton():
        yield


@pytest.mark.usefixtures("_no_triton")
@pytest.mark.parametrize("family", RECORDED)
def test_seats_that_replay_graphs_are_what_each_read(family: str) -> None:
    model = model_of(family)

    def recorded(*sessions: Session) -> tuple[Session, ...]:
        for session in sessions:
            record_steps(session)
            record_chunks(session, BATCH)
        return sessions

    def alone(slack: int) -> Session:
        [session] = recorded(*opened_seats(model, 1, slack_tokens=slack))
        return session

    lives = shared_lives(alone, recorded(*opened_seats(model, 3, CROWDED_ROWS)), CROWDED_ROWS, 0)
    lives.go_on(EVENTS, crowded=True)
    assert lives.slid


def test_a_restore_finds_room_beside_who_came_meanwhile() -> None:
    model = tiny_model()
    one, two = opened_seats(model, 2)
    one.extend(token_ids(60))
    plan = host_transfer(one, 60, block_tokens=32)
    plan = replace(plan, checksums=capture(one, plan).rows)
    one.reset()
    two.extend(token_ids(100, 2))
    assert one.base == two.base
    restore(one, plan)
    for session, tokens in ((one, token_ids(60)), (two, token_ids(100, 2))):
        [alone] = opened_seats(model, 1)
        alone.extend(tokens)
        assert torch.equal(session.step(3), alone.step(3))


def test_each_seat_is_steered_as_its_turn_says() -> None:
    model = tiny_model()
    steering = Steering(b"up", {1: torch.linspace(-1.0, 1.0, model.config.hidden_size).numpy()})
    one, two = opened_seats(model, 2)
    for session, used in ((one, steering), (two, Steering()), (one, steering), (two, Steering())):
        session.steer(used)
        assert session.steering_digest == used.digest
        session.extend(token_ids(20))
    for session, used in ((one, steering), (two, Steering())):
        [alone] = opened_seats(model, 1)
        alone.steer(used)
        session.steer(used)
        alone.extend(token_ids(20))
        alone.extend(token_ids(20))
        assert torch.equal(session.step(3), alone.step(3))


def test_one_seat_lies_where_it_always_did() -> None:
    [session] = opened_seats(tiny_model(), 1)
    assert session.arenas[0].all_rows is session.arenas[0].rows
    assert len(session.arenas[0].rows) == CONTEXT
    assert not session.caches[0].has_neighbours
