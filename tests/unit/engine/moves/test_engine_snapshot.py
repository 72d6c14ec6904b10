"""A conversation that was captured, overwritten and restored answers as if it had never left."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from parkd_engine import capture, host_transfer, restore, restore_and_read
from parkd_engine.moves import transfer
from parkd_engine.moves.transfer import CopySteps

from parkd.errors import EngineFailure, SnapshotDamaged, SnapshotMismatch, StageFailed
from parkd.state import FixedPart, RowRun, StageTransfer, Transfer
from tests.unit.engine.kit.core_models import (
    FAMILIES,
    assert_same,
    read_and_decode,
    tiny_model,
    tiny_session,
    token_ids,
)

BLOCK = 32
ALICE, BOB = token_ids(200), token_ids(310, seed=2)


def parked(session: Any, stop: int, start: int = 0) -> Transfer:
    """Captured rows `[start, stop)`, with their checksums."""
    plan = host_transfer(session, stop, start=start, block_tokens=BLOCK)
    return replace(plan, checksums=capture(session, plan).rows)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several pieces a block part, as with real models."""
    monkeypatch.setattr(transfer, "PIECE_BYTES", 8 * 1024)


@pytest.mark.parametrize("kv_format", [None, "int8"], ids=["full", "int8"])
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_restored_equals_never_parked(family: str, stages: int, kv_format: str | None) -> None:
    model = tiny_model(family)
    staying = tiny_session(stages, model, kv_format=kv_format)
    leaving = tiny_session(stages, model, kv_format=kv_format)
    for session in (staying, leaving):
        session.extend(ALICE[:-10])
    plan = parked(leaving, leaving.position)
    assert leaving.position == 190
    before = [arena.rows[:190].clone() for arena in leaving.arenas]
    leaving.reset()
    leaving.extend(BOB)
    restore(leaving, plan)
    assert leaving.position == 190
    for arena, rows in zip(leaving.arenas, before, strict=True):
        assert torch.equal(arena.rows[:190], rows)
    assert_same(read_and_decode(leaving, ALICE, decoded=5), read_and_decode(staying, ALICE, decoded=5))


@pytest.mark.parametrize("stop", [1, 31, 32, 33, 190])
def test_a_prefix_can_be_captured_and_continued(stop: int) -> None:
    model = tiny_model()
    session = tiny_session(2, model)
    session.extend(ALICE[:190])
    plan = parked(session, stop)
    other = tiny_session(2, model)
    other.extend(BOB)
    restore(other, plan)
    session.truncate(stop)
    timeline = np.concatenate([ALICE[:stop], BOB[:100]])
    assert_same(read_and_decode(other, timeline), read_and_decode(session, timeline))


def test_only_the_rows_behind_a_live_prefix_are_moved() -> None:
    model = tiny_model()
    session = tiny_session(2, model)
    session.extend(ALICE[:190])
    tail = parked(session, 190, start=96)
    staying = read_and_decode(session, ALICE)
    session.truncate(96)
    session.extend(BOB[96:])
    session.truncate(100)
    before = session.arenas[0].rows[:96].clone()
    restore(session, tail)
    assert session.arenas[0].rows[:96].equal(before)
    assert_same(read_and_decode(session, ALICE), staying)
    session.truncate(95)
    with pytest.raises(SnapshotMismatch, match="below 96 must be live"):
        restore(session, tail)
    assert session.position == 95


def test_runs_may_be_cut_anywhere_and_differ_between_stages() -> None:
    model = tiny_model()
    session = tiny_session(2, model)
    session.extend(ALICE[:190])
    whole = parked(session, 190)
    staying = read_and_decode(session, ALICE)
    stages = []
    for stage, cuts in zip(whole.stages, ((0, 5, 64, 190), (0, 33, 34, 190)), strict=True):
        row_bytes = stage.rows[0].buffer.nbytes // 190
        runs = [RowRun(a, b, stage.rows[0].buffer[a * row_bytes : b * row_bytes].copy()) for a, b in pairwise(cuts)]
        stages.append(StageTransfer(tuple(runs)))
    cut = replace(whole, stages=tuple(stages))
    assert np.array_equal(capture(session, cut).rows, whole.checksums)
    session.reset()
    session.extend(BOB)
    restore(session, cut)
    assert_same(read_and_decode(session, ALICE), staying)


