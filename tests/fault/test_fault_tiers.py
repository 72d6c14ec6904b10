"""RAM and disk as one store: what is where, what waits, and the reports of other systems that lost it."""

from __future__ import annotations

import numpy as np
import pytest

from parkd.state import Grain
from parkd.store.admission import Admission, Decision
from parkd.store.files.disk_jobs import RemoveJob, WriteJob, read, write
from parkd.store.files.manifest import decode
from parkd.store.flights import Promotion
from parkd.store.records import ConversationGone, Refused, Tier
from parkd.store.write_queue import QUEUE_SHARE
from tests.fault.fault_fs import FaultFs
from tests.fault.tier_kit import away, evict, on_disk, parked, promote, pump, rows_of, run, started
from tests.fault.whole_kit import whole_layout
from tests.fault.workload import FIXED
from tests.unit.store.store_kit import (
    KEY,
    assert_counts,
    assert_same_rows,
    leased_rows,
    make_hashes,
    make_layout,
    make_units,
)


def test_a_conversation_keeps_its_id_and_its_blocks_in_every_tier() -> None:
    machine, store = started()
    there, rows = parked(machine, store, 1)
    assert there.tier is Tier.RAM
    pump(store, machine.fs)
    evict(store, there)
    on_disk = store.get(there.id)
    assert (on_disk.tier, on_disk.blocks) == (Tier.DISK, there.blocks)
    with pytest.raises(ConversationGone):
        store.lease(there.id, 11)
    back = promote(store, machine.fs, on_disk)
    assert (back.id, back.blocks, back.tier) == (there.id, there.blocks, Tier.PROMOTED)
    assert_same_rows(leased_rows(store, back), rows)
    assert store.get(there.id).tier is Tier.RAM


def test_only_what_is_new_is_written_when_a_conversation_grows() -> None:
    machine, store = started()
    engine = machine.engine().read(make_units(1, 40))
    engine.park(store)
    pump(store, machine.fs)
    before = machine.fs.bytes
    engine.extend(make_units(2, 4))
    engine.park(store)
    pump(store, machine.fs)
    parts = 2 * 4096  # one new block of two stages, each on a page of its own
    assert machine.fs.bytes - before == parts
    assert store.disk_stats().conversations == 1, "the ancestor is superseded on disk, too"


def test_live_rows_that_left_ram_are_copied_back_under_their_ids() -> None:
    """The live conversation goes on descending from blocks that are on disk only."""
    machine, store = started()
    engine = machine.engine().read(make_units(1, 12))
    first = engine.park(store)
    pump(store, machine.fs)
    evict(store, first)
    engine.extend(make_units(2, 4))
    second = engine.park(store)
    assert second.blocks[:3] == first.blocks
    written = store.disk_stats().written_bytes_total
    pump(store, machine.fs)
    assert store.disk_stats().written_bytes_total - written == 3 * 4096
    evict(store, second)
    assert_same_rows(rows_of(store, machine.fs, store.get(second.id)), engine.rows())


def test_a_head_of_a_long_conversation_is_read_alone() -> None:
    machine, store = started()
    long, rows = away(machine, store, 1, 60)
    head = promote(store, machine.fs, long, 9)
    assert head.id != long.id
    assert head.blocks == long.blocks[:3]
    assert_same_rows(leased_rows(store, head, 9), [stage[:9] for stage in rows])
    assert store.disk_stats().read_bytes_total == 12 * machine.layout.row_bytes
    found = {known.id: (known.tier, shared) for known, shared in store.candidates(KEY, long.prefix_hashes)}
    assert found == {long.id: (Tier.DISK, 15), head.id: (Tier.RAM, 3)}
    whole = promote(store, machine.fs, store.get(long.id))
    assert whole.id == long.id
    assert store.disk_stats().read_bytes_total == 60 * machine.layout.row_bytes, "the head is not read twice"
    assert store.get(head.id) is None, "the whole supersedes its head"


def test_a_last_block_may_reach_further_than_its_conversation() -> None:
    """Memory was short, so only seven tokens of a longer conversation were parked, over blocks that were held."""
    machine, store = started()
    engine = machine.engine().read(make_units(1, 24))
    long = engine.park(store)
    pump(store, machine.fs)
    request = engine.request()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Admission, "decide", lambda *_, **__: Decision(7, None))
        short = store.begin_capture(request)
    parked = engine.finish(store, short)
    assert (parked.position, parked.blocks) == (7, long.blocks[:2])
    pump(store, machine.fs)
    for head in (False, True):
        store = machine.start()
        if head:
            promote(store, machine.fs, store.get(long.id), 8)
        assert_same_rows(rows_of(store, machine.fs, store.get(parked.id)), engine.rows(7))
        assert_counts(store)


