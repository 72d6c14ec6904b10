"""What a start makes of the files that it finds, one rule each."""

from __future__ import annotations

import logging
import math
import secrets
from pathlib import Path

import numpy as np
import pytest

from parkd.state import Grain
from parkd.store.layouts import LAYOUT_SUFFIX, layout_name
from parkd.store.opening import DiskOptions, forget, last_uses, open_tiered
from parkd.store.records import StoreConfig
from tests.fault.fault_fs import Fault, FaultFs
from tests.fault.tier_kit import FINGERPRINT, Machine, on_disk, parked, pump, rows_of, started
from tests.fault.whole_kit import whole_layout
from tests.unit.state.split_layouts import layout_of
from tests.unit.store.store_kit import assert_same_rows, make_layout, make_units

DAY_S = 86_400.0


class Still:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def clock(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now + 1.7e9


def opened(
    fs: FaultFs, times: Still, layout=None, *, per_day=1 << 30, fingerprint=FINGERPRINT, max_age_s=None, **options
):
    return open_tiered(
        fs,
        StoreConfig(8 << 20, 4, slab_bytes=1 << 18),
        DiskOptions(4 << 20, per_day, max_age_s),
        layout or make_layout(),
        fingerprint,
        clock=times.clock,
        wall=times.wall,
        **options,
    )


def put(fs: FaultFs, name: str, data: bytes = b"mine") -> None:
    fs.create(name).write(0, [np.frombuffer(data, np.uint8)])


@pytest.mark.parametrize("size", [0, 15, 17])
def test_a_fingerprint_of_another_length_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"not {size}"):
        opened(FaultFs(), Still(), fingerprint=bytes(size))


@pytest.mark.parametrize("directory", [None, Path("/somewhere")])
def test_a_state_in_a_file_lies_in_the_directory(directory: Path | None) -> None:
    layout = whole_layout(Grain.FILE)
    store = opened(FaultFs(), Still(), layout, directory=directory)
    engine = Machine(layout=layout).engine().read(make_units(1, 5), checkpoint=True)
    capture = store.begin_capture(engine.request())
    [run] = capture.transfer.stages[0].rows
    assert run.file.path.parent == (directory or Path())
    assert run.file.path.suffix == ".extent"


def test_what_was_written_in_the_last_day_is_spent() -> None:
    """By whichever process; what was written exactly a day ago is not."""
    fs, times = FaultFs(), Still()
    store = opened(fs, times, per_day=1_000_000)
    engine = Machine().engine()
    for seed in (1, 2):
        engine.read(make_units(seed, 11)).park(store)
        assert pump(store, fs) == []
        times.now += 100.0
    taken = sum(len(fs.content(name)) for name in fs.names() if name.endswith(".extent"))
    assert opened(fs, times, per_day=1_000_000).disk_stats().allowance_bytes == 1_000_000 - taken
    times.now = 1000.0 + DAY_S
    assert opened(fs, times, per_day=1_000_000).disk_stats().allowance_bytes == 1_000_000 - taken // 2
    times.now = 1100.0 + DAY_S
    assert opened(fs, times, per_day=1_000_000).disk_stats().allowance_bytes == 1_000_000


def test_found_by_use_a_clock_that_ran_ahead_neither_spends_the_allowance_nor_makes_anything_young() -> None:
    """It was a year ahead while two were parked, and is right again: they age by the times of their files."""
    fs, times = FaultFs(), Still()
    times.now += 365 * DAY_S
    store = opened(fs, times, per_day=1_000_000)
    engine = Machine().engine()
    for seed in (1, 2):
        engine.read(make_units(seed, 11)).park(store)
        assert pump(store, fs) == []
        times.now += 500.0
    times.now = 5000.0
    store = opened(fs, times, per_day=1_000_000, max_age_s=3600.0)
    assert store.disk_stats().allowance_bytes == 1_000_000
    idle = sorted(times.now - each.parked.last_used_s for each in on_disk(store).values())
    assert idle == pytest.approx([0.0, 500.0], abs=0.01), "as long ago as lies between them"
    assert all(each.parked.parked_at_s <= times.now for each in on_disk(store).values())
    for name in fs.names():
        if name.endswith(".manifest"):
            fs.mark(name, times.wall())
    times.now += 3599.0
    assert len(on_disk(opened(fs, times, max_age_s=3600.0))) == 2
    times.now += 2.0
    assert on_disk(opened(fs, times, max_age_s=3600.0)) == {}


