"""Capture and restore of all stages as one snapshot. A restore makes all stages live, or none.

    capture   check plan -> copy out all stages -> checksums            the live state stays
    restore   check plan -> copy in all stages -> compare checksums -> commit the position
              |-- SnapshotMismatch: untouched |-- SnapshotDamaged: position 0

    restore_and_read             stage 0  copy in ......... sums | the next tokens
                                 stage 1  copy in .......... sums       | the next tokens
                                 host     queues all of it ............................. compares; damaged: reset

A plan says which rows are copied from or to which host buffers. The engine does not care who keeps the bytes between a
capture and a restore. Any object with the attributes of `SnapshotPlan` works as a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from parkd_engine.errors import EngineError, SnapshotDamaged, StageFailed
from parkd_engine.moves.capture_in_flight import CaptureInFlight, StageCapture
from parkd_engine.moves.checksum import WeightedSum
from parkd_engine.moves.snapshot_checks import check, check_capture, check_restore, compare
from parkd_engine.moves.transfer import CopySteps, Direction, move_stages
from parkd_engine.session import Session

Bytes = npt.NDArray[np.uint8]
Sums = npt.NDArray[np.uint64]


class Run(Protocol):
    """Rows `[start, stop)` of one stage, and the host buffer they are copied from or to."""

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
    """The plan that `capture` and `restore` take. `SnapshotPlan` documents the fields."""

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
    """In ascending order; together they cover `[start, stop)` of the plan without gaps."""
    fixed: tuple[FixedPart, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class SnapshotPlan:
    """A copy of the rows `[start, stop)` of every stage, in one direction.

    Blocks begin at absolute multiples of `block_tokens`. `start` is such a multiple, or equals `stop` if only fixed
    state is copied. There is one checksum per block and stage, over the rows of the block inside `[start, stop)`.
    """

    layout_digest: bytes
    start: int
    stop: int
    block_tokens: int
    stages: tuple[StagePlan, ...]
    checksums: Sums | None = None
    """`[blocks, stages]`; required for a restore."""
    fixed_checksums: Sums | None = None
    """`[fixed parts, stages]`; required for a restore with fixed parts."""
    resume_at: int | None = None
    """For a restore: the session's position afterwards; None means `stop`. A checksum covers a whole block, so later
    rows of the last block are copied and compared too, but are not live afterwards."""

    @property
    def position(self) -> int:
        """The session's position after a restore. The fixed state is of this position too."""
        return self.stop if self.resume_at is None else self.resume_at


@dataclass(frozen=True, slots=True, eq=False)
class SnapshotChecksums:
    rows: Sums
    """`[blocks, stages]`."""
    fixed: Sums
    """`[fixed parts, stages]`."""


DEFAULT_STEPS = CopySteps()


