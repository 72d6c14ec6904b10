"""Several seats over one model, and lives in them that go on in turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from parkd_engine import EngineConfig, Session
from parkd_engine.arenas.row_space import RowSpace, footprint
from parkd_engine.opening import open_seats

from tests.unit.engine.kit.core_models import head_of
from tests.unit.engine.kit.logged_session import BATCH, CONTEXT
from tests.unit.engine.kit.session_lives import Life
from tests.unit.engine.kit.vision_models import processor_of

GRAIN = 16
"""Of ranges of rows here: small, so that they are often in each other's way."""
GUESSES = 2


def opened_seats(
    model: Any,
    seats: int,
    row_tokens: int | None = None,
    *,
    stages: int = 2,
    slack_tokens: int = 6,
    kv_format: str | None = None,
    context: int = CONTEXT,
    batch_tokens: int = BATCH,
    grain: int = GRAIN,
) -> tuple[Session, ...]:
    config = EngineConfig(
        devices=("cpu",) * stages,
        context_tokens=context,
        batch_tokens=batch_tokens,
        ctx_checkpoints=3,
        draft_tokens=GUESSES,
        window_slack_tokens=slack_tokens,
        kv_format=kv_format,
        seats=seats,
    )
    return open_seats(
        model,
        config,
        processor_of(model),
        draft_model=head_of(model),
        choose_seats=None if row_tokens is None else lambda _context: (seats, row_tokens),
        row_grain=grain,
    )


class SharedLives:
    """Lives whose sessions are the seats of one engine: what happens to one must leave the others as they are."""

    def __init__(self, lives: Sequence[Life], row_tokens: int, seed: int) -> None:
        self.lives = tuple(lives)
        self.row_tokens = row_tokens
        self.slid = self.emptied = 0
        """How often rows moved for those of another, and how often a seat was emptied for another."""
        self._random = np.random.default_rng(seed)

    def go_on(self, events: int, *, crowded: bool = False) -> None:
        """So many things happen to one or another. `crowded`: each reads before, so that rows are scarce."""
        for _ in range(events):
            number = int(self._random.integers(len(self.lives)))
            life = self.lives[number]
            bases = [(each.session.base, each.session.position) for each in self.lives]
            life.session.steer(life.steering)
            if crowded:
                life.read()
            life.go_on(1)
            for each, (base, rows) in zip(self.lives, bases, strict=True):
                self.slid += each is not life and rows > 0 and each.session.position > 0 and each.session.base != base
            for other in self.lives:
                if other is not life:
                    self._look_at(other)

    def _look_at(self, other: Life) -> None:
        if other.log and not other.session.position:  # All rows together did not fit.
            other._go_to(0)
            self.emptied += 1
        other.check()


def shared_lives(
    open_alone: Callable[[int], Session], seats: Sequence[Session], row_tokens: int, seed: int
) -> SharedLives:
    """A life in each of `seats`; `open_alone` takes the slack of windows and opens what each is compared with."""

    def life(session: Session, number: int) -> Life:
        first = [session]
        return Life(lambda slack: first.pop() if first else open_alone(slack), 100 * seed + number)

    return SharedLives([life(session, number) for number, session in enumerate(seats)], row_tokens, seed)


__all__ = ["GRAIN", "RowSpace", "SharedLives", "footprint", "opened_seats", "shared_lives"]
