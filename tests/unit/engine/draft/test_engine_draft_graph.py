"""Steps with guesses as they are recorded for cards, run without graphs on the CPU: same answers, guesses and state,
and every guess can be taken back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from parkd_engine import Session

from tests.unit.engine.kit.core_models import VOCAB
from tests.unit.engine.kit.draft_models import (
    PROMPT,
    decoder,
    drafting,
    drafting_session,
    greedy,
    guessed,
    oracle_guess,
    prompt_ids,
    say,
)
from tests.unit.engine.kit.recordings import Replay, record_steps, without_triton

GUESSES = 2
FAMILIES = pytest.mark.parametrize("family", ["qwen3.5", "qwen3-next"])
STAGES = pytest.mark.parametrize("stages", [1, 3])


def recorded_session(family: str, stages: int, **settings: Any) -> tuple[Session, list[Replay]]:
    """With the graphs of a single step, of one with guesses, and of a guess."""
    session = drafting_session(family, stages, draft_tokens=GUESSES, **settings)
    steps, guess = record_steps(session)
    assert guess is not None
    return session, [steps[1][0], steps[1 + GUESSES][0], guess]


@pytest.fixture(autouse=True)
def _no_triton() -> Iterator[None]:
    with without_triton():
        yield


def assert_close_state(left: Session, right: Session) -> None:
    """But for rounding: attention is the reference's in the one, the engine's in the other."""
    assert left.position == right.position
    for mine, other in zip(left.arenas, right.arenas, strict=True):
        for field in mine.layout.row_fields:
            rows = (arena.field_view(field)[: left.position].float() for arena in (mine, other))
            torch.testing.assert_close(*rows, atol=1.0 if field.dtype == torch.int8 else 1e-3, rtol=0)
        for field in mine.layout.fixed_fields:
            torch.testing.assert_close(mine.fixed_view(field), other.fixed_view(field), atol=1e-3, rtol=1e-3)


@FAMILIES
@STAGES
@pytest.mark.parametrize("kv_format", [None, "int8"], ids=str)
def test_recorded_steps_with_guesses_say_what_single_steps_say(family: str, stages: int, kv_format: str | None) -> None:
    ids, count = prompt_ids(), 24
    plain = drafting_session(family, stages, draft_tokens=GUESSES, echo=True, kv_format=kv_format)
    plain.extend(ids[:-1])
    expected = greedy(plain, ids, count)
    session, (single, checked, guess) = recorded_session(family, stages, echo=True, kv_format=kv_format)
    session.extend(ids[:-1])
    decoding = decoder(session, ids)
    assert say(decoding, int(ids[-1]), count) == expected
    assert 0 < decoding.counts.accepted < decoding.counts.drafted
    assert (single.replays, guess.replays) == (0, decoding.counts.drafted)
    assert checked.replays == decoding.counts.drafted // GUESSES
    assert_close_state(session, plain)


@FAMILIES
@STAGES
def test_recorded_guesses_are_those_of_the_librarys_head(family: str, stages: int) -> None:
    model, head = drafting(family)
    session, (single, _, _) = recorded_session(family, stages)
    ids = prompt_ids()
    session.extend(ids[: PROMPT - 6])
    for position in range(PROMPT - 6, PROMPT - 1):
        [mine] = guessed(session, int(ids[position]))
        torch.testing.assert_close(mine, oracle_guess(model, head, ids[: position + 1]), atol=1e-4, rtol=0)
        session.step(int(ids[position]))
    assert single.replays == 5


@pytest.mark.parametrize("kept", range(1, GUESSES + 2))
def test_every_guess_of_a_recorded_step_can_be_taken_back(kept: int) -> None:
    """In the bits of a step whose other guesses were others."""
    ids = [int(token) for token in prompt_ids()]
    session, _ = recorded_session("qwen3.5", 2)
    other, _ = recorded_session("qwen3.5", 2)
    step = [ids[-1], *ids[:GUESSES]]
    for one, guesses in ((session, step[1:]), (other, [(token + 7) % VOCAB for token in step[1:]])):
        one.extend(ids[:-1])
        shown = [*step[:kept], *guesses[kept - 1 :]]
        one.verify(shown)
        one.truncate(PROMPT - 1 + kept)
    assert torch.equal(session.step(3), other.step(3))
    for mine, theirs in zip(session.arenas, other.arenas, strict=True):
        for field in mine.layout.row_fields:
            rows = [arena.field_view(field)[: session.position] for arena in (mine, theirs)]
            assert torch.equal(*rows), field
        for field in mine.layout.fixed_fields:
            assert torch.equal(mine.fixed_view(field), theirs.fixed_view(field)), field


@FAMILIES
def test_a_number_of_guesses_that_was_not_recorded_is_run_as_it_was(family: str) -> None:
    session, graphs = recorded_session(family, 2)
    ids = [int(token) for token in prompt_ids()]
    session.extend(ids[:-1])
    assert session.verify(ids[-1:] + ids[:1]).shape == (2, VOCAB)
    assert [graph.replays for graph in graphs] == [0, 0, 0]
    session.truncate(PROMPT)
    session.step(3)
    assert graphs[0].replays == 1
