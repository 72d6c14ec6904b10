"""Seats on a card: each conversation has the bits that it has alone on an engine with one seat."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parkd_engine import Session, host_transfer
from parkd_engine.moves.snapshot import capture, start_capture
from parkd_engine.together import Together

from parkd.engine_adapter.torch_engine import loading
from parkd.engine_adapter.torch_engine.engine import TorchEngine
from tests.gpu.gpu_kit import ids, opened, use_shapes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CONTEXT, BATCH, STEPS, SEATS = 8192, 1024, 6, 3
TALKS = tuple((seed, tokens) for seed, tokens in enumerate((2500, 1100, 3900), 1))
ROWS = 8192
"""Of all seats together: those of the three talks and little more, so that ranges slide."""


@pytest.fixture(autouse=True)
def _shapes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    use_shapes(monkeypatch)
    yield
    torch.cuda.empty_cache()


def engine_of(kind: str, folder: Path, **layout: Any) -> TorchEngine:
    sizes = {"context_tokens": CONTEXT, "batch_tokens": BATCH, "draft_tokens": 2 if kind.startswith("drafting") else 0}
    return opened(kind, ("cuda:0",), folder, **{**sizes, **layout})


def sessions_of(engine: TorchEngine) -> list[Session]:
    return [seat.session for seat in engine.seats]  # type: ignore[attr-defined]


class Talk:
    """Reads its prompt in pieces and then decodes given tokens, one piece of work at a time."""

    def __init__(self, session: Session, seed: int, tokens: int) -> None:
        self.session, self.scores = session, list[torch.Tensor]()
        prompt, said = ids(tokens, seed), ids(STEPS, 10 + seed)
        places = [*range(0, tokens, 1300), tokens]
        self.work: list[Any] = [prompt[first:last] for first, last in pairwise(places)]
        self.work += [int(token) for token in said]

    def go_on(self) -> None:
        work = self.work.pop(0)
        if isinstance(work, int):
            if self.session.draft is not None:
                self.session.guess(work, 2, lambda logits: self._note(logits))
            self._note(self.session.step(work))
        else:
            self.session.extend(work, checkpoint_at=[self.session.position + 700])

    def _note(self, logits: torch.Tensor) -> int:
        self.scores.append(logits.clone())
        return int(logits.argmax())

    def state(self) -> list[torch.Tensor]:
        """Field by field: what lies between two fields of a row was never written."""
        session = self.session
        rows = [
            arena.field_view(field)[: session.position].clone()
            for arena in session.arenas
            for field in arena.layout.row_fields
        ]
        return rows + [fixed.clone() for fixed in session.fixed_state.live(session.position)]


@pytest.mark.parametrize("kv_format", [None, "int8"], ids=["bf16", "int8"])
@pytest.mark.parametrize("kind", ["dense", "sliding", "hybrid", "drafting-echo", "indexed"])
def test_seats_that_take_turns_have_the_bits_of_each_alone(
    kind: str, kv_format: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "indexed" and kv_format is not None:
        pytest.skip("once is enough where nothing is recorded")
    engine = engine_of(kind, tmp_path, kv_format=kv_format)
    expected = []
    for seed, tokens in TALKS:
        engine.session.reset()
        alone = Talk(engine.session, seed, tokens)
        while alone.work:
            alone.go_on()
        expected.append((alone.scores, alone.state()))
    is_recorded = engine.session.forward.decode_graph is not None
    assert is_recorded == (kind != "indexed")
    engine.close()
    del engine, alone
    monkeypatch.setattr(loading, "choose_seats", lambda *_, **__: (SEATS, ROWS))
    engine = engine_of(kind, tmp_path, kv_format=kv_format, seats=SEATS)
    try:
        talks = [Talk(session, *talk) for session, talk in zip(sessions_of(engine), TALKS, strict=True)]
        slid, random = 0, np.random.default_rng(2)
        while left := [talk for talk in talks if talk.work]:
            bases = [(talk.session.base, talk.session.position) for talk in talks]
            mine = left[int(random.integers(len(left)))]
            mine.go_on()
            slid += sum(
                rows > 0 and talk is not mine and talk.session.base != base
                for talk, (base, rows) in zip(talks, bases, strict=True)
            )
        assert slid, "rows moved under a talk"
        assert all((session.forward.decode_graph is not None) == is_recorded for session in sessions_of(engine))
        for talk, (scores, state) in zip(talks, expected, strict=True):
            assert len(talk.scores) == len(scores)
            assert all(torch.equal(*pair) for pair in zip(talk.scores, scores, strict=True))
            assert all(torch.equal(*pair) for pair in zip(talk.state(), state, strict=True))
    finally:
        engine.close()


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_rows_under_a_capture_are_copied_before_another_seat_takes_them(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "choose_seats", lambda *_, **__: (2, CONTEXT))
    engine = engine_of(kind, tmp_path, seats=2)
    try:
        one, two = sessions_of(engine)
        one.extend(ids(6000, 1))
        plan, again = host_transfer(one, 6000), host_transfer(one, 6000)
        sums = capture(one, plan)
        running = start_capture(one, again)
        assert running is not None
        two.extend(ids(7000, 2))
        assert one.position == 0, "both do not fit"
        found = running.wait()
        assert np.array_equal(found.rows, sums.rows)
        assert np.array_equal(found.fixed, sums.fixed)
        for mine, other in zip(plan.stages, again.stages, strict=True):
            for run, late in zip(mine.rows, other.rows, strict=True):
                assert np.array_equal(run.buffer, late.buffer)
    finally:
        engine.close()


@pytest.mark.parametrize("kv_format", [None, "int8"], ids=["bf16", "int8"])
@pytest.mark.parametrize("seats", [3, 8])
def test_seats_that_step_together_have_the_bits_of_steps_of_their_own(
    kv_format: str | None, seats: int, tmp_path: Path
) -> None:
    engine = engine_of("dense", tmp_path, kv_format=kv_format, seats=seats)
    try:
        sessions = sessions_of(engine)
        together = Together(sessions)
        assert together.record()
        random, found = np.random.default_rng(4), []
        for is_together in (True, False):
            for number, session in enumerate(sessions):
                session.reset()
                session.extend(ids(300 + 517 * number, number))
            scores: list[list[torch.Tensor]] = [[] for _ in sessions]
            for _ in range(12):
                chosen = [int(each) for each in random.permutation(seats)[: int(random.integers(1, seats + 1))]]
                if not is_together:
                    chosen = list(range(seats))
                groups = [chosen] if is_together else [[each] for each in chosen]
                for group in groups:
                    said = [len(scores[each]) + each for each in group]
                    for each, logits in zip(group, together.step(group, said), strict=True):
                        scores[each].append(logits)
            found.append(scores)
        for mine, alone in zip(*found, strict=True):
            assert mine
            assert all(torch.equal(*pair) for pair in zip(mine, alone, strict=False))
        [usual] = [each.forward.decode_graph for each in sessions[:1]]
        assert usual is not None
        own = sessions[0].step(5)
        sessions[0].truncate(sessions[0].position - 1)
        [other] = together.step([0], [5])
        assert (own - other).abs().max() < 0.06 * own.abs().max(), "the same but for the order of sums"
    finally:
        engine.close()
