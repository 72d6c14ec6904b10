"""What `inspect` says of both tiers as a conversation goes to disk and back."""

from __future__ import annotations

from parkd.store.files.disk_jobs import RemoveJob, read
from tests.fault.tier_kit import evict, parked, pump, started
from tests.fault.workload import FIXED


def test_places_follow_a_conversation_to_disk_and_back() -> None:
    machine, store = started(layout=FIXED)
    there, _ = parked(machine, store, 1)

    seen = store.inspect().conversations[there.id]
    assert (seen.is_in_ram, seen.is_on_disk, seen.is_waiting, seen.leases) == (True, False, True, 1)

    assert pump(store, machine.fs) == []
    both = store.inspect()
    seen = both.conversations[there.id]
    assert (seen.is_in_ram, seen.is_on_disk, seen.is_waiting, seen.leases) == (True, True, False, 0)
    assert sorted(seen.files) == sorted(machine.fs.names())
    [extent] = both.disk.extents.values()
    assert (extent.holders, extent.name) == (1, seen.files[1])
    assert {(b.owners, b.slot is None, b.extent) for b in both.blocks.values()} == {(1, False, extent.id)}
    assert {(c.owners, c.is_in_ram, c.extent) for c in both.checkpoints.values()} == {(1, True, extent.id)}
    assert both.disk.file_bytes == machine.fs.bytes
    assert dict(both.disk.condemned_bytes) == {}

    evict(store, there)
    away = store.inspect()
    assert (away.conversations[there.id].is_in_ram, away.conversations[there.id].is_on_disk) == (False, True)
    assert set(away.blocks) == set(there.blocks)
    assert {(b.owners, b.slot, b.ram_bytes, b.is_sealed) for b in away.blocks.values()} == {(0, None, 0, True)}
    assert (away.ram.used_slots, away.ram.charged_bytes["checkpoints"]) == (0, 0)

    promotion = store.promote(there.id, there.position)
    flying = store.inspect()
    assert [capture.source for capture in flying.captures] == [there.id]
    assert [extent.holders for extent in flying.disk.extents.values()] == [2]
    read(machine.fs, promotion.job)
    store.promoted(promotion, None)
    back = store.inspect()
    assert back.conversations[there.id].is_in_ram
    assert {(b.owners, b.slot is None) for b in back.blocks.values()} == {(1, False)}

    store.drop(there.id, "test")
    gone = store.inspect()
    assert (dict(gone.conversations), dict(gone.blocks), dict(gone.disk.extents)) == ({}, {}, {})
    assert set(gone.disk.condemned_bytes) == set(machine.fs.names())
    assert sum(gone.disk.condemned_bytes.values()) == gone.disk.file_bytes == machine.fs.bytes
    job = store.next_job()
    assert isinstance(job, RemoveJob)
    store.finished(job, None)
    assert store.inspect().disk.file_bytes == 0


def test_a_conversation_of_other_weights_is_said_to_be_foreign() -> None:
    machine, store = started()
    there, _ = parked(machine, store, 1)
    assert pump(store, machine.fs) == []
    machine.fingerprint = b"the weights, two"
    seen = machine.start().inspect()
    assert seen.conversations[there.id].is_foreign
    assert dict(seen.blocks) == {}
