"""Random histories over RAM, disk, restarts, faults and stops of the machine, against what was put in."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.fault.random_life import RandomLife
from tests.fault.soak import live

numbers = st.integers(0, 999)


class TierMachine(RuleBasedStateMachine):
    """Each rule is a step of a random life; the life itself checks what it is given back."""

    layout = "rows"
    factor = 1
    """By which memory and disk are larger."""

    @initialize(ram=st.integers(60_000, 300_000), disk=st.integers(100_000, 1_000_000))
    def begin(self, ram: int, disk: int) -> None:
        self.life = RandomLife(1, self.layout, ram * self.factor, disk * self.factor)

    @rule(shared=numbers, more=numbers)
    def read_prompt(self, shared: int, more: int) -> None:
        self.life.read_prompt(shared, more)

    @rule(more=numbers)
    def go_on(self, more: int) -> None:
        self.life.go_on(more)

    @rule()
    def park(self) -> None:
        self.life.park()

    @rule(choice=numbers, stop=numbers)
    def restore(self, choice: int, stop: int) -> None:
        self.life.restore(choice, stop)

    @rule(jobs=numbers)
    def work(self, jobs: int) -> None:
        self.life.work(jobs)

    @rule(choice=numbers)
    def evict(self, choice: int) -> None:
        self.life.evict(choice)

    @rule(choice=numbers)
    def drop(self, choice: int) -> None:
        self.life.drop(choice)

    @rule(flushes=st.booleans())
    def stop(self, flushes: bool) -> None:
        self.life.stop(flushes)

    @rule(kept=numbers)
    def crash(self, kept: int) -> None:
        self.life.crash(kept)

    @rule(choice=numbers, after=numbers)
    def fault(self, choice: int, after: int) -> None:
        self.life.fault(choice, after)

    @rule()
    def mend(self) -> None:
        self.life.mend()

    @rule()
    def change_weights(self) -> None:
        self.life.change_weights()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "life"):
            self.life.check()

    def teardown(self) -> None:
        if hasattr(self, "life"):
            self.life.end()


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
