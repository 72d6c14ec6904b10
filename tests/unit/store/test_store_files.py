"""Conversations that their engine keeps in files: memory admits them first, then the disk gives the room."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from parkd.state import Checksums, Grain, StageLayout, StateLayout, StateSizes
from parkd.store.disk import DiskSetup
from parkd.store.disk_policy import WriteAllowance
from parkd.store.files.disk_jobs import RemoveJob
from parkd.store.records import Capture, CaptureRequest, DiskConfig, Parked, RefusalReason, Refused, StoreConfig
from parkd.store.store import ConversationStore
from tests.fault.tier_kit import on_disk
from tests.unit.store.store_kit import KEY, Clock, make_hashes, make_units

LAYOUT = StateLayout((StageLayout(0, 4, 100, 0, b"in files" * 2),), "test-sum", Grain.FILE)
BLOCK_TOKENS = 4
FILE_BYTES = 40_960
DISK_BYTES = 100_000


def make_file_store(
    slots: int | None = None, disk_bytes: int = DISK_BYTES, index_bytes: int = 1 << 20, ram_bytes: int = 1 << 20
) -> ConversationStore:
    """Room on disk for two files and their manifests. Nothing touches a file here: the store never does."""
    clock, numbers = Clock(), count(1)
    disk = DiskSetup(
        DiskConfig(disk_bytes, bytes(16), index_bytes, 1 << 40),
        WriteAllowance.full(1 << 40, clock()),
        clock,
        lambda: next(numbers),
        path_of=Path("/nowhere").joinpath,
    )
    return ConversationStore(StoreConfig(index_bytes + ram_bytes, BLOCK_TOKENS, slots), LAYOUT, clock, disk=disk)


def request_of(seed: int, tokens: int = 20, **more: object) -> CaptureRequest:
    units = make_units(seed, tokens)
    hashes = make_hashes(units, BLOCK_TOKENS)
    return CaptureRequest(
        KEY, units, hashes, more.pop("lineage", ()), LAYOUT.digest, sizes=StateSizes(FILE_BYTES), **more
    )


def commit(store: ConversationStore, capture: Capture | Refused, size: int = FILE_BYTES) -> Parked:
    assert isinstance(capture, Capture), capture
    sums = Checksums(np.ones((1, 1), np.uint64), np.zeros((0, 1), np.uint64), file_bytes=size)
    return store.commit(capture, sums)


def park(store: ConversationStore, seed: int, tokens: int = 20) -> Parked:
    parked = commit(store, store.begin_capture(request_of(seed, tokens)))
    work(store)
    return parked


def work(store: ConversationStore) -> None:
    while (job := store.next_job()) is not None:
        store.finished(job, None)


def test_the_oldest_file_goes_for_a_new_one_once_memory_has_admitted_it() -> None:
    store = make_file_store()
    first, second = park(store, 1), park(store, 2)
    refused = store.begin_capture(request_of(3))
    assert isinstance(refused, Refused)
    assert refused.reason is RefusalReason.BUSY, "the first is being removed"
    assert store.get(first.id) is None
    work(store)
    third = park(store, 3)
    assert [store.get(each.id) is not None for each in (first, second, third)] == [False, True, True]


def test_a_file_that_is_being_restored_from_stays() -> None:
    store = make_file_store()
    first, second = park(store, 1), park(store, 2)
    with store.lease(first.id, first.position):
        store.touch(second.id)
        assert isinstance(store.begin_capture(request_of(3)), Refused)
        work(store)
        assert [store.get(each.id) is not None for each in (first, second)] == [True, False], "though used before"
    park(store, 3)
    refused = store.begin_capture(request_of(4))
    assert isinstance(refused, Refused)
    assert store.get(first.id) is None, "now it may"


def test_a_lease_that_is_released_twice_counts_once() -> None:
    store = make_file_store()
    first = park(store, 1)
    twice, once = store.lease(first.id, first.position), store.lease(first.id, first.position)
    twice.release()
    twice.release()
    park(store, 2)
    store.begin_capture(request_of(3))
    work(store)
    assert store.get(first.id) is not None, "it is still read"
    once.release()


def test_what_memory_refuses_costs_nobody_a_file() -> None:
    store = make_file_store(slots=2)
    parked = [park(store, seed) for seed in (1, 2)]
    leases = [store.lease(each.id, 20) for each in parked]
    leases[0].release()
    store.expect(KEY, parked[0].prefix_hashes)  # the disk alone would let it go
    before = store.disk_stats().bytes_in_use
    refused = store.begin_capture(request_of(3))
    assert isinstance(refused, Refused)
    assert refused.reason is RefusalReason.SLOTS
    assert all(store.get(each.id) is not None for each in parked)
    assert store.next_job() is None
    assert store.disk_stats().bytes_in_use == before


def test_a_capture_that_breaks_leaves_nothing_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_file_store()
    there = park(store, 1)
    disk_bytes, in_use = store.disk_stats().bytes_in_use, store.stats().bytes_in_use
    for error in (RuntimeError, MemoryError):
        with monkeypatch.context() as patch:
            take = mock.Mock(side_effect=error("broken"))
            patch.setattr(store.table.blocks.places, "take", take)
            if error is RuntimeError:
                with pytest.raises(RuntimeError, match="broken"):
                    store.begin_capture(request_of(2))
            else:
                assert store.begin_capture(request_of(2)).reason is RefusalReason.MEMORY
        assert store.disk_stats().bytes_in_use == disk_bytes
        assert store.stats().bytes_in_use == in_use
    assert store.get(there.id) is not None
    park(store, 2)


def test_memory_may_take_from_the_queue_whom_the_disk_took_already() -> None:
    """The order in which conversations leave memory was made before the disk made room, and it took one of them."""
    store = make_file_store(disk_bytes=1 << 20, index_bytes=13_000, ram_bytes=10_000)
    first, second = park(store, 1), park(store, 2)
    assert store.stats().conversations == 2
    third = park(store, 3, tokens=60)
    assert [store.get(each.id) is not None for each in (first, second, third)] == [False, True, True]
    assert store.disk_stats().evictions_total == 1, "the index of the disk was full"
    assert store.stats().conversations == 1, "memory had to let go of both"


def test_a_file_is_written_anew_although_its_state_is_held() -> None:
    store = make_file_store()
    first = park(store, 1)
    capture = store.begin_capture(request_of(1, lineage=first.blocks, covered=20))
    assert isinstance(capture, Capture)
    [run] = capture.transfer.stages[0].rows
    assert run.file is not None
    second = commit(store, capture)
    work(store)
    assert second.blocks != first.blocks
    assert list(on_disk(store)) == [second.id]


def test_what_a_file_does_not_fill_is_given_back() -> None:
    store = make_file_store()
    capture = store.begin_capture(request_of(1))
    reserved = store.disk_stats().bytes_in_use
    commit(store, capture, size=5_000)
    assert reserved - store.disk_stats().bytes_in_use == FILE_BYTES - 8192
    work(store)
    second = store.begin_capture(request_of(2))
    store.abort(second)
    [removal] = [store.next_job()]
    assert isinstance(removal, RemoveJob)
    store.finished(removal, None)
    assert store.disk_stats().bytes_in_use < FILE_BYTES


def test_what_is_held_for_a_copy_keeps_its_file_until_it_is_released() -> None:
    store = make_file_store()
    first = park(store, 1)
    held = store.hold(first.id)
    park(store, 2)
    store.begin_capture(request_of(3))
    work(store)
    assert store.get(first.id) is not None, "though used before"
    park(store, 3)
    held.release()
    assert isinstance(store.begin_capture(request_of(4)), Refused)
    assert store.get(first.id) is None, "now it may go"
