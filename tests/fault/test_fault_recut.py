"""A park directory under another layer split: what one split wrote is read, cut and written by the other."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest

from parkd.state import Bytes, StateLayout, part_sum, recut_between
from parkd.store.files import disk_jobs
from parkd.store.files.disk_jobs import GRAIN_BYTES, DamagedPart, RecutJob, read
from parkd.store.files.manifest import Manifest
from parkd.store.flights import Promotion
from parkd.store.records import Parked, Refused, Tier
from parkd.store.store import ConversationStore
from tests.fault import tier_kit
from tests.fault.fault_fs import Fault
from tests.fault.tier_kit import Machine, evict, on_disk, promote, pump, started
from tests.unit.state.split_layouts import layout_of
from tests.unit.store import store_kit
from tests.unit.store.store_kit import KEY, assert_counts, leased_state, make_hashes, make_units

pytestmark = pytest.mark.usefixtures("_real_sums")
SPLITS = [(), (2,), (1, 3), (1, 2, 3, 4)]
TOKENS = 11
Fields = dict[tuple[str, int | None], list[int]]


@pytest.fixture
def _real_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the name that the layouts give, so that the store can compare and compute them."""
    monkeypatch.setattr(store_kit, "part_sum", lambda part: part_sum("xxh3-64", part.reshape(-1)))


def fields_of(layout: StateLayout, rows: Sequence[Bytes], fixed: Sequence[Bytes]) -> Fields:
    """Every field's bytes, wherever a split has them."""
    found: Fields = {}
    for number, stage in enumerate(layout.stages):
        for field in stage.row_fields:
            place = field.name, None if field.is_shared else field.layer
            columns = rows[number].reshape(-1, stage.row_bytes)[:, field.offset : field.offset + field.nbytes]
            found.setdefault(place, columns.reshape(-1).tolist())
        for field in stage.fixed_fields:
            found[field.name, field.layer] = fixed[number][field.offset : field.offset + field.nbytes].tolist()
    return found


def parked_there(machine: Machine, store: ConversationStore, seed: int = 1) -> tuple[Parked, Fields]:
    """A conversation that is written, and its fields."""
    engine = machine.engine(seed)
    engine.read(make_units(seed, TOKENS - 3), checkpoint=True)
    engine.extend(make_units(seed + 100, 3), checkpoint=True)
    there = engine.park(store)
    assert isinstance(there, Parked)
    assert pump(store, machine.fs) == []
    return there, fields_of(machine.layout, [rows.reshape(-1) for rows in engine.rows()], engine.fixed[TOKENS])


def moved_to(machine: Machine, *split: int) -> ConversationStore:
    """The next process has the layers split otherwise."""
    before = machine.layout
    machine.layout = layout_of(*split)
    machine.recuts = {before.digest: recut_between(before, machine.layout)}
    return machine.start()


def held(store: ConversationStore, parked: Parked) -> Fields:
    rows, fixed = leased_state(store, parked.id, parked.position)
    return fields_of(store.layout, [each.reshape(-1) for each in rows], fixed)


def test_from_split_to_split_and_back() -> None:
    machine, store = started(layout=layout_of())
    there, fields = parked_there(machine, store)
    for split in [*SPLITS[1:], (), (2,)]:
        store = moved_to(machine, *split)
        [found] = [each.parked for each in store.table.all()]
        assert (found.tier, found.position, found.units.tolist()) == (Tier.DISK, TOKENS, there.units.tolist())
        hashes = make_hashes(there.units, 4)
        assert [each.id for each, _ in store.candidates(KEY, hashes)] == [found.id]
        here = promote(store, machine.fs, found)
        assert isinstance(here, Parked)
        assert [c.position for c in here.checkpoints] == [TOKENS - 3, TOKENS]
        assert held(store, here) == fields
        assert_counts(store)
        assert list(on_disk(store)) == [found.id], "the other split's stays until this one's is written"
        assert pump(store, machine.fs) == []
        assert list(on_disk(store)) == [here.id]
        assert_counts(store)
        evict(store, here)
        assert store.why_gone(KEY, make_hashes(there.units, 4)) == "", "it is on disk in this split"
        again = promote(store, machine.fs, store.get(here.id))
        assert isinstance(again, Parked)
        assert held(store, again) == fields
    assert store.disk_stats().conversations == 1


