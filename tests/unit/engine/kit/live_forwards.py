"""The forwards that a session's live state is made of, and what is parked of it.

log      [chunk 0..16) [chunk 16..30) [step 30) ...
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from parkd_engine.vision.tower import PromptImage

from parkd.state import FixedPart, RowRun, StageTransfer, Transfer
from parkd.words.steering import Steering

BLOCK = 32


@dataclass(frozen=True)
class Forward:
    """One, of which `[start, stop)` is still live."""

    how: str
    tokens: tuple[int, ...]
    start: int
    stop: int
    images: tuple[PromptImage, ...] = ()


Log = list[Forward]


def cut(log: Log, position: int) -> Log:
    kept = [forward for forward in log if forward.start < position]
    return [*kept[:-1], replace(kept[-1], stop=min(kept[-1].stop, position))] if kept else []


@dataclass(frozen=True, eq=False)
class Parked:
    log: Log
    plan: Transfer
    steering: Steering

    def part(self, start: int, position: int) -> Transfer:
        """What makes `position` live where the rows `[0, start)` are already."""
        plan = self.plan
        stop = min(-(-position // BLOCK) * BLOCK, plan.stop) if position > start else start
        stages = []
        for stage in plan.stages:
            buffer = stage.rows[0].buffer
            size = len(buffer) // plan.stop
            rows = (RowRun(start, stop, buffer[start * size : stop * size].copy()),) if stop > start else ()
            fixed = (FixedPart(f.position, f.buffer.copy()) for f in stage.fixed if f.position == position)
            stages.append(StageTransfer(rows, tuple(fixed)))
        assert plan.checksums is not None
        sums = plan.checksums[start // BLOCK : -(-stop // BLOCK)]
        index = self.places.index(position) if self.places else 0
        fixed_sums = None if plan.fixed_checksums is None else plan.fixed_checksums[index : index + 1]
        resume_at = None if stop == position else position
        return Transfer(plan.layout_digest, start, stop, BLOCK, tuple(stages), sums, fixed_sums, resume_at)

    @property
    def places(self) -> list[int]:
        """Positions of its fixed state; empty if it has none."""
        return [part.position for part in self.plan.stages[0].fixed]