@pytest.mark.parametrize("position", [160, 161, 190])
def test_a_restore_can_resume_inside_its_last_block(position: int) -> None:
    """The block's checksum covers rows behind the position too: they are compared, but not live."""
    model = tiny_model()
    session = tiny_session(2, model)
    session.extend(ALICE[:190])
    plan = parked(session, 190)
    session.truncate(position)
    staying = read_and_decode(session, np.concatenate([ALICE[:position], BOB[:60]]))
    session.reset()
    session.extend(BOB)
    restore(session, replace(plan, resume_at=position))
    assert session.position == position
    assert_same(read_and_decode(session, np.concatenate([ALICE[:position], BOB[:60]])), staying)
    plan.stages[1].rows[0].buffer[-1] ^= 1
    with pytest.raises(SnapshotDamaged):
        restore(session, replace(plan, resume_at=position))
    with pytest.raises(SnapshotMismatch, match="not in the rows"):
        restore(session, replace(plan, resume_at=191))


def assert_cold_and_correct(session: Any, model: Any) -> None:
    assert session.position == 0
    assert_same(read_and_decode(session, ALICE), read_and_decode(tiny_session(len(session.stages), model), ALICE))


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_damaged_byte_in_any_block_of_any_stage_reads_cold(stages: int) -> None:
    model = tiny_model()
    session = tiny_session(stages, model)
    session.extend(ALICE[:100])
    plan = parked(session, 100)
    for stage in range(stages):
        for row in (0, 40, 99):
            buffer = plan.stages[stage].rows[0].buffer
            at = row * session.arenas[stage].layout.row_bytes + 7
            buffer[at] ^= 1
            session.reset()
            session.extend(BOB[:50])
            with pytest.raises(SnapshotDamaged, match=f"stage {stage}: the block at row {row // BLOCK * BLOCK} "):
                restore(session, plan)
            assert session.position == 0
            buffer[at] ^= 1
    assert_cold_and_correct(session, model)
    session.reset()
    restore(session, plan)
    assert session.position == 100


def mismatches(session: Any, plan: Transfer) -> Iterator[tuple[str, Transfer]]:
    """Plans that must be refused before anything is written."""
    first, last = plan.stages[0], plan.stages[-1]
    run = last.rows[0]
    assert plan.checksums is not None

    def with_last(*runs: RowRun, fixed: tuple[FixedPart, ...] = ()) -> Transfer:
        return replace(plan, stages=(*plan.stages[:-1], StageTransfer(runs, fixed)))

    yield "layout", replace(plan, layout_digest=bytes(16))
    yield "1 stages", replace(plan, stages=(first,))
    yield "3 stages", replace(plan, stages=(*plan.stages, last))
    yield "contiguous ones", with_last(RowRun(0, 100, run.buffer[:-8]))
    yield "contiguous ones", with_last(RowRun(0, 100, np.concatenate([run.buffer, run.buffer])[::2]))
    yield "contiguous ones", with_last(RowRun(0, 100, run.buffer.view(np.int8)))  # type: ignore[arg-type]
    yield "runs end at 99", with_last(RowRun(0, 99, run.buffer[: -session.arenas[-1].layout.row_bytes]))
    yield "runs end at 0", with_last()
    yield "where 0 should begin", with_last(RowRun(1, 100, run.buffer))
    yield "where 100 should begin", with_last(run, RowRun(99, 100, run.buffer))
    yield "do not begin at a block", replace(plan, start=5)
    yield "do not begin at a block", replace(plan, block_tokens=0)
    yield "do not fit a context", replace(plan, stop=5000)
    yield "lacks checksums", replace(plan, checksums=None)
    yield "lacks checksums", replace(plan, checksums=plan.checksums[:-1])
    yield "lacks checksums", replace(plan, checksums=plan.checksums[:, :1])
    yield "fixed parts", with_last(run, fixed=(FixedPart(100, run.buffer[:0]),))