def test_fixed_state_comes_whole() -> None:
    machine, store = started(layout=FIXED)
    engine = machine.engine().read(make_units(1, 9), checkpoint=True)
    engine.extend(make_units(2, 8), checkpoint=True)
    there = engine.park(store)
    pump(store, machine.fs)
    store = machine.start()
    back = promote(store, machine.fs, store.get(there.id), 9)
    assert [checkpoint.position for checkpoint in back.checkpoints] == [9, 17]
    other = machine.engine(7)
    for stop in (9, 17):
        with store.lease(back.id, stop) as lease:
            other.restore(lease)
        assert_same_rows(other.fixed[stop], engine.fixed[stop])


def test_a_checkpoint_is_on_disk_only_if_its_bytes_are() -> None:
    """Two conversations over the same blocks may have other fixed state at one position: it was computed twice."""
    machine, store = started(layout=FIXED)
    engine = machine.engine().read(make_units(1, 8), checkpoint=True)
    engine.extend(make_units(2, 8), checkpoint=True)
    first, of_first = engine.park(store), engine.fixed[8]
    pump(store, machine.fs)
    evict(store, first)
    engine.truncate(8)
    engine.fixed[8] = [part ^ 1 for part in of_first]
    engine.extend(make_units(3, 8), checkpoint=True)
    second = engine.park(store)
    assert second.blocks[:2] == first.blocks[:2]
    promote(store, machine.fs, store.get(first.id))
    pump(store, machine.fs)
    store = machine.start()
    for known, expected in ((first, of_first), (second, engine.fixed[8])):
        promote(store, machine.fs, store.get(known.id))
        other = machine.engine(7)
        with store.lease(known.id, 8) as lease:
            other.restore(lease)
        assert_same_rows(other.fixed[8], expected)
        evict(store, known)


def test_what_waits_for_the_disk_is_served_from_memory() -> None:
    """Report 30: evicted and not yet written was unreadable. Here it is not evicted before it is written."""
    machine, store = started(ram_bytes=140_000)
    there, rows = parked(machine, store, 1, 60)
    assert store.has_writes
    others = [parked(machine, store, seed, 60)[0] for seed in range(2, 9)]
    assert any(isinstance(other, Refused) for other in others), "memory was never short, so nothing was tried"
    assert store.get(there.id).tier is Tier.RAM
    assert_same_rows(leased_rows(store, there), rows)
    pump(store, machine.fs)
    for seed in range(10, 16):
        parked(machine, store, seed, 60)
        pump(store, machine.fs)
    assert store.get(there.id).tier is Tier.DISK
    assert_same_rows(rows_of(store, machine.fs, store.get(there.id)), rows)


def test_what_is_larger_than_the_queue_is_written_when_nothing_else_waits() -> None:
    machine, store = started(ram_bytes=200_000)
    there, rows = parked(machine, store, 1, 280)
    assert 280 * machine.layout.row_bytes > 200_000 / QUEUE_SHARE
    assert pump(store, machine.fs) == []
    evict(store, there)
    assert_same_rows(rows_of(store, machine.fs, store.get(there.id)), rows)


def test_what_is_larger_than_the_queue_does_not_wait_behind_others() -> None:
    machine, store = started(ram_bytes=400_000)
    parked(machine, store, 1, 20)
    assert len(store.queue) == 1
    large, _ = parked(machine, store, 2, 560)
    assert large.position == 560
    assert len(store.queue) == 1, "memory that waits is memory that nothing else may have"
    assert store.disk_stats().not_written_total == 1
    store.next_job()
    parked(machine, store, 3, 560)
    assert len(store.queue) == 1, "what is being written waits, too"


