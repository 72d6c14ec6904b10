"""The vocabulary of random lives: things happen at random to a session, a server or a store, and after each of them it
must be as if it had only ever read what it holds.

    seed -> choices -> step, step, step ...        a step is a method of the life, of one of these names

    read, answer, verify    tokens are read, said one by one, or checked together
    leave, fail, lose       a client goes in the middle; the engine or a file fails in the middle; the engine is lost
    park, restore, damage   state is copied out, copied back; a bit of what is parked changes
    evict, drop             something parked leaves memory, or is gone
    go_back, forget, steer  what is live is cut, is gone, is computed otherwise from now on
    restart, crash          the process ends, the machine stops
    work, mend              what waits for the disk is done; what fails works again

What breaks off a step has its name behind that word (`fail_park`). All choices are made by one generator, so a life is
replayed by its seed. A life that goes wrong says its seed and its steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Step:
    """Something that may happen: a method of the life."""

    name: str
    weight: float
    numbers: int = 0
    """How many numbers it takes, each of `0 .. MOST_NUMBER - 1`, if it makes no choices itself."""


MOST_NUMBER = 1000


class Choices:
    """Choices of one generator."""

    def __init__(self, random: np.random.Generator) -> None:
        self.random = random

    def chance(self, share: float) -> bool:
        return bool(self.random.random() < share)

    def up_to(self, most: int) -> int:
        """1 .. most"""
        return int(self.random.integers(1, max(1, most) + 1))

    def pick(self, options: Sequence[Any]) -> Any:
        return options[int(self.random.integers(len(options)))]

    def numbers(self, count: int) -> list[int]:
        return [int(self.random.integers(0, MOST_NUMBER)) for _ in range(count)]

    def steps(self, options: Sequence[Step], count: int) -> list[Step]:
        """So many steps, by weight."""
        weights = np.array([step.weight for step in options])
        chosen = self.random.choice(len(options), count, p=weights / weights.sum())
        return [options[int(index)] for index in chosen]


class History:
    """The steps of a life so far."""

    def __init__(self, seed: object) -> None:
        self.seed = seed
        """What the life is replayed by."""
        self.names: list[str] = []

    def note(self, step: Step) -> str:
        """The step is taken now; its name."""
        self.names.append(step.name)
        return step.name

    @contextmanager
    def told(self) -> Iterator[None]:
        """What goes wrong inside says what has happened before."""
        try:
            yield
        except BaseException as error:
            error.add_note(f"life of seed {self.seed}, {len(self.names)} steps: {' '.join(self.names)}")
            raise
