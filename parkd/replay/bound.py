"""The most that any policy could save in this store, knowing the whole trace: an upper bound, not a policy.

A block of a prompt that was live at turn j and is next asked for at turn i saves its reading, less its restore, if it
is held in between, and so is all of the prompt before it, since state with a hole is of no use. What leaves the arenas
is parked before what comes is restored, by a copy: so both are held at once. With x the held part of each interval, the
best is the linear program

    max  sum x * benefit      such that for every turn t     sum over intervals with j <= t < i of x * bytes  <=  budget
                              and along every prompt         x never grows

which forgets that a conversation is parked whole, and all metadata: each makes the bound larger, never smaller. Every
vector of prices, one a turn, gives an upper bound by weak duality: at given prices the best of a prompt is the best of
its heads. Subgradient steps look for low prices. What turn i - 1 left in the arenas is free.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from parkd.replay.trace import TraceHeader, TurnRecord
from parkd.store.policy import Costs

STEPS = 400
PATIENCE = 15
"""Steps without progress before the aim is moved nearer."""

Floats = npt.NDArray[np.float64]


def clairvoyant_bound_s(
    header: TraceHeader, turns: Sequence[TurnRecord], costs: Costs, budget_bytes: int, *, known_s: float = 0.0
) -> float:
    """Seconds, live hits included. `known_s`, what some policy did save, speeds up the search and changes nothing else.

    Models without fixed state only: checkpoints are not accounted for. The bound then still holds, but is loose.
    """
    size = header.block_tokens
    block_bytes = size * sum(header.row_bytes)
    free_s = 0.0
    first: list[int] = []
    last: list[int] = []
    benefit: list[float] = []
    heads: list[int] = []
    left_at: dict[tuple[str, bytes], int] = {}
    for i, turn in enumerate(turns):
        before = len(first)
        for depth, block in enumerate(turn.chain[: turn.prompt_tokens // size]):
            j = left_at.get((turn.key, block))
            if j is None:
                break
            read_s = costs.reading_s(depth * size, (depth + 1) * size)
            if j == i - 1:
                free_s += read_s
                continue
            first.append(j)
            last.append(i - 1)
            benefit.append(read_s - block_bytes / costs.bytes_per_s)
        if len(first) > before:
            heads.append(before)
        left_at.update(((turn.key, block), i) for block in turn.chain)
    if not benefit:
        return free_s
    program = _Program(
        np.array(first), np.array(last), np.array(benefit), np.array(heads), budget_bytes / block_bytes, len(turns)
    )
    return free_s + program.bound_s(max(0.0, known_s - free_s))


class _Program:
    """Intervals are `[first, last]` in turns: from the one that left the block to the last before the one that asks for
    it. They are ordered by the prompts that ask, and by depth in each; `heads` are the first of each prompt."""

    def __init__(
        self,
        first: npt.NDArray[np.int64],
        last: npt.NDArray[np.int64],
        benefit: Floats,
        heads: npt.NDArray[np.int64],
        budget_blocks: float,
        turns: int,
    ) -> None:
        self._first, self._last, self._benefit, self._heads = first, last, benefit, heads
        self._budget_blocks = budget_blocks
        self._turns = turns
        self._prompt = np.repeat(np.arange(len(heads)), np.diff(np.append(heads, len(first))))
        """The prompt of each interval."""
        self._places = np.arange(len(first))

    def bound_s(self, known_s: float) -> float:
        prices = np.zeros(self._turns)
        best_prices, best = prices, float("inf")
        ahead, idle = 0.5, 0
        for _ in range(STEPS):
            value, slope = self._at(prices)
            if value < best * (1 - 1e-4):
                idle = 0
            else:
                idle += 1
            if value < best:
                best, best_prices = value, prices
            if idle > PATIENCE:
                ahead, idle, prices = ahead / 2, 0, best_prices
                value, slope = self._at(prices)
            norm = float(slope @ slope)
            aim = max(known_s, best * (1 - ahead))
            if norm == 0.0 or value <= aim:
                break
            prices = np.maximum(0.0, prices - (value - aim) / norm * slope)
        return best

    def _at(self, prices: Floats) -> tuple[float, Floats]:
        """The dual's value and a subgradient."""
        paid = np.concatenate([[0.0], np.cumsum(prices)])
        gain = self._benefit - (paid[self._last + 1] - paid[self._first])
        total = np.cumsum(gain)
        so_far = total - np.append(0.0, total)[self._heads][self._prompt]
        most = np.maximum.reduceat(so_far, self._heads)
        ends = np.where(so_far >= most[self._prompt], self._places, len(gain))
        end = np.minimum.reduceat(ends, self._heads)
        held = (self._places <= end[self._prompt]) & (most > 0)[self._prompt]
        value = float(np.maximum(most, 0.0).sum()) + self._budget_blocks * float(prices.sum())
        edges = np.zeros(self._turns + 1)
        np.add.at(edges, self._first[held], 1.0)
        np.add.at(edges, self._last[held] + 1, -1.0)
        return value, self._budget_blocks - np.cumsum(edges)[: self._turns]