def test_what_does_not_belong_is_refused_before_anything_is_written() -> None:
    model = tiny_model()
    session = tiny_session(2, model)
    session.extend(ALICE[:100])
    good = parked(session, 100)
    session.reset()
    session.extend(BOB[:90])
    before = [arena.rows.clone() for arena in session.arenas]
    count = 0
    for message, plan in mismatches(session, good):
        with pytest.raises(SnapshotMismatch, match=message):
            restore(session, plan)
        count += 1
    assert count == 17
    assert session.position == 90
    assert all(arena.rows.equal(rows) for arena, rows in zip(session.arenas, before, strict=True))
    undisturbed = tiny_session(2, model)
    undisturbed.extend(BOB[:90])
    assert_same(read_and_decode(session, BOB[:95]), read_and_decode(undisturbed, BOB[:95]))


def test_a_snapshot_of_another_split_or_model_shape_is_refused() -> None:
    model = tiny_model()
    two = tiny_session(2, model)
    two.extend(ALICE[:50])
    plan = parked(two, 50)
    for other in (tiny_session(1, model), tiny_session(3, model), tiny_session(2, tiny_model(num_key_value_heads=3))):
        with pytest.raises(SnapshotMismatch, match="layout"):
            restore(other, plan)


class FailingCopy:
    """Copies until the `fail_at`-th call, which writes nothing and raises."""

    def __init__(self, fail_at: int | None) -> None:
        self.fail_at = fail_at
        self.calls = 0
        self.lock = threading.Lock()

    def __call__(self, destination: Any, source: Any) -> None:
        with self.lock:
            call, self.calls = self.calls, self.calls + 1
        if call == self.fail_at:
            raise OSError("injected")
        np.copyto(destination, source)


@pytest.mark.parametrize("stages", [1, 3])
def test_a_restore_that_fails_at_any_copy_reads_cold(stages: int) -> None:
    model = tiny_model()
    session = tiny_session(stages, model)
    session.extend(ALICE[:100])
    plan = parked(session, 100)
    counting = FailingCopy(None)
    restore(session, plan, steps=CopySteps(host=counting))
    assert counting.calls >= 4 * stages
    expected = read_and_decode(tiny_session(stages, model), ALICE[:70])
    for fail_at in range(counting.calls):
        session.reset()
        session.extend(BOB[:60])
        with pytest.raises(SnapshotDamaged, match="injected"):
            restore(session, plan, steps=CopySteps(host=FailingCopy(fail_at)))
        assert session.position == 0
        assert_same(read_and_decode(session, ALICE[:70]), expected)


def test_a_copy_that_silently_does_nothing_is_found() -> None:
    model = tiny_model()
    session = tiny_session(2, model)
    session.extend(ALICE[:100])
    plan = parked(session, 100)
    session.reset()
    session.extend(BOB[:100])
    skipped: list[int] = []

    def skip_one(destination: Any, source: Any) -> None:
        skipped.append(1)
        if len(skipped) != 5:
            np.copyto(destination, source)

    with pytest.raises(SnapshotDamaged, match="differs from its checksum"):
        restore(session, plan, steps=CopySteps(host=skip_one))
    assert_cold_and_correct(session, model)


