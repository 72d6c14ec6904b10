"""Conversations that only their engine can read: whole, each of its own size, under the same budget."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parkd.state import Checksums, Grain, StageLayout, StateLayout, StateSizes, Transfer
from parkd.store.files.manifest import (
    DamagedManifest,
    DiskBlock,
    DiskCheckpoint,
    DiskPlace,
    ExtentRef,
    Manifest,
    decode,
    encode,
)
from parkd.store.records import Capture, CaptureRequest, Parked, RefusalReason, Refused
from parkd.store.slabs import PAGE_BYTES
from tests.unit.store.store_kit import KEY, Clock, assert_within_budget, make_hashes, make_store, make_units, part_sum

BLOCK_TOKENS = 4


def opaque_layout(fixed_bytes: int = 0) -> StateLayout:
    return StateLayout((StageLayout(0, 4, 100, fixed_bytes, b"opaque" * 2),), "test-sum", Grain.OPAQUE)


def request_of(units: np.ndarray, whole: int, *, fixed: dict[int, int] | None = None, **more) -> CaptureRequest:
    """`fixed` are the sizes of checkpoints by position."""
    fixed = fixed or {}
    return CaptureRequest(
        KEY,
        units,
        make_hashes(units, BLOCK_TOKENS),
        more.pop("lineage", ()),
        more.pop("layout", opaque_layout(sum(fixed.values()))).digest,
        checkpoints=tuple(sorted(fixed)),
        sizes=StateSizes(whole, tuple(fixed[place] for place in sorted(fixed))),
        **more,
    )


def fill(transfer: Transfer, seed: int) -> Checksums:
    """Writes as an engine does, and sums what it wrote."""
    rng = np.random.default_rng(seed)
    [stage] = transfer.stages
    for part in (*stage.rows, *stage.fixed):
        part.buffer[:] = rng.integers(0, 256, part.buffer.nbytes, dtype=np.uint8)
    sums = [[part_sum(part.buffer)] for part in stage.rows], [[part_sum(part.buffer)] for part in stage.fixed]
    rows, parts = (np.array(each, dtype=np.uint64).reshape(len(each), 1) for each in sums)
    return Checksums(rows, parts)


def park(store, request: CaptureRequest, seed: int = 1) -> Parked:
    capture = store.begin_capture(request)
    assert isinstance(capture, Capture), capture
    return store.commit(capture, fill(capture.transfer, seed))


def test_a_state_is_one_buffer_of_its_own_size_and_comes_back_whole():
    store = make_store(1 << 20, opaque_layout(), block_tokens=BLOCK_TOKENS)
    units = make_units(1, 9)
    capture = store.begin_capture(request_of(units, 12_345))
    [run] = capture.transfer.stages[0].rows
    assert (run.start, run.stop, run.buffer.nbytes) == (0, 9, 12_345)
    assert run.buffer.flags.c_contiguous
    parked = store.commit(capture, fill(capture.transfer, 1))
    with store.lease(parked.id, 7) as lease:
        assert (lease.transfer.stop, lease.transfer.position) == (9, 7), "set whole, then cut"
        [run] = lease.transfer.stages[0].rows
        assert part_sum(run.buffer) == lease.transfer.checksums[0, 0]
        assert not run.buffer.flags.writeable
        assert lease.lineage == parked.blocks


def test_room_is_charged_before_a_byte_is_copied_and_given_back():
    store = make_store(1 << 20, opaque_layout(), block_tokens=BLOCK_TOKENS)
    capture = store.begin_capture(request_of(make_units(1, 9), 100_000))
    assert store.stats().in_flight_bytes == 25 * PAGE_BYTES
    store.abort(capture)
    assert store.stats().bytes_in_use == 0
    park(store, request_of(make_units(2, 9), 100_000))
    assert store.stats().row_bytes == 25 * PAGE_BYTES
    assert_within_budget(store)
    store.close()
    assert store.table.memory.budget.allocated_bytes == 0


def test_it_is_parked_whole_or_not_at_all():
    store = make_store(64 << 10, opaque_layout(), block_tokens=BLOCK_TOKENS)
    refused = store.begin_capture(request_of(make_units(1, 90), 80_000))
    assert isinstance(refused, Refused)
    assert refused.reason is RefusalReason.BUDGET
    assert store.stats().bytes_in_use == 0


@pytest.mark.parametrize("fixed", [{}, {100: 300, 2000: 0}], ids=["cut anywhere", "with checkpoints"])
def test_it_is_not_parked_in_part_although_less_would_be_charged_for_fewer_tokens(fixed):
    layout = opaque_layout(1 if fixed else 0)
    store = make_store(60_000, layout, block_tokens=BLOCK_TOKENS)
    refused = store.begin_capture(request_of(make_units(1, 2000), 5_000, fixed=fixed, layout=layout))
    assert isinstance(refused, Refused)
    assert refused.reason is RefusalReason.BUDGET
    assert isinstance(park(store, request_of(make_units(1, 100), 5_000, layout=layout)), Parked)


def test_the_least_recently_used_goes_for_the_next_one():
    store = make_store(200_000, opaque_layout(), block_tokens=BLOCK_TOKENS)
    parked = [park(store, request_of(make_units(seed, 20), 50_000), seed) for seed in range(5)]
    left = [store.get(each.id) is not None for each in parked]
    assert left == [False, False, True, True, True]
    assert store.stats().evictions_total == 2


def test_a_grown_conversation_takes_the_place_of_what_it_grew_from():
    store = make_store(1 << 20, opaque_layout(), block_tokens=BLOCK_TOKENS)
    units = make_units(1, 40)
    first = park(store, request_of(units[:20], 5_000))
    second = park(store, request_of(units, 9_000, lineage=first.blocks, covered=20))
    assert store.get(first.id) is None
    assert second.blocks != first.blocks, "a segment is shared by nobody"
    assert store.stats().blocks == 1


def test_the_same_tokens_once_more_are_a_state_of_their_own():
    store = make_store(1 << 20, opaque_layout(), block_tokens=BLOCK_TOKENS)
    units = make_units(1, 20)
    first = park(store, request_of(units, 5_000))
    # Cut to 18 after a restore, then the last two were generated again.
    capture = store.begin_capture(request_of(units, 5_000, lineage=first.blocks, covered=18))
    [run] = capture.transfer.stages[0].rows
    assert (run.start, run.stop) == (0, 20)
    second = store.commit(capture, fill(capture.transfer, 2))
    assert second.blocks != first.blocks


def test_a_state_that_nothing_was_added_to_is_parked_again_without_a_copy():
    store = make_store(1 << 20, opaque_layout(), block_tokens=BLOCK_TOKENS)
    units = make_units(1, 19)
    first = park(store, request_of(units, 5_000))
    capture = store.begin_capture(request_of(units, 5_000, lineage=first.blocks, covered=19))
    assert (capture.transfer.start, capture.transfer.stop) == (19, 19)
    assert capture.transfer.stages[0].rows == ()
    second = store.commit(capture, fill(capture.transfer, 2))
    assert second.blocks == first.blocks
    assert store.get(first.id) is None


def test_a_state_is_not_shared_with_one_of_other_tokens():
    """The lineage names a state of as many tokens, but of others: a guard against a wrong lineage."""
    store = make_store(1 << 20, opaque_layout(), block_tokens=BLOCK_TOKENS)
    first = park(store, request_of(make_units(1, 19), 5_000))
    capture = store.begin_capture(request_of(make_units(2, 19), 5_000, lineage=first.blocks, covered=19))
    assert (capture.transfer.start, capture.transfer.stop) == (0, 19)


def test_a_checkpoint_behind_where_a_state_was_cut_is_not_inherited():
    layout = opaque_layout(1)
    store = make_store(1 << 20, layout, block_tokens=BLOCK_TOKENS)
    units = make_units(1, 20)
    first = park(store, request_of(units, 5_000, fixed={8: 300, 12: 400, 16: 700, 20: 0}, layout=layout))
    fork = np.concatenate([units[:12], make_units(2, 10)])
    request = request_of(fork, 6_000, fixed={22: 0}, layout=layout, lineage=first.blocks, covered=12)
    assert [checkpoint.position for checkpoint in park(store, request, 2).checkpoints] == [8, 12, 22]


def test_sizes_must_be_those_of_the_checkpoints():
    layout = opaque_layout(1)
    store = make_store(1 << 20, layout, block_tokens=BLOCK_TOKENS)
    request = request_of(make_units(1, 20), 5_000, fixed={8: 300, 20: 0}, layout=layout)
    with pytest.raises(ValueError, match="sizes are not those"):
        store.begin_capture(replace(request, sizes=StateSizes(5_000, (300,))))
    assert store.stats().bytes_in_use == 0


def test_checkpoints_have_sizes_of_their_own_and_are_inherited_by_what_descends():
    layout = opaque_layout(1)
    store = make_store(1 << 20, layout, block_tokens=BLOCK_TOKENS)
    units = make_units(1, 40)
    first = park(store, request_of(units[:20], 5_000, fixed={8: 300, 16: 700, 20: 0}, layout=layout))
    with store.lease(first.id, 16) as lease:
        assert [part.buffer.nbytes for part in lease.transfer.stages[0].fixed] == [700]
    with store.lease(first.id, 20) as lease:
        assert [part.buffer.nbytes for part in lease.transfer.stages[0].fixed] == [0], "it is in the whole"
    # The live state went back to 18 and on from there: what lies behind it, and what had no bytes, is not its own.
    fork = np.concatenate([units[:18], make_units(2, 10)])
    request = request_of(fork, 6_000, fixed={28: 0}, layout=layout, lineage=first.blocks, covered=18)
    capture = store.begin_capture(request)
    assert [part.position for part in capture.transfer.stages[0].fixed] == [28]
    second = store.commit(capture, fill(capture.transfer, 2))
    assert [checkpoint.position for checkpoint in second.checkpoints] == [8, 16, 28]
    with store.lease(second.id, 8) as lease:
        assert [part.buffer.nbytes for part in lease.transfer.stages[0].fixed] == [300]
    # A lineage of its own inherits of its own segment alone, whatever is parked of the same tokens.
    other = park(store, request_of(units[:24], 5_000, fixed={4: 200, 24: 0}, layout=layout), 3)
    grown = request_of(units, 7_000, fixed={40: 0}, layout=layout, lineage=other.blocks, covered=24)
    assert [checkpoint.position for checkpoint in park(store, grown, 4).checkpoints] == [4, 40]
    # Another lineage has nothing to inherit, whatever its tokens are.
    third = park(store, request_of(fork, 6_000, fixed={28: 0}, layout=layout))
    assert [checkpoint.position for checkpoint in third.checkpoints] == [28]


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 90_000), st.booleans()), max_size=15))
@settings(deadline=None, max_examples=20)
def test_the_budget_holds_at_every_instant(steps):
    layout = opaque_layout(1)
    store = make_store(150_000, layout, block_tokens=BLOCK_TOKENS)
    for seed, (tokens, size, aborts) in enumerate(steps):
        fixed = {tokens: 0} if tokens < 3 else {tokens // 2: size // 3, tokens: 0}
        capture = store.begin_capture(request_of(make_units(seed % 3, tokens), size, fixed=fixed, layout=layout))
        if isinstance(capture, Refused):
            continue
        sums = fill(capture.transfer, seed)
        store.abort(capture) if aborts else store.commit(capture, sums)
        assert_within_budget(store)
    store.close()
    assert store.table.memory.budget.allocated_bytes == 0


def sized_manifest() -> Manifest:
    sums = np.arange(1, dtype=np.uint64)
    units = make_units(1, 9)
    return Manifest(
        "c1",
        "",
        KEY,
        b"f" * 16,
        b"l" * 16,
        BLOCK_TOKENS,
        1,
        units,
        make_hashes(units, BLOCK_TOKENS),
        Clock().now,
        Clock().now,
        (ExtentRef(7, 8192),),
        (DiskBlock(3, 9, b"i" * 16, sums, DiskPlace(7, sums, sums, 5_000)),),
        (DiskCheckpoint(4, sums, DiskPlace(7, sums, sums, 300)), DiskCheckpoint(9, sums, DiskPlace(7, sums, sums))),
    )


def test_a_manifest_tells_the_sizes_that_no_layout_does():
    data = encode(sized_manifest())
    read = decode(data)
    assert (read.blocks[0].place.bytes, [c.place.bytes for c in read.checkpoints]) == (5_000, [300, 0])
    assert (data[8], data[12] & 2) == (2, 2), "format 2, and the flag"
    with pytest.raises(DamagedManifest, match="checksum"):
        decode(data[:-20] + bytes([data[-20] ^ 1]) + data[-19:])