def test_rows_alone_are_read_as_far_as_memory_goes() -> None:
    """State that can be cut anywhere: a part of it is a row of its own, and the whole stays on disk."""
    bare = [
        StateLayout(tuple(replace(stage, fixed_bytes=0, fixed_fields=()) for stage in layout.stages), "xxh3-64")
        for layout in (layout_of(), layout_of(2))
    ]
    machine, store = started(layout=bare[0])
    engine = machine.engine(3).read(make_units(3, 400))
    there = engine.park(store)
    assert isinstance(there, Parked)
    assert pump(store, machine.fs) == []
    machine.layout, machine.recuts = bare[1], {bare[0].digest: recut_between(*bare)}
    machine.ram_bytes = 40_000
    store = machine.start()
    here = promote(store, machine.fs, store.get(there.id))
    assert isinstance(here, Parked)
    assert 0 < here.position < 400
    assert here.position % 4 == 0
    rows = [part.reshape(-1) for part in leased_state(store, here.id, here.position)[0]]
    expected = [part[: here.position].reshape(-1) for part in engine.rows()]
    assert fields_of(bare[1], rows, ()) == fields_of(bare[0], expected, ())
    assert pump(store, machine.fs) == []
    assert list(on_disk(store)) == [there.id], "a part does not take the place of the whole"
    assert_counts(store)


def test_what_leaves_memory_before_it_is_written_is_read_again() -> None:
    machine, store = started(layout=layout_of(2))
    there, fields = parked_there(machine, store)
    store = moved_to(machine, 1, 3)
    here = promote(store, machine.fs, store.get(there.id))
    assert isinstance(here, Parked)
    store.queue.cancel(here.id)
    evict(store, here)
    assert [each.id for each in store.table.all()] == [there.id]
    assert store.why_gone(KEY, make_hashes(there.units, 4)) == "", "it is not gone: it is on disk"
    again = promote(store, machine.fs, store.get(there.id))
    assert isinstance(again, Parked)
    assert held(store, again) == fields
    assert_counts(store)


def test_nothing_of_another_conversation_is_left_between_the_fields() -> None:
    """The memory that it is read into was another's before."""
    machine, store = started(layout=layout_of(2))
    there, _ = parked_there(machine, store)
    store = moved_to(machine, 1, 3)
    other = machine.engine(9).read(make_units(9, TOKENS), checkpoint=True).park(store)
    assert isinstance(other, Parked)
    store.drop(other.id, "a test")
    here = promote(store, machine.fs, store.get(there.id))
    assert isinstance(here, Parked)
    rows, _ = leased_state(store, here.id, TOKENS)
    for part, stage in zip(rows, store.layout.stages, strict=True):
        covered = np.zeros(stage.row_bytes, dtype=bool)
        for field in stage.row_fields:
            covered[field.offset : field.offset + field.nbytes] = True
        assert not covered.all()
        assert not part[:, ~covered].any()


def test_it_is_not_read_twice_at_once() -> None:
    machine, store = started(layout=layout_of(2))
    there, _ = parked_there(machine, store)
    store = moved_to(machine, 1, 3)
    first = store.promote(there.id, TOKENS)
    assert isinstance(first, Promotion)
    assert isinstance(first.job, RecutJob)
    assert isinstance(store.promote(there.id, TOKENS), Refused)
    read(machine.fs, first.job)
    assert store.promoted(first, None) is not None
    assert isinstance(store.promote(there.id, TOKENS), Refused)


def test_every_damage_is_noticed_before_anything_is_made_of_it() -> None:
    """Any byte of the other split's files: a miss, and the damaged conversation is gone."""
    machine, store = started(layout=layout_of(2))
    parked_there(machine, store)
    [extent] = [name for name in machine.fs.sizes() if name.endswith(".extent")]
    size, wrong = machine.fs.sizes()[extent], 0
    for at in range(0, size, 97):
        other = Machine(deepcopy(machine.fs), layout_of(2))
        other.fs.flip(extent, at)
        store = moved_to(other, 1, 3)
        [found] = [each.parked for each in store.table.all()]
        here = promote(store, other.fs, found)
        if here is None:
            wrong += 1
            assert not store.table.all()
        assert_counts(store)
    assert wrong > 10


@pytest.mark.parametrize("kind", ["error", "short"])
def test_every_failing_operation_is_a_miss(kind: str) -> None:
    nth = 0
    while True:
        nth += 1
        machine, store = started(layout=layout_of(2))
        there, fields = parked_there(machine, store)
        store = moved_to(machine, 1, 3)
        fs = machine.fs
        fs.fault = Fault(fs.operations + nth, kind, errno.EIO)  # type: ignore[arg-type]
        here = promote(store, fs, store.get(there.id))
        reached = fs.operations >= fs.fault.nth
        fs.fault = None
        assert here is None or held(store, here) == fields
        assert_counts(store)
        if not reached:
            break
        assert here is None
        again = store.get(there.id)
        if again is not None:
            back = promote(store, fs, again)
            assert isinstance(back, Parked)
            assert held(store, back) == fields
    assert nth > 5


