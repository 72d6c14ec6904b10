"""A scripted life of a store on a disk that may fail, and what must be true of that disk afterwards."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from parkd.state import Grain, RowRun
from parkd.store.records import Parked, Refused, Tier
from parkd.store.shelf import Entry
from parkd.store.tiers import TieredStore
from tests.fault.fault_fs import Crashed, FaultFs
from tests.fault.tier_kit import Machine, NoRoom, evict, pump, rows_of
from tests.fault.whole_kit import FIXED_BYTES, whole_layout
from tests.unit.store.store_kit import CopyEngine, assert_counts, assert_within_budget, make_layout, make_units

FIXED = make_layout(fixed_bytes=(700, 1000))
LAYOUTS = {
    "rows": make_layout(),
    "fixed state": FIXED,
    "whole": whole_layout(Grain.OPAQUE),
    "whole with checkpoints": whole_layout(Grain.OPAQUE, FIXED_BYTES),
    "file": whole_layout(Grain.FILE),
}
Content = tuple[np.ndarray, list[np.ndarray]]


class Wrong(AssertionError):
    """The store broke its word."""


@dataclass
class Life:
    """A machine, the conversations that were ever parked, and those whose writing was acknowledged."""

    machine: Machine
    content: dict[str, Content] = field(default_factory=dict)
    acknowledged: set[str] = field(default_factory=set)
    no_room: int = 0
    """Reads that memory was too small for."""
    store: TieredStore | None = None
    engine: CopyEngine | None = None

    def start(self) -> None:
        self.store = None
        self.machine.fs.peak_bytes = 0
        self.store = self.machine.start()
        self.engine = self.machine.engine(self.machine.starts)
        self.note()

    def note(self) -> None:
        """What the disk tier says is there may be relied on from now on."""
        assert self.store is not None
        self.acknowledged = {i for i, e in self.store.disk.entries.items() if not e.is_foreign}

    def work(self) -> None:
        """Does the file work there is, and notes what is acknowledged step by step."""
        assert self.store is not None
        while (job := self.store.next_job()) is not None:
            self.note()
            run_one(self.store, self.machine.fs, job)
            self.note()

    def park(self) -> Parked | None:
        assert self.store is not None
        assert self.engine is not None
        parked = self.engine.park(self.store)
        if isinstance(parked, Refused):
            return None
        self.content[parked.id] = parked.units.copy(), self.engine.rows(parked.position)
        return parked

    def read(self, parked: Parked, stop: int | None = None) -> bool:
        """Gets rows from whichever tier has them. False for a miss; raises Wrong for other bytes than were put."""
        assert self.store is not None
        stop = parked.position if stop is None else stop
        try:
            rows = rows_of(self.store, self.machine.fs, parked, stop)
        except NoRoom:
            self.no_room += 1
            return False
        self.note()
        if rows is None:
            return False
        source = self.store._sources_of.get(parked.id, parked.id)  # a head was read into RAM under an id of its own
        units, expected = self.content[source]
        if not np.array_equal(units[:stop], parked.units[:stop]):
            raise Wrong(f"{parked.id} has other units")
        if not all(np.array_equal(got, want[:stop]) for got, want in zip(rows, expected, strict=True)):
            raise Wrong(f"{parked.id} has other bytes")
        return True


def run_one(store: TieredStore, fs: FaultFs, job: object) -> None:
    from tests.fault.tier_kit import run

    run(store, fs, job)  # type: ignore[arg-type]


def live(life: Life) -> None:
    """Parks, grows, branches, evicts, reads back, drops and starts again: every operation on files is in it."""
    life.start()
    engine, store = life.engine, life.store
    assert engine is not None
    assert store is not None
    first = park(life, engine.read(make_units(1, 9), checkpoint=True))
    life.work()
    engine.extend(make_units(2, 6), checkpoint=True)
    grown = park(life, engine)
    life.work()
    park(life, engine.read(make_units(3, 11), checkpoint=True))
    life.work()
    engine.extend(make_units(6, 3), checkpoint=True)
    park(life, engine)  # waits, and is superseded before it is written
    engine.extend(make_units(7, 2), checkpoint=True)
    park(life, engine)
    life.work()
    check_rest(life)
    away(life, first)
    away(life, grown)
    if grown is not None and (back := store.get(grown.id)) is not None:
        life.read(back)
    branch = grown.units[:8] if grown is not None else make_units(1, 8)
    park(life, engine.read(np.concatenate([branch, make_units(4, 7)]), checkpoint=True))
    life.work()
    if grown is not None and store.get(grown.id) is not None and not life.machine.layout.fixed_bytes:
        away(life, grown)
        if (back := store.get(grown.id)) is not None:
            life.read(back, 5)
            store.drop(grown.id, "test")
    life.work()
    life.start()
    store, engine = life.store, life.engine
    for entry in list(store.disk.entries.values()):
        life.read(store.get(entry.parked.id) or entry.parked)
    park(life, engine.read(make_units(5, 13), checkpoint=True))
    life.work()
    check_rest(life)


def park(life: Life, _engine: CopyEngine) -> Parked | None:
    return life.park()


def away(life: Life, parked: Parked | None) -> None:
    """Out of RAM, if it is there and may go."""
    assert life.store is not None
    if parked is not None:
        entry = life.store._shelf.entries.get(parked.id)
        if entry is not None and entry.may_go:
            evict(life.store, parked)


def survive(life: Life, kept: float | None) -> None:
    """Stops the machine, starts it again and checks everything that must be true then."""
    fs, machine = life.machine.fs, life.machine
    promised = set(life.acknowledged)
    fs.crash(kept)
    life.start()
    check(life, promised)
    # Once more: what was left behind must not trouble the next start either.
    fs.crash(kept)
    life.start()
    check(life, promised)
    assert machine.starts >= 2


def check(life: Life, promised: set[str]) -> None:
    store, fs = life.store, life.machine.fs
    assert store is not None
    check_files(store, fs, life.machine.disk_bytes)
    missing = promised - set(store.disk.entries)
    if missing:
        raise Wrong(f"acknowledged and lost: {sorted(missing)}")
    for conversation_id, entry in list(store.disk.entries.items()):
        parked = store.get(conversation_id) or entry.parked
        if not life.read(parked) and conversation_id in promised:
            raise Wrong(f"acknowledged and not readable: {conversation_id}")
    assert_within_budget(store)
    assert_counts(store)


def check_rest(life: Life) -> None:
    """What must be true of a running store once there is no file work to do, whatever failed before."""
    store, fs = life.store, life.machine.fs
    assert store is not None
    disk, entries = store.disk, store._shelf.entries.values()
    is_down = fs.fault is not None and fs.fault.sticky  # what can't be removed is charged, if it is there or not
    if disk.bytes_in_use < fs.bytes or (disk.bytes_in_use > fs.bytes and not is_down):
        raise Wrong(f"{fs.bytes} bytes on disk, {disk.bytes_in_use} in the books")
    needed = Counter(ref.id for entry in disk.entries.values() for ref in entry.manifest.extents)
    if {extent.ref.id: extent.holders for extent in disk._extents.values()} != needed:
        raise Wrong("extents are held by nobody that needs them, or need holding")
    if sum(entry.leases for entry in entries) != len(store.queue):
        raise Wrong("somebody is leased who does not wait for the disk")
    if life.machine.layout.grain is Grain.FILE:
        files = {run.file.path.name for entry in entries for run in _runs(store, entry)}
        if not files <= set(fs.names()):
            raise Wrong(f"{sorted(files - set(fs.names()))} are said to be there")
    assert_counts(store)


def _runs(store: TieredStore, entry: Entry) -> tuple[RowRun, ...]:
    [runs] = store._shelf.blocks.runs(entry.parked.blocks, entry.parked.position, writeable=False)
    return runs


def check_files(store: TieredStore, fs: FaultFs, budget_bytes: int) -> None:
    """Nothing lies there that no manifest names, and the books agree with the files."""
    named = {ref.name for entry in store.disk.entries.values() for ref in entry.manifest.extents}
    named |= {entry.manifest.name for entry in store.disk.entries.values()}
    if set(fs.names()) != named:
        raise Wrong(f"files {sorted(set(fs.names()) ^ named)} are too many or missing")
    if fs.bytes > budget_bytes:
        raise Wrong(f"{fs.bytes} bytes on disk of {budget_bytes}")
    if store.disk.bytes_in_use != fs.bytes:
        raise Wrong(f"{fs.bytes} bytes on disk, {store.disk.bytes_in_use} in the books")


__all__ = ["FIXED", "Crashed", "Life", "Tier", "Wrong", "check", "check_files", "live", "pump", "survive"]