def test_an_interrupt_during_a_restore_leaves_it_cold() -> None:
    model = tiny_model()
    session = tiny_session(2, model)
    session.extend(ALICE[:100])
    plan = parked(session, 100)

    def interrupt(destination: Any, source: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        restore(session, plan, steps=CopySteps(host=interrupt))
    assert_cold_and_correct(session, model)


def test_a_capture_that_fails_at_any_copy_leaves_the_live_state() -> None:
    model = tiny_model()
    session = tiny_session(2, model)
    session.extend(ALICE[:-1])
    plan = host_transfer(session, 100, block_tokens=BLOCK)
    counting = FailingCopy(None)
    capture(session, plan, steps=CopySteps(host=counting))
    for fail_at in range(counting.calls):
        with pytest.raises(StageFailed, match="injected"):
            capture(session, plan, steps=CopySteps(host=FailingCopy(fail_at)))
        assert session.position == 199
    assert_same(read_and_decode(session, ALICE), read_and_decode(tiny_session(2, model), ALICE))


def test_a_capture_takes_only_what_is_valid_and_only_into_what_can_be_written() -> None:
    session = tiny_session(2)
    session.extend(ALICE[:50])
    with pytest.raises(EngineFailure, match="the session has 50"):
        capture(session, host_transfer(session, 51, block_tokens=BLOCK))
    plan = host_transfer(session, 50, block_tokens=BLOCK)
    plan.stages[1].rows[0].buffer.flags.writeable = False
    with pytest.raises(EngineFailure, match="stage 1: a buffer cannot be written to"):
        capture(session, plan)


def test_an_empty_snapshot_is_the_empty_conversation() -> None:
    session = tiny_session(2)
    session.extend(ALICE[:50])
    empty = StageTransfer(())
    plan = Transfer(session.layout.digest, 0, 0, BLOCK, (empty, empty), np.empty((0, 2), dtype=np.uint64))
    restore(session, plan)
    assert session.position == 0


@pytest.mark.parametrize("position", [160, 175, 190])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_what_is_read_while_rows_arrive_is_what_is_read_behind_them(family: str, position: int) -> None:
    """Also where the restore ends inside a block, whose rows behind the position are compared and then overwritten."""
    model = tiny_model(family)
    session, other = tiny_session(2, model), tiny_session(2, model)
    session.extend(ALICE[:190])
    plan = replace(parked(session, 190), resume_at=position)
    tail = BOB[position : position + 20]
    session.reset()
    session.extend(BOB)
    restore(session, plan)
    session.extend(tail)
    other.extend(BOB)
    restore_and_read(other, plan, tail)
    assert other.position == session.position == position + 20
    for mine, theirs in zip(other.arenas, session.arenas, strict=True):
        assert torch.equal(mine.rows[: position + 20], theirs.rows[: position + 20])
    assert torch.equal(other.step(3), session.step(3))


@pytest.mark.parametrize("stage", [0, 1])
def test_of_damaged_rows_and_what_was_read_behind_them_nothing_is_left(stage: int) -> None:
    """The damage is found after the reading was done: copies are queued, and sums compared, at the very end."""
    session = tiny_session(2, tiny_model())
    session.extend(ALICE[:190])
    plan = parked(session, 190)
    plan.stages[stage].rows[0].buffer[-1] ^= 1
    read = []
    session.reset()
    extend = session.extend

    def seen(*arguments: Any, **named: Any) -> int:
        read.append(session.position)
        return extend(*arguments, **named)

    session.extend = seen  # type: ignore[method-assign]
    with pytest.raises(SnapshotDamaged, match=f"stage {stage}: the block at row 160 "):
        restore_and_read(session, plan, BOB[:20])
    assert read == [190], "it was read before the sums were compared"
    assert session.position == 0
    session.extend = extend  # type: ignore[method-assign]
    fresh = tiny_session(2, tiny_model())
    assert_same(read_and_decode(session, ALICE), read_and_decode(fresh, ALICE))


def test_a_forward_that_breaks_behind_a_restore_leaves_nothing_live() -> None:
    session = tiny_session(2, tiny_model())
    session.extend(ALICE[:190])
    plan = parked(session, 190)

    def breaks(*_: Any) -> None:
        raise RuntimeError("injected")

    handle = session.stages[1].inner.layers[1].register_forward_pre_hook(breaks)  # type: ignore[index, union-attr]
    with pytest.raises(StageFailed, match="injected"):
        restore_and_read(session, plan, BOB[:20])
    handle.remove()
    assert session.position == 0
    restore_and_read(session, plan, BOB[:20])
    assert session.position == 210