def test_found_by_use_a_clock_that_begins_anew_keeps_the_order() -> None:
    """A machine without a battery starts in 1970: what is parked is neither too old nor all alike."""
    fs, times = FaultFs(), Still()
    store = opened(fs, times)
    engine = Machine().engine()
    for seed in (1, 2, 3):
        engine.read(make_units(seed, 11)).park(store)
        assert pump(store, fs) == []
        times.now += 1000.0
    times.now = 7.0 - 1.7e9 + 50.0
    found = on_disk(opened(fs, times, max_age_s=3600.0)).values()
    assert sorted(times.now - each.parked.last_used_s for each in found) == pytest.approx([0, 1000, 2000], abs=0.01)


@pytest.mark.parametrize(
    ("written_s", "marked_s", "used_s"),
    [(50, 60, 60), (60, 50, 60), (50, math.inf, 50), (200, 60, 60), (60, 200, 60), (100, 100, 100)],
)
def test_the_later_time_that_is_not_in_the_future_is_the_last_use(
    written_s: float, marked_s: float, used_s: float
) -> None:
    assert last_uses({"one": (written_s, marked_s)}, 100.0) == {"one": used_s}


def test_found_by_use_of_two_times_in_the_future_the_mark_counts() -> None:
    """One was written by a clock that ran ahead, and marked by one that was right: it is no newer than the other."""
    times = {"ahead": (9000.0, 150.0), "right": (180.0, math.inf), "past": (40.0, 50.0)}
    assert last_uses(times, 100.0) == {"ahead": 70.0, "right": 100.0, "past": 50.0}


def test_blocks_are_numbered_where_no_block_on_disk_is(monkeypatch: pytest.MonkeyPatch) -> None:
    fs, times, drawn = FaultFs(), Still(), [7, 7, 9]
    randbits = secrets.randbits
    monkeypatch.setattr(secrets, "randbits", lambda bits: drawn.pop(0) if bits == 31 else randbits(bits))
    ids = []
    for seed in (1, 2):
        store = opened(fs, times)
        ids.append(Machine().engine().read(make_units(seed, 4)).park(store).blocks)
        assert pump(store, fs) == []
    assert ids == [(7 << 32,), (9 << 32,)]
    assert drawn == []


def test_only_the_chosen_are_forgotten_and_what_nothing_needs_then() -> None:
    machine, store = started()
    kept, gone = (parked(machine, store, seed)[0] for seed in (1, 2))
    pump(store, machine.fs)
    put(machine.fs, f"{1:016x}.extent")
    put(machine.fs, "notes.txt")
    going, left = forget(machine.fs, lambda manifest: manifest.id == gone.id)
    assert [manifest.id for manifest in going] == [gone.id]
    assert left == []
    assert len(machine.fs.names()) == 3, "a manifest, its extent, and what is not ours"
    assert set(on_disk(machine.start())) == {kept.id}


def test_files_of_others_are_left_alone() -> None:
    """Whatever their names end with."""
    machine = Machine()
    names = ["mine.extent", "notes.manifest", "a.manifest.tmp", "x.tmp", f"{1:016x}.extent.bak", f"{2:032x}"]
    for name in names:
        put(machine.fs, name)
    machine.start()
    assert machine.fs.names() == sorted(names)


def test_what_is_of_no_use_is_removed() -> None:
    """A write that did not end, an extent that nobody names, a manifest that is torn or under another's name."""
    machine, store = started()
    there, rows = parked(machine, store, 1)
    pump(store, machine.fs)
    good = machine.fs.names()
    [manifest] = [name for name in good if name.endswith(".manifest")]
    data = bytes(machine.fs.content(manifest))
    put(machine.fs, f"{1:032x}.manifest.tmp", data)
    put(machine.fs, f"{2:032x}.manifest", data)
    put(machine.fs, f"{3:032x}.manifest", data[:-1])
    put(machine.fs, f"{4:016x}.extent", data)
    store = machine.start()
    assert machine.fs.names() == good
    assert_same_rows(rows_of(store, machine.fs, store.get(there.id)), rows)