def host_plan(session: Session, stop: int, *, start: int = 0, block_tokens: int = 256) -> SnapshotPlan:
    """A plan for the rows `[start, stop)` that owns its host buffers, one run per stage; for use without a store."""
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

    Fixed parts can be of the current position and of any checkpoint. The live state does not change. Raises
    SnapshotMismatch, and StageFailed if a copy fails; the buffers' content is then undefined.
    """
    check_capture(session, plan)
    try:
        states = [session.fixed_state.bytes_at(part.position) for part in plan.stages[0].fixed]
        before_write = session.captures.before_write
        sums = move_stages(session.arenas, plan, session.checksum, Direction.OUT, steps, before_write, states)
    except Exception as error:
        raise StageFailed(getattr(error, "stage", 0), "capture", error) from error
    return SnapshotChecksums(*sums)


def start_capture(session: Session, plan: Plan, *, steps: CopySteps = DEFAULT_STEPS) -> CaptureInFlight | None:
    """Starts a capture that runs while the engine computes. Work that would overwrite its rows waits, on the GPU, until
    they are copied.

    Returns None if a stage is on the CPU, where this is not possible. Fixed state is taken from checkpoints or
    clones, which the next tokens do not change. The buffers belong to the capture until its `wait` returns. Raises the
    errors of `capture`.
    """
    if any(arena.device.type != "cuda" for arena in session.arenas):
        return None
    check_capture(session, plan)
    assert isinstance(session.checksum, WeightedSum), "the kind that cards compute"
    stages = []
    try:
        parts = [session.fixed_state.copies_at(part.position) for part in plan.stages[0].fixed]
        for index, (arena, move) in enumerate(zip(session.arenas, plan.stages, strict=True)):
            fixed = [part[index] for part in parts]
            stages.append(StageCapture(arena, plan, move, session.checksum, steps.device, fixed))
    except Exception as error:
        raise StageFailed(len(stages), "capture", error) from error
    capture_in_flight = CaptureInFlight(stages, -(-(plan.stop - plan.start) // plan.block_tokens))
    session.captures.add(capture_in_flight)
    return capture_in_flight


def restore(session: Session, plan: Plan, *, steps: CopySteps = DEFAULT_STEPS) -> None:
    """Restores the planned state: the rows `[0, plan.position)` are live afterwards, and that is the position.

    The rows `[0, plan.start)` must be live already and are kept. Raises SnapshotMismatch before anything is written,
    and SnapshotDamaged after every stage was reset.
    """
    _restore(session, plan, steps)


def restore_and_read(
    session: Session,
    plan: Plan,
    token_ids: npt.NDArray[np.int64],
    *,
    checkpoint_at: Sequence[int] = (),
    steps: CopySteps = DEFAULT_STEPS,
) -> None:
    """Does `restore`, then reads `token_ids` as `Session.extend` does.

    The forward passes are queued while rows are still being copied; each GPU starts when its own rows have arrived.
    If the rows were damaged, they and everything computed from them are discarded. Raises the errors of `restore` and
    `extend`; after any error but SnapshotMismatch the session is empty.
    """
    if not _may_be_read_unchecked(session):
        restore(session, plan, steps=steps)
        try:
            session.extend(token_ids, checkpoint_at=checkpoint_at)
        except BaseException:
            session.reset()
            raise
        return

    def read() -> None:
        for arena in session.arenas:
            if arena.device.type == "cuda":
                # Wait for the checksums too: the forward overwrites rows of the last block, and fixed state.
                torch.cuda.current_stream(arena.device).wait_stream(arena.streams.sums)
        session.adopt(plan.position, kept=plan.start)
        session.extend(token_ids, checkpoint_at=checkpoint_at)

    _restore(session, plan, steps, read)


def _may_be_read_unchecked(session: Session) -> bool:
    """Whether a forward over damaged state can do no more than give wrong numbers. False if the state holds indices
    into memory: a wrong index would destroy the CUDA context."""
    fields = [field for arena in session.arenas for field in (*arena.layout.row_fields, *arena.layout.fixed_fields)]
    return all(field.dtype.is_floating_point or field.dtype == torch.int8 for field in fields)


def _restore(session: Session, plan: Plan, steps: CopySteps, read: Callable[[], None] | None = None) -> None:
    """Checks, copies, compares and commits. `read`, if given, commits and reads tokens before the comparison."""
    check(session, plan)
    check_restore(session, plan)
    states = [[arena.fixed for arena in session.arenas] for _ in plan.stages[0].fixed]
    before_write = session.captures.before_write
    try:
        sums = move_stages(session.arenas, plan, session.checksum, Direction.IN, steps, before_write, states, read)
        compare(plan, *sums)
        if read is None:
            session.adopt(plan.position, kept=plan.start)
    except EngineError:
        session.reset()
        raise
    except Exception as error:
        session.reset()
        raise SnapshotDamaged(f"the restore broke off: {type(error).__name__}: {error}") from error
    except BaseException:
        session.reset()
        raise
