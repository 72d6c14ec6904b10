"""A session's state, captured with checkpoints, and the part of it that resumes at one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from parkd_engine import Session, capture, host_transfer

from parkd.state import FixedPart, StageTransfer, Transfer


def parked(session: Session, positions: Sequence[int], stop: int) -> Transfer:
    """A capture of `[0, stop)` with the checkpoints at `positions`, where there are any."""
    positions = positions if session.fixed_state.exists else ()
    plan = host_transfer(session, stop, block_tokens=32)
    stages = [
        StageTransfer(
            stage.rows,
            tuple(FixedPart(at, np.empty(arena.layout.fixed_bytes, dtype=np.uint8)) for at in positions),
        )
        for stage, arena in zip(plan.stages, session.arenas, strict=True)
    ]
    plan = replace(plan, stages=tuple(stages))
    sums = capture(session, plan)
    return replace(plan, checksums=sums.rows, fixed_checksums=sums.fixed)


def resumed_at(plan: Transfer, position: int) -> Transfer:
    """The part of a capture that a restore to `position` takes: whole blocks, and one checkpoint."""
    size = plan.block_tokens
    stop = min(-(-position // size) * size, plan.stop)
    assert plan.fixed_checksums is not None
    places = [part.position for part in plan.stages[0].fixed]
    chosen = slice(places.index(position), places.index(position) + 1) if places else slice(0)
    stages = []
    for stage in plan.stages:
        [run] = stage.rows
        row_bytes = run.buffer.nbytes // run.stop
        rows = replace(run, stop=stop, buffer=run.buffer[: stop * row_bytes])
        stages.append(StageTransfer((rows,), stage.fixed[chosen]))
    assert plan.checksums is not None
    return replace(
        plan,
        stop=stop,
        stages=tuple(stages),
        checksums=plan.checksums[: -(-stop // size)],
        fixed_checksums=plan.fixed_checksums[chosen],
        resume_at=None if position == stop else position,
    )
