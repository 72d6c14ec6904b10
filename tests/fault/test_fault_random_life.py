"""Random histories over RAM, disk, restarts, faults and stops of the machine, against what was put in."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.fault.random_life import RandomLife
from tests.fault.soak import RESTART, STEPS, live
from tests.lives.life import MOST_NUMBER, Step

numbers = st.integers(0, MOST_NUMBER - 1)


class TierMachine(RuleBasedStateMachine):
    """Each rule is a step of a random life; the life itself checks what it is given back."""

    layout = "rows"
    factor = 1
    """By which memory and disk are larger."""

    @initialize(ram=st.integers(60_000, 300_000), disk=st.integers(100_000, 1_000_000))
    def begin(self, ram: int, disk: int) -> None:
        self.life = RandomLife(1, self.layout, ram * self.factor, disk * self.factor)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "life"):
            self.life.check()

    def teardown(self) -> None:
        if hasattr(self, "life"):
            self.life.end()


def rule_of(step: Step) -> Callable[..., None]:
    """The rule by which it happens, with numbers that are drawn."""
    names = [f"number_{index}" for index in range(step.numbers)]

    def happens(self: TierMachine, **drawn: int) -> None:
        getattr(self.life, step.name)(*(drawn[name] for name in names))

    happens.__name__ = step.name
    return rule(**dict.fromkeys(names, numbers))(happens)


for _step in (*STEPS, RESTART):
    setattr(TierMachine, _step.name, rule_of(_step))


class FixedStateMachine(TierMachine):
    layout = "fixed state"


class WholeMachine(TierMachine):
    """States that the store can't cut."""

    layout = "whole"
    factor = 4


class WholeWithCheckpointsMachine(WholeMachine):
    layout = "whole with checkpoints"


class FileMachine(WholeMachine):
    """States in files that the engine writes."""

    layout = "file"


limits = settings(
    max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
TestTiers = TierMachine.TestCase
TestTiers.settings = limits
TestTiersWithFixedState = FixedStateMachine.TestCase
TestTiersWithFixedState.settings = limits
TestTiersWithWholeStates = WholeMachine.TestCase
TestTiersWithWholeStates.settings = limits
TestTiersWithWholeStatesAndCheckpoints = WholeWithCheckpointsMachine.TestCase
TestTiersWithWholeStatesAndCheckpoints.settings = limits
TestTiersWithFiles = FileMachine.TestCase
TestTiersWithFiles.settings = limits


@pytest.mark.parametrize(
    ("seed", "kind"),
    [
        (0, "fixed state"),
        (1, "rows"),
        (2, "rows"),
        (3, "fixed state"),
        (4, "whole"),
        (5, "whole with checkpoints"),
        (6, "file"),
    ],
)
def test_a_short_soak(seed: int, kind: str) -> None:
    counts = live(seed, 150, kind)
    assert counts["job done"] > 5
    assert counts["parked"] > 5


@pytest.mark.parametrize("seed", [516, 6525])
def test_lives_that_once_broke(seed: int) -> None:
    """516: a name whose sync had failed was taken for one that stays. 6525: checkpoints that a promoted conversation
    had inherited in memory were taken for those that it has on disk."""
    assert live(seed, 400, "fixed state")["job done"] > 5