def test_buffers_of_a_read_under_way_are_nobody_elses() -> None:
    """Report 51: no buffer is reused before its transfer is complete, whatever happens to the conversation."""
    machine, store = started(ram_bytes=140_000)
    there, rows = away(machine, store, 1, 60)
    promotion = store.promote(there.id, 60)
    assert isinstance(promotion, Promotion)
    store.drop(there.id, "a test")
    for seed in range(2, 9):
        parked(machine, store, seed, 60)
    pump(store, machine.fs)
    read(machine.fs, promotion.job)  # its extents are still there, and its buffers its own
    target = [part.buffer for _, parts in promotion.job.extents for part in parts if part.stage == 0]
    assert np.array_equal(np.concatenate(target), rows[0].reshape(-1))
    assert store.promoted(promotion, None) is None, "what was dropped meanwhile is not published"
    pump(store, machine.fs)
    assert_counts(store)


def test_rows_that_are_being_written_are_not_overwritten() -> None:
    machine, store = started(ram_bytes=140_000)
    there, rows = parked(machine, store, 1, 60)
    job = store.next_job()
    assert isinstance(job, WriteJob)
    store.drop(there.id, "a test")
    for seed in range(2, 9):
        parked(machine, store, seed, 60)
    written = np.concatenate([part.buffer for part in job.parts if part.stage == 0])
    assert np.array_equal(written, rows[0].reshape(-1))
    write(machine.fs, job)
    store.finished(job, None)
    assert store.get(there.id) is None, "what was dropped while it was written does not come back"
    removal = store.next_job()
    assert isinstance(removal, RemoveJob)
    assert job.manifest.name in removal.names
    run(store, machine.fs, removal)
    assert job.manifest.name not in machine.fs.names()


def test_keys_do_not_meet_on_disk() -> None:
    machine, store = started()
    there, _ = parked(machine, store, 1)
    pump(store, machine.fs)
    store = machine.start()
    other = b"o" * 16
    assert store.candidates(other, make_hashes(there.units, 4, other)) == []
    assert [known.id for known, _ in store.candidates(KEY, there.prefix_hashes)] == [there.id]


def test_two_promotions_of_one_block_do_not_meet() -> None:
    machine, store = started()
    engine = machine.engine().read(make_units(1, 16))
    first = engine.park(store)
    pump(store, machine.fs)
    engine.truncate(12)
    engine.extend(make_units(2, 9))
    second = engine.park(store)
    pump(store, machine.fs)
    evict(store, first)
    evict(store, second)
    promotion = store.promote(first.id, 16)
    assert isinstance(promotion, Promotion)
    assert isinstance(store.promote(second.id, 21), Refused)
    assert isinstance(store.promote(first.id, 16), Refused)
    read(machine.fs, promotion.job)
    store.promoted(promotion, None)
    assert_same_rows(rows_of(store, machine.fs, store.get(second.id)), engine.rows())


def test_bytes_in_a_file_are_those_of_the_rows_and_zeros() -> None:
    machine, store = started(FaultFs(), make_layout())
    there, rows = parked(machine, store, 1, 11)
    pump(store, machine.fs)
    (name,) = [name for name in machine.fs.names() if name.endswith(".extent")]
    data = bytes(machine.fs.content(name))
    manifest = decode(machine.fs.load(on_disk(store)[there.id].disk.name))
    covered = np.zeros(len(data), dtype=bool)
    for index, block in enumerate(manifest.blocks):
        for stage, offset in enumerate(block.place.offsets.tolist()):
            expected = rows[stage][index * 4 : index * 4 + block.rows].tobytes()
            assert data[offset : offset + len(expected)] == expected
            assert offset % 4096 == 0
            covered[offset : offset + len(expected)] = True
    assert not np.frombuffer(data, np.uint8)[~covered].any()


@pytest.mark.parametrize("grain", [Grain.ROWS, Grain.OPAQUE])
def test_rows_that_are_not_those_on_disk_never_take_their_place(grain: Grain) -> None:
    """A live state is parked anew under what it descends from, but its bytes have come to differ."""
    machine, store = started(layout=make_layout() if grain is Grain.ROWS else whole_layout(grain))
    engine = machine.engine(1)
    units = make_units(1, 8)
    engine.extend(units)
    first = engine.park(store)
    pump(store, machine.fs)
    evict(store, first)
    lineage = engine.lineage
    engine.arenas[0][2] ^= 1
    if grain is Grain.ROWS:
        engine.extend(make_units(2, 4))
    engine.lineage = lineage
    second, rows = engine.park(store), engine.rows()
    pump(store, machine.fs)
    if store.get(second.id).tier is not Tier.DISK:
        evict(store, second)
    found = rows_of(store, machine.fs, store.get(second.id)) if store.get(second.id) is not None else None
    if found is not None:
        assert_same_rows(found, rows)
