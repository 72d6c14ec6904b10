"""State that does not grow with length travels with the rows, and is true at one position only."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from parkd_engine import capture, host_transfer, restore
from parkd_engine.arenas.arena import StageArena
from parkd_engine.arenas.layout import build_layout
from parkd_engine.session import Session

from parkd.errors import EngineFailure, SnapshotDamaged, SnapshotMismatch
from parkd.state import FixedPart, StageTransfer, Transfer
from tests.unit.engine.kit.breakages import MemoryFor
from tests.unit.engine.kit.core_models import tiny_config


def session_with_fixed_state() -> Session:
    """Two stages; the first has 64 bytes of fixed state, the second none. No layers: nothing runs."""
    first, second = build_layout(tiny_config(), [(0, 2), (2, 4)], torch.float32)
    arenas = [StageArena(replace(first, fixed_bytes=64), 100, "cpu"), StageArena(second, 100, "cpu")]
    generator = torch.Generator().manual_seed(0)
    for arena in arenas:
        arena.rows.random_(0, 256, generator=generator)
        arena.fixed.random_(0, 256, generator=generator)
    stages: Any = [SimpleNamespace(num_layers=4, device=torch.device("cpu")) for _ in arenas]
    session = Session(stages, arenas)
    session.adopt(70)
    return session


def parked(session: Session) -> Transfer:
    plan = host_transfer(session, 70, block_tokens=32)
    checksums = capture(session, plan)
    assert checksums.rows.shape == (3, 2)
    assert checksums.fixed.shape == (1, 2)
    return replace(plan, checksums=checksums.rows, fixed_checksums=checksums.fixed)


def test_fixed_state_comes_back() -> None:
    session = session_with_fixed_state()
    before = [arena.fixed.clone() for arena in session.arenas]
    assert before[0].count_nonzero() > 0
    plan = parked(session)
    session.arenas[0].fixed.zero_()
    session.reset()
    restore(session, plan)
    assert session.position == 70
    assert all(arena.fixed.equal(fixed) for arena, fixed in zip(session.arenas, before, strict=True))


def test_what_was_restored_stays_where_there_is_no_memory_for_a_checkpoint_of_it() -> None:
    session = session_with_fixed_state()
    before = session.arenas[0].fixed.clone()
    plan = parked(session)
    session.reset()
    with MemoryFor(0):
        restore(session, plan)
    assert (session.position, session.checkpoints) == (70, ())
    assert session.arenas[0].fixed.equal(before)
    session.checkpoint()
    assert session.checkpoints == (70,)


def test_a_damaged_byte_of_it_reads_cold() -> None:
    session = session_with_fixed_state()
    plan = parked(session)
    plan.stages[0].fixed[0].buffer[63] ^= 1
    with pytest.raises(SnapshotDamaged, match="fixed state differs"):
        restore(session, plan)
    assert session.position == 0


def test_it_cannot_be_captured_or_restored_at_another_position() -> None:
    session = session_with_fixed_state()
    with pytest.raises(EngineFailure, match="that of position 70 only"):
        capture(session, host_transfer(session, 64, block_tokens=32))
    plan = parked(session)
    moved = tuple(replace(stage, fixed=(replace(stage.fixed[0], position=69),)) for stage in plan.stages)
    without = tuple(StageTransfer(stage.rows) for stage in plan.stages)
    short = tuple(replace(stage, fixed=(FixedPart(70, np.empty(8, dtype=np.uint8)),)) for stage in plan.stages)
    for wrong, message in (
        (replace(plan, stages=moved), "not that of position 70"),
        (replace(plan, stages=without), "0 fixed parts; a restore takes 1"),
        (replace(plan, stages=short), "stage 0: a buffer of 8 bytes where 64"),
        (replace(plan, fixed_checksums=None), "lacks the checksum of its fixed state"),
    ):
        with pytest.raises(SnapshotMismatch, match=message):
            restore(session, wrong)
    assert session.position == 70


def test_it_may_be_captured_alone_where_the_rows_are_held_already() -> None:
    """A part-parked conversation: its rows are those of blocks of another one, which go on behind its position."""
    session = session_with_fixed_state()
    rows = parked(session)
    alone = host_transfer(session, 70, start=70, block_tokens=32)
    alone = replace(alone, stages=tuple(StageTransfer((), stage.fixed) for stage in alone.stages))
    sums = capture(session, alone)
    assert (sums.rows.shape, sums.fixed.shape) == ((0, 2), (1, 2))
    joined = [StageTransfer(held.rows, fresh.fixed) for held, fresh in zip(rows.stages, alone.stages, strict=True)]
    before = [arena.fixed.clone() for arena in session.arenas]
    session.arenas[1].fixed.zero_()
    session.reset()
    restore(session, replace(rows, stages=tuple(joined), fixed_checksums=sums.fixed))
    assert all(arena.fixed.equal(fixed) for arena, fixed in zip(session.arenas, before, strict=True))


def test_rows_alone_may_be_captured_anywhere() -> None:
    session = session_with_fixed_state()
    plan = host_transfer(session, 64, block_tokens=32)
    rows_only = replace(plan, stages=tuple(StageTransfer(stage.rows) for stage in plan.stages))
    assert capture(session, rows_only).rows.shape == (2, 2)
