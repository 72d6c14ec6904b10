"""A captured conversation, cut for the stages of another session."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from parkd_engine import Session

from parkd.state import Bytes, FixedPart, RowRun, StageTransfer, Transfer, part_sum, recut_between


def recut_for(plan: Transfer, old: Session, new: Session) -> Transfer:
    """The same rows and checkpoints in the layout of `new`, with checksums of their own."""
    recut = recut_between(old.layout, new.layout)
    layouts = new.layout.stages
    rows = [_garbage((plan.stop - plan.start) * layout.row_bytes) for layout in layouts]
    fixed = [[_garbage(layout.fixed_bytes) for layout in layouts] for _ in plan.stages[0].fixed]
    for stage, moved in enumerate(plan.stages):
        [run] = moved.rows
        recut.add_rows(stage, run.buffer, rows)
        for part, into in zip(moved.fixed, fixed, strict=True):
            recut.add_fixed(stage, part.buffer, into)
    places = [part.position for part in plan.stages[0].fixed]
    name, step = new.layout.checksum, plan.block_tokens
    starts = range(0, plan.stop - plan.start, step)
    sums = [
        [
            part_sum(name, part[at * layout.row_bytes : (at + step) * layout.row_bytes])
            for part, layout in zip(rows, layouts, strict=True)
        ]
        for at in starts
    ]
    fixed_sums = [[part_sum(name, part) for part in parts] for parts in fixed]
    stages = tuple(
        StageTransfer(
            (RowRun(plan.start, plan.stop, rows[stage]),),
            tuple(FixedPart(place, parts[stage]) for place, parts in zip(places, fixed, strict=True)),
        )
        for stage in range(len(layouts))
    )
    return replace(
        plan,
        layout_digest=new.layout.digest,
        stages=stages,
        checksums=np.array(sums, dtype=np.uint64).reshape(len(starts), len(layouts)),
        fixed_checksums=np.array(fixed_sums, dtype=np.uint64).reshape(len(places), len(layouts)),
    )


def _garbage(size: int) -> Bytes:
    """Bytes that are no state: what a cut leaves out of them shows."""
    return np.full(size, 0xEE, dtype=np.uint8)
