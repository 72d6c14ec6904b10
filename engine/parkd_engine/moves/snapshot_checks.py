"""Checks a transfer before its bytes are copied, and the checksums afterwards."""

from __future__ import annotations

import numpy as np

from parkd.errors import SnapshotDamaged, SnapshotMismatch
from parkd.state import Bytes, Checksums, Transfer
from parkd_engine.session import Session


def check_capture(session: Session, transfer: Transfer) -> None:
    """Checks that the live state holds everything the transfer asks for. Raises SnapshotMismatch."""
    check(session, transfer)
    if transfer.stop > session.position:
        raise SnapshotMismatch(f"rows up to {transfer.stop} are asked for; the session has {session.position}")
    for index, stage in enumerate(transfer.stages):
        buffers = [run.buffer for run in stage.rows] + [part.buffer for part in stage.fixed]
        if not all(buffer.flags.writeable for buffer in buffers):
            raise SnapshotMismatch(f"stage {index}: a buffer cannot be written to")
        known = {session.position, *session.checkpoints}
        for part, first in zip(stage.fixed, transfer.stages[0].fixed, strict=True):
            if part.position not in known or part.position != first.position:
                places = ", ".join(map(str, sorted(known)))
                raise SnapshotMismatch(f"stage {index}: the fixed state is that of position {places} only")


def check(session: Session, transfer: Transfer) -> None:
    """Checks what capture and restore have in common, for all stages. Raises SnapshotMismatch."""
    if transfer.layout_digest != session.layout.digest:
        raise SnapshotMismatch("the snapshot's layout is not this engine's")
    if len(transfer.stages) != len(session.arenas):
        raise SnapshotMismatch(f"the snapshot has {len(transfer.stages)} stages, the engine {len(session.arenas)}")
    # Fixed state alone can be of any position, since its rows are in the store already.
    has_rows = transfer.start != transfer.stop
    if (
        transfer.block_tokens < 1
        or (has_rows and transfer.start % transfer.block_tokens)
        or not 0 <= transfer.start <= transfer.stop
    ):
        raise SnapshotMismatch(
            f"rows [{transfer.start}, {transfer.stop}) do not begin at a block of {transfer.block_tokens}"
        )
    if transfer.stop > session.context_tokens:
        raise SnapshotMismatch(f"{transfer.stop} rows do not fit a context of {session.context_tokens}")
    has_fixed = session.layout.resume.needs_checkpoints
    if len({len(stage.fixed) for stage in transfer.stages}) > 1 or (transfer.stages[0].fixed and not has_fixed):
        raise SnapshotMismatch("the fixed parts are not the same for all stages, or the model has no fixed state")
    for index, (stage, arena) in enumerate(zip(transfer.stages, session.arenas, strict=True)):
        reached = transfer.start
        for run in stage.rows:
            if run.start != reached or run.stop <= run.start:
                raise SnapshotMismatch(f"stage {index}: a run [{run.start}, {run.stop}) where {reached} should begin")
            _check_buffer(index, run.buffer, (run.stop - run.start) * arena.layout.row_bytes)
            reached = run.stop
        if reached != transfer.stop:
            raise SnapshotMismatch(f"stage {index}: runs end at {reached}, not at {transfer.stop}")
        for part in stage.fixed:
            _check_buffer(index, part.buffer, arena.layout.fixed_bytes)


def _check_buffer(stage: int, buffer: Bytes, nbytes: int) -> None:
    if buffer.dtype != np.uint8 or buffer.ndim != 1 or not buffer.flags.c_contiguous or buffer.nbytes != nbytes:
        raise SnapshotMismatch(
            f"stage {stage}: a buffer of {buffer.nbytes} bytes where {nbytes} contiguous ones belong"
        )


def check_restore(session: Session, transfer: Transfer) -> None:
    """Checks what only a restore needs. Raises SnapshotMismatch."""
    if transfer.start > session.position:
        raise SnapshotMismatch(f"rows below {transfer.start} must be live; the session has {session.position}")
    stages = len(transfer.stages)
    blocks = transfer.blocks
    if transfer.checksums is None or transfer.checksums.shape != (blocks, stages):
        raise SnapshotMismatch(f"the snapshot lacks checksums of {blocks} blocks in {stages} stages")
    fixed = transfer.stages[0].fixed
    needed = session.layout.resume.needs_checkpoints
    if len(fixed) != (1 if needed else 0):
        raise SnapshotMismatch(f"the snapshot has {len(fixed)} fixed parts; a restore takes {int(needed)}")
    if not transfer.start <= transfer.position <= transfer.stop:
        raise SnapshotMismatch(f"position {transfer.position} is not in the rows [{transfer.start}, {transfer.stop})")
    if any(part.position != transfer.position for stage in transfer.stages for part in stage.fixed):
        raise SnapshotMismatch(f"the fixed state is not that of position {transfer.position}")
    if fixed and (transfer.fixed_checksums is None or transfer.fixed_checksums.shape != (1, stages)):
        raise SnapshotMismatch("the snapshot lacks the checksum of its fixed state")


def compare(transfer: Transfer, sums: Checksums) -> None:
    """Compares the checksums of the restored bytes with the transfer's. Raises SnapshotDamaged, which names stage and
    block."""
    assert transfer.checksums is not None, "checked before anything was written"
    wrong = np.argwhere(sums.rows != transfer.checksums)
    if len(wrong):
        block, stage = (int(number) for number in wrong[0])
        first = transfer.start + block * transfer.block_tokens
        raise SnapshotDamaged(f"stage {stage}: the block at row {first} differs from its checksum")
    if transfer.fixed_checksums is not None and not np.array_equal(sums.fixed, transfer.fixed_checksums):
        raise SnapshotDamaged("the fixed state differs from its checksum")