def job_of(machine: Machine, seed: int = 1) -> RecutJob:
    """A job that cuts a conversation of two stages for three, and has not run."""
    there, _ = parked_there(machine, machine.start(), seed)
    store = moved_to(machine, 1, 3)
    promotion = store.promote(there.id, TOKENS)
    assert isinstance(promotion, Promotion)
    assert isinstance(promotion.job, RecutJob)
    return promotion.job


@pytest.mark.parametrize("change", ["name", "layout", "blocks"])
def test_a_manifest_that_was_exchanged_is_not_read(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parts have valid sums, and are not those that were asked for."""
    job = job_of(machine := Machine(layout=layout_of(2)))
    real = disk_jobs.decode

    def exchanged(text: bytes) -> Manifest:
        manifest = real(text)
        changes = {
            "name": {"id": "another"},
            "layout": {"layout_digest": bytes(16)},
            "blocks": {"blocks": manifest.blocks[:-1]},
        }
        return replace(manifest, **changes[change])  # type: ignore[arg-type]

    monkeypatch.setattr(disk_jobs, "decode", exchanged)
    with pytest.raises(DamagedPart, match="another than it was"):
        read(machine.fs, job)


@pytest.mark.parametrize("which", ["file_sums", "sums"])
@pytest.mark.parametrize("what", ["blocks", "checkpoints"])
def test_both_sums_of_a_part_are_compared(which: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(machine := Machine(layout=layout_of(2)))
    real = disk_jobs.decode

    def wrong(text: bytes) -> Manifest:
        manifest = real(text)
        *rest, last = getattr(manifest, what)
        sums = np.array(last.place.file_sums if which == "file_sums" else last.sums)
        sums[-1] += 1
        place = replace(last.place, file_sums=sums)
        last = replace(last, place=place) if which == "file_sums" else replace(last, sums=sums)
        return replace(manifest, **{what: (*rest, last)})  # type: ignore[arg-type]

    monkeypatch.setattr(disk_jobs, "decode", wrong)
    with pytest.raises(DamagedPart, match="not what was written"):
        read(machine.fs, job)


def test_a_device_that_fails_damages_nothing_and_a_file_that_is_too_short_is_damaged() -> None:
    job = job_of(machine := Machine(layout=layout_of(2)))
    fs = machine.fs
    fs.log.clear()
    read(fs, job)
    reads = [number for number, line in enumerate(fs.log, 1) if line.startswith("read")]
    opens = [line for line in fs.log if line.startswith("open")]
    assert len(opens) == len(set(opens)), "each file is opened once"
    for nth in reads:
        fs.fault = Fault(fs.operations + nth, "error", errno.EIO)
        with pytest.raises(OSError, match="5"):
            read(fs, job)
    fs.fault = Fault(fs.operations + reads[0], "error", errno.ENODATA)
    with pytest.raises(DamagedPart, match="too short"):
        read(fs, job)


def test_parts_larger_than_the_least_that_is_read_at_once() -> None:
    def wide(layout: StateLayout) -> StateLayout:
        stages = tuple(replace(stage, row_bytes=stage.row_bytes + GRAIN_BYTES) for stage in layout.stages)
        return StateLayout(stages, layout.checksum)

    one, other = wide(layout_of(2)), wide(layout_of(1, 3))
    machine, store = started(layout=one)
    there, fields = parked_there(machine, store)
    machine.layout, machine.recuts = other, {one.digest: recut_between(one, other)}
    store = machine.start()
    here = promote(store, machine.fs, store.get(there.id))
    assert isinstance(here, Parked)
    assert held(store, here) == fields


@pytest.mark.parametrize("is_other", ["weights", "block size"])
def test_what_cannot_be_used_is_not_to_be_cut(is_other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, store = started(layout=layout_of(2))
    there, _ = parked_there(machine, store)
    if is_other == "weights":
        machine.fingerprint = b"the weights, two"
    else:
        monkeypatch.setattr(tier_kit, "BLOCK_TOKENS", 8)
    store = moved_to(machine, 1, 3)
    [(found, place)] = store.table.on_disk()
    assert (found.id, found.is_foreign, place.recut) == (there.id, True, None)


def test_other_weights_and_layouts_that_nobody_describes_stay_foreign() -> None:
    machine, store = started(layout=layout_of(2))
    there, _ = parked_there(machine, store)
    machine.layout = layout_of(1, 3)
    store = machine.start()
    assert store.disk_stats().foreign_conversations == 1
    assert not store.candidates(KEY, make_hashes(there.units, 4))
    machine.fingerprint, machine.layout = b"the weights, two", layout_of(2)
    store = moved_to(machine, 1, 3)
    assert store.disk_stats().foreign_conversations == 1
    assert np.array_equal(there.units, store.table.all()[0].parked.units)
