"""Capture and restore of all stages as one snapshot. A restore makes all stages live, or none.

    capture   check -> copy out all stages -> checksums            the live state stays
    restore   check -> copy in all stages -> compare checksums -> commit the position
              |-- SnapshotMismatch: untouched |-- SnapshotDamaged: position 0

    restore_and_read             stage 0  copy in ......... sums | the next tokens
                                 stage 1  copy in .......... sums       | the next tokens
                                 host     queues all of it ............................. compares; damaged: reset

A `Transfer` says which rows are copied from or to which host buffers. The engine does not care who keeps the bytes
between a capture and a restore.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from parkd.errors import EngineFailure, ParkdError, SnapshotDamaged, SnapshotMismatch, unfinished
from parkd.state import Checksums, FixedPart, RowRun, StageTransfer, Transfer
from parkd_engine.failures import is_lost, lost, stage_failed
from parkd_engine.moves.capture_in_flight import CaptureInFlight, StageCapture
from parkd_engine.moves.checksum import WeightedSum
from parkd_engine.moves.snapshot_checks import check, check_capture, check_restore, compare
from parkd_engine.moves.transfer import CopySteps, Direction, move_stages
from parkd_engine.session import Session

DEFAULT_STEPS = CopySteps()


def host_transfer(session: Session, stop: int, *, start: int = 0, block_tokens: int = 256) -> Transfer:
    """A transfer of the rows `[start, stop)` that owns its host buffers, one run per stage; for use without a store."""
    stages = []
    for arena in session.arenas:
        run = RowRun(start, stop, np.empty((stop - start) * arena.layout.row_bytes, dtype=np.uint8))
        fixed = FixedPart(stop, np.empty(arena.layout.fixed_bytes, dtype=np.uint8))
        stages.append(StageTransfer((run,), (fixed,) if session.layout.resume.needs_checkpoints else ()))
    return Transfer(session.layout.digest, start, stop, block_tokens, tuple(stages))


def capture(session: Session, transfer: Transfer, *, steps: CopySteps = DEFAULT_STEPS) -> Checksums:
    """Copies rows and fixed state of every stage into the transfer's buffers.

    Fixed parts can be of the current position and of any checkpoint. The live state does not change. Raises
    EngineFailure if there is no such state or a copy fails; the buffers' content is then undefined.
    """
    _check_capture(session, transfer)
    try:
        states = [session.fixed_state.bytes_at(part.position) for part in transfer.stages[0].fixed]
        return move_stages(
            session.arenas, transfer, session.checksum, Direction.OUT, steps, session.before_write, states
        )
    except Exception as error:
        raise stage_failed(getattr(error, "stage", 0), "capture", error) from error


def _check_capture(session: Session, transfer: Transfer) -> None:
    try:
        check_capture(session, transfer)
    except SnapshotMismatch as error:
        raise EngineFailure(unfinished(error.message)) from error


def start_capture(session: Session, transfer: Transfer) -> CaptureInFlight | None:
    """Starts a capture that runs while the engine computes. Work that would overwrite its rows waits, on the GPU, until
    they are copied.

    Returns None if a stage is on the CPU, where this is not possible. Fixed state is taken from checkpoints or
    clones, which the next tokens do not change. The buffers belong to the capture until its `wait` returns. Raises the
    errors of `capture`.
    """
    if any(arena.device.type != "cuda" for arena in session.arenas):
        return None
    _check_capture(session, transfer)
    assert isinstance(session.checksum, WeightedSum), "the kind that cards compute"
    stages = []
    try:
        parts = [session.fixed_state.copies_at(part.position) for part in transfer.stages[0].fixed]
        for index, (arena, move) in enumerate(zip(session.arenas, transfer.stages, strict=True)):
            fixed = [part[index] for part in parts]
            stages.append(StageCapture(arena, transfer, move, session.checksum, DEFAULT_STEPS.device, fixed))
    except Exception as error:
        raise stage_failed(len(stages), "capture", error) from error
    capture_in_flight = CaptureInFlight(stages, transfer.blocks)
    session.captures.add(capture_in_flight)
    return capture_in_flight


def restore(session: Session, transfer: Transfer, *, steps: CopySteps = DEFAULT_STEPS) -> None:
    """Makes the transfer's state live: the rows `[0, transfer.position)` are live afterwards, and that is the position.

    The rows `[0, transfer.start)` must be live already and are kept. Raises SnapshotMismatch before anything is
    written, and SnapshotDamaged after every stage was reset.
    """
    _restore(session, transfer, steps)


def restore_and_read(
    session: Session,
    transfer: Transfer,
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
        restore(session, transfer, steps=steps)
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
        session.adopt(transfer.position, kept=transfer.start)
        session.extend(token_ids, checkpoint_at=checkpoint_at)

    _restore(session, transfer, steps, read, len(token_ids))


def _may_be_read_unchecked(session: Session) -> bool:
    """Whether a forward over damaged state can do no more than give wrong numbers. False if the state holds indices
    into memory: a wrong index would destroy the CUDA context."""
    fields = [field for arena in session.arenas for field in (*arena.layout.row_fields, *arena.layout.fixed_fields)]
    return all(field.dtype.is_floating_point or field.dtype == torch.int8 for field in fields)


def _restore(
    session: Session, transfer: Transfer, steps: CopySteps, read: Callable[[], None] | None = None, ahead: int = 0
) -> None:
    """Checks, copies, compares and commits. `read`, if given, commits and reads `ahead` tokens before the
    comparison."""
    check(session, transfer)
    check_restore(session, transfer)
    states = [[arena.fixed for arena in session.arenas] for _ in transfer.stages[0].fixed]
    try:
        session.make_room(max(transfer.stop, transfer.position + ahead))
        sums = move_stages(
            session.arenas, transfer, session.checksum, Direction.IN, steps, session.before_write, states, read
        )
        compare(transfer, sums)
        if read is None:
            session.adopt(transfer.position, kept=transfer.start)
    except ParkdError:
        session.reset()
        raise
    except Exception as error:
        session.reset()
        broken = f"the restore broke off: {type(error).__name__}: {error}"
        if is_lost(error):
            raise lost(broken) from error
        raise SnapshotDamaged(broken) from error
    except BaseException:
        session.reset()
        raise
