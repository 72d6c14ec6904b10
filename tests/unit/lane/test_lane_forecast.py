"""What turns are expected to need, against sums done by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from parkd.lane.answer import Answer
from parkd.lane.cost import CostMeter
from parkd.lane.forecast import FIRST_ANSWER_TOKENS, FIRST_TOKEN_S, LEAST_SWITCH_S, Forecast
from parkd.lane.turn import Turn
from parkd.types import (
    CacheOutcome,
    CacheReport,
    ConversationKey,
    PromptIdentity,
    Timings,
    TurnClass,
    TurnRequest,
)
from tests.fakes.engine import FakeEngine

READ_S = 0.002
CONTEXT = 8192


def turn(length: int = 1000, **request: int) -> Turn:
    units = np.arange(length, dtype=np.uint64)
    prompt = PromptIdentity(ConversationKey(b"k" * 16, b""), units.view(np.int64), units, ())
    return Turn("r", "-", TurnRequest(**request), prompt, 0.0, 0.0)


def forecast(max_output_tokens: int | None = None) -> Forecast:
    costs = CostMeter(monotonic=lambda: 0.0, ram_bytes_per_s=1e9)
    costs.note_read(1000, 1000 * READ_S)
    engine = FakeEngine(context_tokens=CONTEXT)
    return Forecast(engine.info, costs, max_output_tokens)


def test_a_turn_that_waits_reads_all_of_its_prompt_unless_its_start_is_known() -> None:
    some = turn()
    assert forecast().work(some).first_s == pytest.approx(1000 * READ_S)
    some.start_cost_s = 0.3
    work = forecast().work(some)
    assert work.first_s == 0.3
    assert work.left_s == pytest.approx(0.3 + FIRST_ANSWER_TOKENS * FIRST_TOKEN_S)


def test_a_turn_that_reads_needs_the_rest() -> None:
    some = turn()
    some.report = CacheReport(CacheOutcome.LIVE, 1000, 400)
    assert forecast().work(some).first_s == pytest.approx(600 * READ_S + FIRST_TOKEN_S)


@pytest.mark.parametrize(
    ("limit", "server", "said", "left"),
    [(10, None, 0, 10), (None, 20, 0, 20), (5000, None, 100, 200), (5000, None, 400, 400), (450, None, 400, 50)],
)
def test_an_answer_is_as_long_as_others_or_twice_as_long_as_it_is(
    limit: int | None, server: int | None, said: int, left: int
) -> None:
    some = replace(turn(), request=TurnRequest(max_output_tokens=limit))
    some.answer = Answer(output_tokens=said) if said else None
    some.start_cost_s = 0.0
    work = forecast(server).work(some)
    assert work.left_s == pytest.approx(left * FIRST_TOKEN_S)
    assert work.first_s == 0.0


def test_no_answer_is_longer_than_the_context() -> None:
    some = turn(CONTEXT - 7)
    some.start_cost_s = 0.0
    assert forecast().work(some).left_s == pytest.approx(7 * FIRST_TOKEN_S)


def test_it_learns_from_answers_of_the_class() -> None:
    learned, batch = forecast(), turn()
    batch.kind, batch.start_cost_s = TurnClass.BATCH, 0.0
    batch.timings = Timings(output_tokens=1001, decode_s=10.0)
    for _ in range(60):
        learned.note_answer(batch)
    assert learned.work(batch).left_s == pytest.approx(1001 * 0.01, rel=0.01)
    chat = turn()
    chat.start_cost_s = 0.0
    assert learned.work(chat).left_s == pytest.approx(FIRST_ANSWER_TOKENS * 0.01, rel=0.01)
    learned.note_answer(turn())  # one without tokens teaches nothing
    assert learned.work(chat).left_s == pytest.approx(FIRST_ANSWER_TOKENS * 0.01, rel=0.01)


def test_switching_takes_what_it_took() -> None:
    some = forecast()
    assert some.work(turn(10)).switch_s == LEAST_SWITCH_S
    for _ in range(60):
        some.note_switch(turn(8000), 0.5)
    assert some.work(turn(8000)).switch_s == pytest.approx(0.5, rel=0.01)
    assert some.work(turn(4000)).switch_s == pytest.approx(0.25, rel=0.01)


def test_an_engine_that_cannot_pause_says_so() -> None:
    engine = FakeEngine()
    engine.info = replace(engine.info, can_pause=False)
    assert forecast().work(turn()).can_pause
    assert not Forecast(engine.info, CostMeter()).work(turn()).can_pause
