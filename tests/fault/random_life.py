"""A random life of a store on a disk that may fail: the steps, each chosen by a number, for whoever draws numbers."""

from __future__ import annotations

import errno
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from parkd.store.records import Parked, Refused
from tests.fault.fault_fs import Crashed, Fault, FaultFs
from tests.fault.tier_kit import FINGERPRINT, Machine, on_disk, run
from tests.fault.workload import LAYOUTS, Life, Wrong, away, check_files
from tests.unit.store.store_kit import assert_counts, assert_within_budget, make_units

TREE = make_units(1, 48)
"""Prompts branch off this one, so that prefixes are shared."""
LONGEST = 90
FAULTS = [
    Fault(0, "error", errno.EIO),
    Fault(0, "error", errno.ENOSPC),
    Fault(0, "error", errno.ENOSPC, sticky=True),
    Fault(0, "error", errno.EIO, sticky=True),
    Fault(0, "short"),
    Fault(0, "crash-before"),
    Fault(0, "crash-after"),
]


@dataclass
class RandomLife:
    """One machine, its processes and everything that was ever put into them."""

    seed: int = 0
    layout: str = "rows"
    """One of `LAYOUTS`."""
    ram_bytes: int = 150_000
    disk_bytes: int = 400_000
    branches: int = 100
    counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.life = Life(Machine(FaultFs(self.seed), LAYOUTS[self.layout], self.ram_bytes, self.disk_bytes))
        self.life.start()

    @property
    def store(self):
        assert self.life.store is not None
        return self.life.store

    @property
    def fs(self) -> FaultFs:
        return self.life.machine.fs

    def read(self, shared: int, more: int) -> None:
        """A new prompt is live, cold."""
        engine = self.life.engine
        shared %= len(TREE) + 1
        engine.read(TREE[:shared], checkpoint=shared > 0)
        engine.extend(self._more(more % 30 + 1), checkpoint=True)

    def answer(self, more: int) -> None:
        if self.life.engine.position < LONGEST:
            self.life.engine.extend(self._more(more % 20 + 1), checkpoint=True)

    def park(self) -> None:
        if self.life.engine.position:
            is_parked = self.guarded(lambda: self.life.park() is not None)
            self._count("parked" if is_parked else "refused")

    def restore(self, choice: int, stop: int) -> None:
        """A conversation of either tier is live again, or read cold."""
        parked = self._pick(choice)
        if parked is None:
            return
        has_fixed_state = self.life.machine.layout.fixed_bytes > 0
        places = [c.position for c in parked.checkpoints] if has_fixed_state else None
        stop = places[stop % len(places)] if places else stop % parked.position + 1
        if not self.guarded(lambda: self.life.read(parked, stop)):
            self._count("missed")
            return
        self._count("read")
        there = [c for c, _ in self.store.candidates(parked.key_digest, parked.prefix_hashes) if c.tier.value != "disk"]
        for candidate in there:
            fits = candidate.position >= stop and np.array_equal(candidate.units[:stop], parked.units[:stop])
            if fits and (not places or stop in [c.position for c in candidate.checkpoints]):
                self.guarded(partial(self._restored, candidate, stop))
                return

    def _restored(self, parked: Parked, stop: int) -> bool:
        try:
            self.life.restore(parked, stop)
        except OSError:
            self.life.engine.truncate(0)  # the file can't be read, and the prompt would be read cold
            return False
        return True

    def work(self, jobs: int) -> None:
        """Some of the file work."""
        for _ in range(jobs % 4 + 1):
            if not self.guarded(self._one_job):
                return

    def evict(self, choice: int) -> None:
        away(self.life, self._pick(choice))

    def drop(self, choice: int) -> None:
        parked = self._pick(choice)
        if parked is not None:
            self.store.drop(parked.id, "test")
            self.life.note()

    def restart(self, choice: int) -> None:
        """The process ends, in order or not; the machine goes on."""
        if choice % 2:
            self.work_all()
        self.fs.fault = None
        self._count("stopped")
        self.life.start()
        self.check()

    def crash(self, kept: int) -> None:
        """The machine stops."""
        promised = set(self.life.acknowledged)
        self.fs.crash([0.0, 1.0, None][kept % 3])
        self._count("crashed")
        self.life.start()
        missing = promised - set(on_disk(self.store))
        if missing:
            raise Wrong(f"acknowledged and lost: {sorted(missing)}")
        for conversation_id in sorted(promised):
            parked = self.store.get(conversation_id)
            refused = self.life.no_room
            if parked is not None and not self.life.read(parked) and self.life.no_room == refused:
                raise Wrong(f"acknowledged and not readable: {conversation_id}")
        self.check()

    def change_weights(self) -> None:
        """The next process has another model: nothing is matched, nothing that is promised is lost without need."""
        machine = self.life.machine
        machine.fingerprint = b"the weights, two" if machine.fingerprint == FINGERPRINT else FINGERPRINT
        self.fs.fault = None
        self.life.start()
        for entry in on_disk(self.store).values():
            if entry.is_foreign and any(
                c.id == entry.parked.id
                for c, _ in self.store.candidates(entry.parked.key_digest, entry.parked.prefix_hashes)
            ):
                raise Wrong("a conversation of other weights was matched")

    def fail(self, choice: int, after: int) -> None:
        """Something goes wrong at one of the next operations."""
        model = FAULTS[choice % len(FAULTS)]
        self.fs.fault = Fault(self.fs.operations + 1 + after % 12, model.kind, model.code, model.sticky)

    def mend(self) -> None:
        self.fs.fault = None
        self.life.machine.times.now += 1000.0  # pauses after failed writes end

    def work_all(self) -> None:
        while self.guarded(self._one_job):
            pass

    def check(self) -> None:
        """What must hold at every moment."""
        store = self.store
        assert_within_budget(store)
        assert_counts(store)
        self.life.check_conversations()
        if self.fs.bytes > self.disk_bytes:
            raise Wrong(f"{self.fs.bytes} bytes on disk of {self.disk_bytes}")
        if self.fs.bytes > store.disk.bytes_in_use:
            raise Wrong("there are more bytes on disk than in the books")

    def end(self) -> None:
        """Everything is read once more, and nothing is left behind."""
        self.mend()
        self.work_all()
        self.crash(0)
        check_files(self.store, self.fs, self.disk_bytes)
        for entry in list(on_disk(self.store).values()):
            if not entry.is_foreign:
                self.life.read(self.store.get(entry.parked.id) or entry.parked)

    def guarded(self, call) -> bool:
        """Runs what touches files; a stop of the machine in it is survived. False for a miss, or nothing done."""
        try:
            return bool(call())
        except Crashed:
            self.crash(int(self.fs.rng.integers(0, 3)))
            return False

    def _one_job(self) -> bool:
        job = self.store.next_job()
        self.life.note()
        if job is None:
            return False
        error = run(self.store, self.fs, job)
        self._count("job failed" if error is not None else "job done")
        self.life.note()
        return True

    def _pick(self, choice: int) -> Parked | None:
        ids = sorted({*self.store.table.in_ram, *(i for i, e in on_disk(self.store).items() if not e.is_foreign)})
        return self.store.get(ids[choice % len(ids)]) if ids else None

    def _more(self, count: int) -> np.ndarray:
        self.branches += 1
        return make_units(self.branches, count)

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1


__all__ = ["RandomLife", "Refused"]
