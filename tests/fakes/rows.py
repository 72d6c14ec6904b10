"""Rows of the fake engine: arithmetic over the tokens so far, one arena per stage.

    chain[t] = chain[t-1] + mix(token[t], t, steering) (64-bit, wrapping)
    row[s, t] = words (chain[t] ^ salt[s], mix(chain[t], s), ...)

The chain can be read back from any row, so a row that is wrong anywhere changes every row after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import xxhash

from parkd.errors import RestoreFailed
from parkd.state import BLOCK_TOKENS, StageLayout, StageTransfer, StateField, stage_digest

Words = npt.NDArray[np.uint64]


def mix(values: Words) -> Words:
    """The splitmix64 finaliser, element by element."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def row_words(chain: Words, stage: int, words: int) -> Words:
    """Rows of one stage, `[len(chain), words]`."""
    columns = [chain ^ _salt(stage)] + [mix(chain + np.uint64(stage * 8 + column)) for column in range(1, words)]
    return np.stack(columns, axis=1)


def chain_of(rows: Sequence[Words]) -> np.uint64:
    """The chain that the last row of every stage holds; a mixture that fits no conversation if the stages disagree."""
    held = [words[0] ^ _salt(stage) for stage, words in enumerate(rows)]
    if all(value == held[0] for value in held):
        return np.uint64(held[0])
    return np.uint64(mix(np.array([np.bitwise_xor.reduce(held)], dtype=np.uint64))[0])


def _salt(stage: int) -> np.uint64:
    return np.uint64(mix(np.array([stage + 1], dtype=np.uint64))[0])


class FakeRows:
    """The arenas of all stages, `[context_tokens, words]` each. Stages have rows of different widths."""

    def __init__(self, stages: int, context_tokens: int) -> None:
        self.widths = [2 + stage % 2 for stage in range(stages)]
        """Words in a row of each stage."""
        self.arenas = [np.zeros((context_tokens, width), dtype=np.uint64) for width in self.widths]

    @property
    def bytes(self) -> int:
        return sum(arena.nbytes for arena in self.arenas)

    def layouts(self, fixed_bytes: int) -> tuple[StageLayout, ...]:
        """`fixed_bytes` is the fixed state of each stage. A stage is one layer, whose words are called numbers."""
        layouts = []
        for stage, width in enumerate(self.widths):
            row = (StateField("words", stage, "float64", (width,), 0),)
            fixed = (StateField("last", stage, "float64", (fixed_bytes // 8,), 0),) if fixed_bytes else ()
            digest = stage_digest(stage, stage + 1, row, fixed)
            layouts.append(StageLayout(stage, stage + 1, width * 8, fixed_bytes, digest, row, fixed))
        return tuple(layouts)

    def write(self, start: int, chain: Words) -> None:
        """Writes the rows `[start, start + len(chain))`."""
        for stage, arena in enumerate(self.arenas):
            arena[start : start + len(chain)] = row_words(chain, stage, self.widths[stage])

    def last(self, position: int) -> list[Words]:
        """The row before `position`, of each stage."""
        return [arena[position - 1] for arena in self.arenas]

    def mixed(self, position: int) -> Words:
        """`[1]`: one value of all rows `[0, position)` of all stages."""
        seen = np.zeros(1, dtype=np.uint64)
        for arena in self.arenas:
            seen = mix(seen + arena[:position].sum(dtype=np.uint64))
        return seen

    def copy_out(self, stages: Sequence[StageTransfer]) -> None:
        for arena, part in zip(self.arenas, stages, strict=True):
            for run in part.rows:
                run.buffer[:] = arena[run.start : run.stop].reshape(-1).view(np.uint8)

    def copy_in(self, stages: Sequence[StageTransfer]) -> None:
        for arena, part in zip(self.arenas, stages, strict=True):
            for run in part.rows:
                arena[run.start : run.stop] = run.buffer.view(np.uint64).reshape(run.stop - run.start, -1)

    def check(self, stages: Sequence[StageTransfer], start: int, stop: int) -> None:
        """Raises RestoreFailed unless the runs of every stage cover `[start, stop)` without gaps."""
        for width, part in zip(self.widths, stages, strict=True):
            at = start
            for run in part.rows:
                if run.start != at or run.buffer.nbytes != (run.stop - run.start) * width * 8:
                    raise RestoreFailed("The parked rows have a gap or a wrong size.")
                at = run.stop
            if at != stop:
                raise RestoreFailed("The parked rows end too early.")

    def checksums(self, start: int, stop: int) -> Words:
        """`[blocks, stages]` over the arenas' own bytes."""
        edges = [start, *range((start // BLOCK_TOKENS + 1) * BLOCK_TOKENS, stop, BLOCK_TOKENS), stop]
        sums = [
            [xxhash.xxh3_64_intdigest(arena[first:last].tobytes()) for arena in self.arenas]
            for first, last in pairwise(edges)
            if last > first
        ]
        return np.array(sums, dtype=np.uint64).reshape(len(sums), len(self.arenas))
