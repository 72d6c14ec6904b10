"""Checks a plan before a snapshot is copied, and the checksums afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from parkd_engine.errors import SnapshotDamaged, SnapshotMismatch
from parkd_engine.session import Session

if TYPE_CHECKING:
    from parkd_engine.moves.snapshot import Bytes, Plan, Sums


def check_capture(session: Session, plan: Plan) -> None:
    """Checks that the live state holds everything the plan asks for. Raises SnapshotMismatch."""
    check(session, plan)
    if plan.stop > session.position:
        raise SnapshotMismatch(f"rows up to {plan.stop} are asked for; the session has {session.position}")
    for index, stage in enumerate(plan.stages):
        buffers = [run.buffer for run in stage.rows] + [part.buffer for part in stage.fixed]
        if not all(buffer.flags.writeable for buffer in buffers):
            raise SnapshotMismatch(f"stage {index}: a buffer cannot be written to")
        known = {session.position, *session.checkpoints}
        for part, first in zip(stage.fixed, plan.stages[0].fixed, strict=True):
            if part.position not in known or part.position != first.position:
                places = ", ".join(map(str, sorted(known)))
                raise SnapshotMismatch(f"stage {index}: the fixed state is that of position {places} only")


def check(session: Session, plan: Plan) -> None:
    """Checks what capture and restore have in common, for all stages. Raises SnapshotMismatch."""
    if plan.layout_digest != session.layout_digest:
        raise SnapshotMismatch("the snapshot's layout is not this engine's")
    if len(plan.stages) != len(session.arenas):
        raise SnapshotMismatch(f"the snapshot has {len(plan.stages)} stages, the engine {len(session.arenas)}")
    # Fixed state alone can be of any position, since its rows are in the store already.
    has_rows = plan.start != plan.stop
    if plan.block_tokens < 1 or (has_rows and plan.start % plan.block_tokens) or not 0 <= plan.start <= plan.stop:
        raise SnapshotMismatch(f"rows [{plan.start}, {plan.stop}) do not begin at a block of {plan.block_tokens}")
    if plan.stop > session.context_tokens:
        raise SnapshotMismatch(f"{plan.stop} rows do not fit a context of {session.context_tokens}")
    has_fixed = any(arena.layout.fixed_bytes for arena in session.arenas)
    if len({len(stage.fixed) for stage in plan.stages}) > 1 or (plan.stages[0].fixed and not has_fixed):
        raise SnapshotMismatch("the fixed parts are not the same for all stages, or the model has no fixed state")
    for index, (stage, arena) in enumerate(zip(plan.stages, session.arenas, strict=True)):
        reached = plan.start
        for run in stage.rows:
            if run.start != reached or run.stop <= run.start:
                raise SnapshotMismatch(f"stage {index}: a run [{run.start}, {run.stop}) where {reached} should begin")
            _check_buffer(index, run.buffer, (run.stop - run.start) * arena.layout.row_bytes)
            reached = run.stop
        if reached != plan.stop:
            raise SnapshotMismatch(f"stage {index}: runs end at {reached}, not at {plan.stop}")
        for part in stage.fixed:
            _check_buffer(index, part.buffer, arena.layout.fixed_bytes)


def _check_buffer(stage: int, buffer: Bytes, nbytes: int) -> None:
    if buffer.dtype != np.uint8 or buffer.ndim != 1 or not buffer.flags.c_contiguous or buffer.nbytes != nbytes:
        raise SnapshotMismatch(
            f"stage {stage}: a buffer of {buffer.nbytes} bytes where {nbytes} contiguous ones belong"
        )


def check_restore(session: Session, plan: Plan) -> None:
    """Checks what only a restore needs. Raises SnapshotMismatch."""
    if plan.start > session.position:
        raise SnapshotMismatch(f"rows below {plan.start} must be live; the session has {session.position}")
    stages = len(plan.stages)
    blocks = -(-(plan.stop - plan.start) // plan.block_tokens)
    if plan.checksums is None or plan.checksums.shape != (blocks, stages):
        raise SnapshotMismatch(f"the snapshot lacks checksums of {blocks} blocks in {stages} stages")
    fixed = plan.stages[0].fixed
    needed = any(arena.layout.fixed_bytes for arena in session.arenas)
    if len(fixed) != (1 if needed else 0):
        raise SnapshotMismatch(f"the snapshot has {len(fixed)} fixed parts; a restore takes {int(needed)}")
    if not plan.start <= plan.position <= plan.stop:
        raise SnapshotMismatch(f"position {plan.position} is not in the rows [{plan.start}, {plan.stop})")
    if any(part.position != plan.position for stage in plan.stages for part in stage.fixed):
        raise SnapshotMismatch(f"the fixed state is not that of position {plan.position}")
    if fixed and (plan.fixed_checksums is None or plan.fixed_checksums.shape != (1, stages)):
        raise SnapshotMismatch("the snapshot lacks the checksum of its fixed state")


def compare(plan: Plan, rows: Sums, fixed: Sums) -> None:
    """Compares the checksums of the restored bytes with the plan's. Raises SnapshotDamaged, naming stage and block."""
    assert plan.checksums is not None, "checked before anything was written"
    wrong = np.argwhere(rows != plan.checksums)
    if len(wrong):
        block, stage = (int(number) for number in wrong[0])
        first = plan.start + block * plan.block_tokens
        raise SnapshotDamaged(f"stage {stage}: the block at row {first} differs from its checksum")
    if plan.fixed_checksums is not None and not np.array_equal(fixed, plan.fixed_checksums):
        raise SnapshotDamaged("the fixed state differs from its checksum")
