"""Random load with faults for as long as is asked: `python -m tests.fault.soak --minutes 30`.

Each life has a seed of its own and is printed when it breaks, so that it can be lived again with `--seed`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

import numpy as np

from tests.lives.life import Choices, History, Step

STEPS = (
    Step("read", 3, numbers=2),
    Step("answer", 4, numbers=1),
    Step("park", 6),
    Step("restore", 5, numbers=2),
    Step("work", 8, numbers=1),
    Step("evict", 3, numbers=1),
    Step("drop", 1, numbers=1),
    Step("fail", 2, numbers=2),
    Step("mend", 2),
    Step("crash", 1, numbers=1),
    Step("change_weights", 0.3),
)
RESTART = Step("restart", 0, numbers=1)
"""Comes after any other, and seldom."""
KINDS = ("fixed state", "rows", "whole", "whole with checkpoints", "file")
"""The kind of state of a life is that of its seed."""
WHOLE_FACTOR = 4
"""States that are kept whole take about this many times as much."""


def live(seed: int, steps: int, kind: str | None = None) -> Counter[str]:
    """One life. Raises what it finds."""
    from tests.fault.random_life import RandomLife

    rng = np.random.default_rng(seed)
    kind = kind or KINDS[seed % len(KINDS)]
    factor = 1 if kind in ("rows", "fixed state") else WHOLE_FACTOR
    ram, disk = int(rng.integers(60_000, 300_000)), int(rng.integers(100_000, 1_500_000))
    life = RandomLife(seed, kind, ram * factor, disk * factor)
    choices, history = Choices(rng), History(f"{seed} of kind {kind}")
    with history.told():
        for step in choices.steps(STEPS, steps):
            getattr(life, history.note(step))(*choices.numbers(step.numbers))
            life.check()
            if choices.chance(0.01):
                getattr(life, history.note(RESTART))(int(choices.chance(0.5)))
        life.end()
    counts = Counter(life.counts)
    counts["operations"] = life.fs.operations
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--steps", type=int, default=400, help="in one life")
    parser.add_argument("--seed", type=int, help="live this one life only")
    parser.add_argument("--first", type=int, default=0, help="the first life's seed")
    given = parser.parse_args()
    if given.seed is not None:
        print(dict(live(given.seed, given.steps)))
        return 0
    began, totals, seed = time.monotonic(), Counter[str](), given.first
    while time.monotonic() - began < given.minutes * 60:
        try:
            totals += live(seed, given.steps)
        except BaseException:
            print(f"broken: --seed {seed} --steps {given.steps}", flush=True)
            raise
        seed += 1
        if (seed - given.first) % 200 == 0:
            print(f"{time.monotonic() - began:6.0f} s  {seed - given.first} lives  {dict(totals)}", flush=True)
    print(f"nothing wrong in {seed - given.first} lives, {given.minutes:.1f} min: {dict(totals)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