@pytest.mark.parametrize("fails", [True, False])
def test_files_that_cannot_be_removed_are_told_of_and_count(fails: bool, caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine()
    put(machine.fs, f"{4:016x}.extent", bytes(5000))
    if fails:
        machine.fs.fault = Fault(machine.fs.operations + 3)  # after the names and the times are read
    with caplog.at_level(logging.WARNING, "parkd.store.opening"):
        store = machine.start()
    assert any("could not be removed" in record.message for record in caplog.records) == fails
    assert store.disk_stats().bytes_in_use == (8192 if fails else 0)
    assert len(machine.fs.names()) == fails


def test_what_cannot_be_removed_displaces_what_can() -> None:
    """The budget holds from the start."""
    machine, store = started(disk_bytes=80_000)
    for seed in (1, 2):
        parked(machine, store, seed)
        pump(store, machine.fs)
    taken = store.disk_stats().bytes_in_use
    put(machine.fs, f"{400:016x}.extent", bytes(5000))
    machine.disk_bytes = taken
    machine.fs.fault = Fault(machine.fs.operations + machine_steps_to_remove(machine))
    store = machine.start()
    assert len(on_disk(store)) == 1
    assert store.disk_stats().bytes_in_use <= taken


def machine_steps_to_remove(machine: Machine) -> int:
    """Operations of a start until it removes the first file: it reads the names, each manifest and the times."""
    return 1 + sum(name.endswith(".manifest") for name in machine.fs.names()) + 1 + 1


@pytest.mark.parametrize(("ahead_s", "counts"), [(-1.0, True), (0.0, True), (0.5, False)])
def test_a_use_is_believed_up_to_now(ahead_s: float, counts: bool) -> None:
    """Times of files from the future are of a wrong clock: the next marks set them right."""
    machine = Machine(times=Still())
    store = machine.start()
    there, _ = parked(machine, store, 1)
    pump(store, machine.fs)
    name = on_disk(store)[there.id].disk.name
    machine.times.now += 500.0
    machine.fs.marks[name] = machine.times.wall() + ahead_s
    again = machine.start()
    used_s = again.get(there.id).last_used_s
    assert used_s == (pytest.approx(1500.0 + ahead_s) if counts else pytest.approx(1000.0))
    job = again.next_marks(stops=True)
    assert (job is None) == counts
    if job is not None:
        assert [at for _, at in job.times] == [pytest.approx(1.7e9 + 1000.0)]


@pytest.mark.parametrize(("idle_s", "stays"), [(3600.0, True), (3600.5, False)])
def test_as_old_as_it_may_be_is_not_too_old(idle_s: float, stays: bool) -> None:
    machine = Machine(times=Still(), max_age_s=3600.0)
    store = machine.start()
    there, _ = parked(machine, store, 1)
    pump(store, machine.fs)
    machine.times.now += idle_s
    assert (there.id in on_disk(machine.start())) == stays


def test_a_directory_is_described_and_what_lies_in_its_own_layout_is_not_cut(tmp_path: Path) -> None:
    """Files that end with the process need no description."""
    one, two = layout_of(2), layout_of(1, 3)
    machine, store = started(layout=one)
    there, _ = parked(machine, store, 1)
    assert pump(store, machine.fs) == []
    opened(machine.fs, Still(), one, fingerprint=machine.fingerprint)
    assert not [name for name in machine.fs.sizes() if name.endswith(LAYOUT_SUFFIX)]
    for layout, cut in ((one, False), (two, True), (one, False)):
        store = opened(machine.fs, Still(), layout, fingerprint=machine.fingerprint, directory=tmp_path)
        [(found, place)] = store.table.on_disk()
        assert (found.id, found.is_foreign, place.recut is not None) == (there.id, False, cut)
        names = {name for name in machine.fs.sizes() if name.endswith(LAYOUT_SUFFIX)}
        assert names == {layout_name(layout.digest), layout_name(one.digest)}
