"""Capture and restore of every stage as one snapshot: all stages, or none.

    capture   check plan -> copy out all stages -> checksums            the live state stays
    restore   check plan -> copy in all stages -> compare checksums -> commit the position
              |-- SnapshotMismatch: untouched |-- SnapshotDamaged: position 0

A plan says which rows go where; who keeps the bytes between a capture and a restore is not the engine's business.
Any object with the attributes of `SnapshotPlan` will do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine.checksum import WeightedSum
from engine.copies import CaptureInFlight, StageCapture
from engine.errors import SnapshotDamaged, SnapshotMismatch, StageFailed
from engine.fixed_copies import checkpoint_of, copy_fixed_out
from engine.session import Session
from engine.transfer import CopySteps, Direction, move_stages

Bytes = npt.NDArray[np.uint8]
Sums = npt.NDArray[np.uint64]


class Run(Protocol):
    """Rows `[start, stop)` of one stage and the host bytes that hold them, or will."""

    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...
    @property
    def buffer(self) -> Bytes:
        """`[(stop - start) * row_bytes]`, contiguous."""


class Fixed(Protocol):
    """The fixed state of one stage at one position."""

    @property
    def position(self) -> int: ...
    @property
    def buffer(self) -> Bytes:
        """`[fixed_bytes]`, contiguous."""


class StageMove(Protocol):
    @property
    def rows(self) -> Sequence[Run]: ...
    @property
    def fixed(self) -> Sequence[Fixed]: ...


class Plan(Protocol):
    """What `capture` and `restore` take; `SnapshotPlan` explains it."""

    @property
    def layout_digest(self) -> bytes: ...
    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...
    @property
    def position(self) -> int: ...
    @property
    def block_tokens(self) -> int: ...
    @property
    def stages(self) -> Sequence[StageMove]: ...
    @property
    def checksums(self) -> Sums | None: ...
    @property
    def fixed_checksums(self) -> Sums | None: ...


@dataclass(frozen=True, slots=True, eq=False)
class RowRun:
    start: int
    stop: int
    buffer: Bytes


@dataclass(frozen=True, slots=True, eq=False)
class FixedPart:
    position: int
    buffer: Bytes


@dataclass(frozen=True, slots=True, eq=False)
class StagePlan:
    rows: tuple[RowRun, ...]
    """Ascending and without gaps inside `[start, stop)` of the plan."""
    fixed: tuple[FixedPart, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class SnapshotPlan:
    """One move of the rows `[start, stop)` of every stage.

    The rows are cut in blocks at absolute multiples of `block_tokens`; `start` is such a multiple. Each stage's part
    of each block (the rows of it inside `[start, stop)`) has a checksum.
    """

    layout_digest: bytes
    start: int
    stop: int
    block_tokens: int
    stages: tuple[StagePlan, ...]
    checksums: Sums | None = None
    """`[blocks, stages]`; needed by a restore."""
    fixed_checksums: Sums | None = None
    """`[fixed parts, stages]`; needed by a restore that has fixed parts."""
    resume_at: int | None = None
    """Restore only: the position that becomes live; None means `stop`. A checksum covers a whole block, so the rows
    behind this position in its block come along and are compared, and are then not live."""

    @property
    def position(self) -> int:
        """What is live after a restore; where the fixed state is true."""
        return self.stop if self.resume_at is None else self.resume_at


@dataclass(frozen=True, slots=True, eq=False)
class SnapshotChecksums:
    rows: Sums
    """`[blocks, stages]`."""
    fixed: Sums
    """`[fixed parts, stages]`."""


DEFAULT_STEPS = CopySteps()


def host_plan(session: Session, stop: int, *, start: int = 0, block_tokens: int = 256) -> SnapshotPlan:
    """A plan for the rows `[start, stop)` with host buffers of its own, one run a stage; for use without a store."""
    stages = []
    for arena in session.arenas:
        run = RowRun(start, stop, np.empty((stop - start) * arena.layout.row_bytes, dtype=np.uint8))
        fixed = FixedPart(stop, np.empty(arena.layout.fixed_bytes, dtype=np.uint8))
        stages.append(StagePlan((run,), (fixed,)))
    if not any(arena.layout.fixed_bytes for arena in session.arenas):
        stages = [StagePlan(stage.rows) for stage in stages]
    return SnapshotPlan(session.layout_digest, start, stop, block_tokens, tuple(stages))


def capture(session: Session, plan: Plan, *, steps: CopySteps = DEFAULT_STEPS) -> SnapshotChecksums:
    """Copies the planned rows and fixed state of every stage into the plan's buffers.

    Fixed parts may be of the present position and of every checkpoint. Raises SnapshotMismatch, or StageFailed when a
    copy broke; then the buffers' content means nothing. The live state stays as it is either way.
    """
    _check_capture(session, plan)
    try:
        fixed = copy_fixed_out(session, plan, steps)
        rows, _ = move_stages(
            session.arenas, _rows_of(plan), session.checksum, Direction.OUT, steps, session.captures.before_write
        )
    except Exception as error:
        raise StageFailed(getattr(error, "stage", 0), "capture", error) from error
    return SnapshotChecksums(rows, fixed)


def start_capture(session: Session, plan: Plan, *, steps: CopySteps = DEFAULT_STEPS) -> CaptureInFlight | None:
    """The same, beside what the engine does next: what overwrites these rows waits on the cards until they are copied.

    None if it cannot be done so: a stage in main memory. Fixed state is taken from checkpoints, which stay as they are
    while the next token changes what is live. The buffers belong to the capture until its `wait` has returned. Raises
    as `capture` does.
    """
    if any(arena.device.type != "cuda" for arena in session.arenas):
        return None
    _check_capture(session, plan)
    assert isinstance(session.checksum, WeightedSum), "the kind that cards compute"
    stages = []
    try:
        parts = [checkpoint_of(session, part.position) for part in plan.stages[0].fixed]
        for index, (arena, move) in enumerate(zip(session.arenas, plan.stages, strict=True)):
            fixed = [part[index] for part in parts]
            stages.append(StageCapture(arena, plan, move, session.checksum, steps.device, fixed))
    except Exception as error:
        raise StageFailed(len(stages), "capture", error) from error
    capture_in_flight = CaptureInFlight(stages, -(-(plan.stop - plan.start) // plan.block_tokens))
    session.captures.add(capture_in_flight)
    return capture_in_flight


def restore(session: Session, plan: Plan, *, steps: CopySteps = DEFAULT_STEPS) -> None:
    """Makes the rows `[0, plan.position)` the live state: the session's position is `plan.position`.

    The rows `[0, plan.start)` stay as they are and must be live. Raises SnapshotMismatch before anything is written,
    SnapshotDamaged after a reset of every stage.
    """
    _check(session, plan)
    _check_restore(session, plan)
    try:
        rows, fixed = move_stages(
            session.arenas, plan, session.checksum, Direction.IN, steps, session.captures.before_write
        )
        _compare(plan, rows, fixed)
        session.adopt(plan.position, kept=plan.start)
    except SnapshotDamaged:
        session.reset()
        raise
    except Exception as error:
        session.reset()
        raise SnapshotDamaged(f"the restore broke off: {type(error).__name__}: {error}") from error
    except BaseException:
        session.reset()
        raise


def _rows_of(plan: Plan) -> SnapshotPlan:
    stages = tuple(StagePlan(tuple(RowRun(run.start, run.stop, run.buffer) for run in s.rows)) for s in plan.stages)
    return SnapshotPlan(plan.layout_digest, plan.start, plan.stop, plan.block_tokens, stages)


def _check_capture(session: Session, plan: Plan) -> None:
    _check(session, plan)
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


def _check(session: Session, plan: Plan) -> None:
    """Everything that does not depend on the direction, for all stages."""
    if plan.layout_digest != session.layout_digest:
        raise SnapshotMismatch("the snapshot's layout is not this engine's")
    if len(plan.stages) != len(session.arenas):
        raise SnapshotMismatch(f"the snapshot has {len(plan.stages)} stages, the engine {len(session.arenas)}")
    if plan.block_tokens < 1 or plan.start % plan.block_tokens or not 0 <= plan.start <= plan.stop:
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


def _check_restore(session: Session, plan: Plan) -> None:
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


def _compare(plan: Plan, rows: Sums, fixed: Sums) -> None:
    assert plan.checksums is not None, "checked before anything was written"
    wrong = np.argwhere(rows != plan.checksums)
    if len(wrong):
        block, stage = (int(number) for number in wrong[0])
        first = plan.start + block * plan.block_tokens
        raise SnapshotDamaged(f"stage {stage}: the block at row {first} differs from its checksum")
    if plan.fixed_checksums is not None and not np.array_equal(fixed, plan.fixed_checksums):
        raise SnapshotDamaged("the fixed state differs from its checksum")
