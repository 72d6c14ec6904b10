"""The most seconds that any policy could save in this store if it knew the whole trace: an upper bound, not a policy.

If a block of a prompt was live at turn j and is next requested at turn i, holding it in between saves the time to read
it, less the time to restore it. This requires that all of the prompt before it is held too, since state with a hole is
of no use. The outgoing conversation is parked before the incoming one is restored, and a restore copies, so both are
held at once. With x the held fraction of each interval, the best is the linear program

    max  sum x * benefit      such that for every turn t     sum over intervals with j <= t < i of x * bytes  <=  budget
                              and along every prompt         x never grows

It ignores that a conversation is parked whole, and all metadata; both can only make the bound larger. By weak duality,
any vector of prices, one per turn, gives an upper bound: at given prices, the best for a prompt is its best prefix.
Subgradient steps search for prices with a low bound. State that turn i - 1 left in the arenas is free.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from parkd.replay.trace import TraceHeader, TurnRecord
from parkd.state import Costs

STEPS = 400
PATIENCE = 15
"""Steps without progress before the target value is moved nearer."""

Floats = npt.NDArray[np.float64]


def clairvoyant_bound_s(
    header: TraceHeader, turns: Sequence[TurnRecord], costs: Costs, budget_bytes: int, *, known_s: float = 0.0
) -> float:
    """The bound in seconds, including live hits. `known_s`, the seconds that some policy saved, only speeds up the
    search.

    Checkpoints are not accounted for, so for models with fixed state the bound holds but is loose.
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
    """Intervals `[first, last]` in turns: from the turn that left the block to the last one before it is requested.
    They are ordered by the requesting prompt, then by depth; `heads` are the indices of each prompt's first."""

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
        """The index of each interval's prompt."""
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
        """The value of the dual at these prices, and a subgradient `[turns]`."""
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
