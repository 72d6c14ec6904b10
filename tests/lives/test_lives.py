"""A random life is replayed by its seed, and says what happened to it when it goes wrong."""

from __future__ import annotations

import numpy as np
import pytest

from tests.lives.life import Choices, History, Step

STEPS = (Step("read", 3, numbers=2), Step("park", 1), Step("crash", 0.001))


def choices(seed: int) -> Choices:
    return Choices(np.random.default_rng(seed))


def test_a_seed_gives_the_same_steps_and_numbers_again() -> None:
    def life(seed: int) -> list[object]:
        drawn = choices(seed)
        return [(step.name, drawn.numbers(step.numbers)) for step in drawn.steps(STEPS, 40)]

    assert life(1) == life(1) != life(2)


def test_steps_come_by_their_weights() -> None:
    names = [step.name for step in choices(0).steps(STEPS, 4000)]
    assert 2.5 < names.count("read") / names.count("park") < 3.5
    assert names.count("crash") < 40


def test_what_goes_wrong_says_the_seed_and_the_steps() -> None:
    history = History(17)

    def lived() -> None:
        with history.told():
            for step in STEPS[:2]:
                history.note(step)
            raise AssertionError("a row differs")

    with pytest.raises(AssertionError) as caught:
        lived()
    assert caught.value.__notes__ == ["life of seed 17, 2 steps: read park"]
