"""Blocks with bytes of their own beside their rows, as a library writes them: every block has them, whole or not."""

from __future__ import annotations

import numpy as np
import pytest

from parkd.state import Checksums, StageLayout, StateLayout
from parkd.store.records import Capture, CaptureRequest
from parkd.store.slabs import SlabGeometry
from tests.unit.store.store_kit import KEY, make_hashes, make_store, make_units

ROW, HEAD, BLOCK = 40, 100, 4
LAYOUT = StateLayout((StageLayout(0, 1, ROW, 0, b"h" * 16, head_bytes=HEAD),), "test-sum")


def park(store, tokens: int, lineage: tuple[int, ...] = ()) -> tuple[Capture, np.ndarray]:
    units = make_units(1, tokens)
    request = CaptureRequest(KEY, units, make_hashes(units, BLOCK), lineage, LAYOUT.digest)
    capture = store.begin_capture(request)
    assert isinstance(capture, Capture)
    [stage] = capture.transfer.stages
    seen = []
    for run in stage.rows:
        run.buffer[:] = np.random.default_rng(tokens).integers(0, 255, run.buffer.nbytes, dtype=np.uint8)
        seen.append(run.buffer.copy())
    return capture, np.concatenate(seen)


def test_a_slot_has_room_for_them() -> None:
    assert SlabGeometry.of(LAYOUT, BLOCK, 1 << 20, 1 << 20).part_bytes == (HEAD + BLOCK * ROW,)


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 8, 11])
def test_what_was_put_comes_back_with_them(tokens: int) -> None:
    store = make_store(1 << 20, LAYOUT, block_tokens=BLOCK)
    capture, written = park(store, tokens)
    blocks = -(-tokens // BLOCK)
    assert written.nbytes == blocks * HEAD + tokens * ROW
    parked = store.commit(capture, Checksums(np.zeros((blocks, 1), np.uint64), np.zeros((0, 1), np.uint64)))
    with store.lease(parked.id, tokens, 0) as lease:
        found = np.concatenate([run.buffer for run in lease.transfer.stages[0].rows])
        assert np.array_equal(found, written)


def test_a_part_from_a_block_on_has_only_its_own() -> None:
    store = make_store(1 << 20, LAYOUT, block_tokens=BLOCK)
    capture, written = park(store, 11)
    parked = store.commit(capture, Checksums(np.zeros((3, 1), np.uint64), np.zeros((0, 1), np.uint64)))
    with store.lease(parked.id, 11, 8) as lease:
        found = np.concatenate([run.buffer for run in lease.transfer.stages[0].rows])
        assert np.array_equal(found, written[2 * (HEAD + BLOCK * ROW) :])
