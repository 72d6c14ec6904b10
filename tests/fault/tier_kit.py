"""A store over RAM and a disk that lives in memory, driven without threads: every run replays."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

import numpy as np

from parkd.state import Recut, StateLayout
from parkd.store.budget import BLOCK_BYTES
from parkd.store.conversations import Conversation
from parkd.store.disk import DiskSetup
from parkd.store.disk_policy import WriteAllowance
from parkd.store.files.disk_jobs import RemoveJob, WriteJob, read, remove, write
from parkd.store.opening import recover, scan
from parkd.store.policy import Policy
from parkd.store.records import DiskConfig, Parked, Refused, StoreConfig, Tier
from parkd.store.store import ConversationStore
from tests.fault.fault_fs import FaultFs
from tests.fault.whole_kit import WholeEngine, path_of, whole_rows
from tests.unit.store.store_kit import KEY, CopyEngine, leased_rows, make_layout, make_units

FINGERPRINT = b"the weights, one"
BLOCK_TOKENS = 4
INDEX_BYTES = 1 << 20
DAY_BYTES = 1 << 40


@dataclass
class Times:
    """The store's clock and the wall's, which differ."""

    now: float = 1000.0

    def clock(self) -> float:
        self.now += 1.0
        return self.now

    def wall(self) -> float:
        return self.now + 1.7e9


@dataclass
class Machine:
    """What outlives a process: the disk, and time."""

    fs: FaultFs = field(default_factory=FaultFs)
    layout: StateLayout = field(default_factory=make_layout)
    ram_bytes: int = 1 << 20
    disk_bytes: int = 4 << 20
    fingerprint: bytes = FINGERPRINT
    max_age_s: float | None = None
    write_bytes_per_day: int = DAY_BYTES
    index_bytes: int = INDEX_BYTES
    slots: int | None = None
    policy: Policy | None = None
    times: Times = field(default_factory=Times)
    recuts: dict[bytes, Recut] = field(default_factory=dict)
    """Layouts of other splits that the directory describes."""
    starts: int = 0
    numbers: count = field(default_factory=lambda: count(1))

    def start(self) -> ConversationStore:
        """A process: opens what the disk holds."""
        self.starts += 1
        config = DiskConfig(
            self.disk_bytes, self.fingerprint, self.index_bytes, self.write_bytes_per_day, self.max_age_s
        )
        setup = DiskSetup(
            config,
            WriteAllowance.full(self.write_bytes_per_day, self.times.now),
            self.times.wall,
            lambda: next(self.numbers),
            self.starts << 32,
            path_of,
        )
        store = ConversationStore(
            StoreConfig(self.ram_bytes + self.index_bytes, BLOCK_TOKENS, self.slots, slab_bytes=1 << 18),
            self.layout,
            self.times.clock,
            disk=setup,
            new_id=lambda: f"conversation-{next(self.numbers)}",
            policy=self.policy,
        )
        recover(store.table, self.fs, scan(self.fs), self.recuts)
        assert store.disk.bytes_in_use <= self.disk_bytes
        return store

    def engine(self, seed: int = 1) -> CopyEngine:
        if self.layout.is_opaque:
            return WholeEngine(self.layout, BLOCK_TOKENS, seed, self.fs)
        return CopyEngine(self.layout, BLOCK_TOKENS, seed=seed)


def started(*args: object, **options: object) -> tuple[Machine, ConversationStore]:
    """A machine and its first process; the options are the machine's."""
    machine = Machine(*args, **options)  # type: ignore[arg-type]
    return machine, machine.start()


def run(store: ConversationStore, fs: FaultFs, job: WriteJob | RemoveJob) -> Exception | None:
    """One job, as the worker does it."""
    if isinstance(job, RemoveJob):
        store.finished(job, None, remove(fs, job))
        return None
    try:
        write(fs, job)
    except OSError as error:
        store.finished(job, error)
        return error
    store.finished(job, None)
    return None


def pump(store: ConversationStore, fs: FaultFs, most: int = 1000) -> list[Exception]:
    """Does what there is to do; returns what failed. A pause after a failure is waited out by nobody."""
    errors = []
    for _ in range(most):
        job = store.next_job()
        if job is None:
            break
        error = run(store, fs, job)
        if error is not None:
            errors.append(error)
    return errors


def promote(store: ConversationStore, fs: FaultFs, parked: Parked, stop: int | None = None) -> Parked | Refused | None:
    promotion = store.promote(parked.id, parked.position if stop is None else stop)
    if isinstance(promotion, Refused):
        return promotion
    error: Exception | None = None
    try:
        read(fs, promotion.job)
    except Exception as raised:
        error = raised
    return store.promoted(promotion, error)


class NoRoom(Exception):
    """Memory is too small for what is on disk: nothing is lost."""


def rows_of(store: ConversationStore, fs: FaultFs, parked: Parked, stop: int | None = None) -> list[np.ndarray] | None:
    """The rows `[0, stop)` as the store gives them, from whichever tier; None for a miss.

    Raises NoRoom."""
    stop = parked.position if stop is None else stop
    if parked.tier is Tier.DISK:
        loaded = promote(store, fs, parked, stop)
        if isinstance(loaded, Refused) or (loaded is not None and loaded.position < stop):
            raise NoRoom
        if loaded is None:
            return None
        parked = loaded
    if store.layout.is_opaque:
        return whole_rows(store, fs, parked, stop)
    return leased_rows(store, parked, stop)


def on_disk(store: ConversationStore) -> dict[str, Conversation]:
    return {each.id: each for each, _ in store.table.on_disk()}


def evict(store: ConversationStore, parked: Parked) -> None:
    """Takes a conversation out of RAM as making room does."""
    store.table.evict(store.table.known(parked.id), "a test")


def parked(machine: Machine, store: ConversationStore, seed: int, tokens: int = 11) -> tuple[Parked, list[np.ndarray]]:
    engine = machine.engine(seed).read(make_units(seed, tokens), checkpoint=True)
    return engine.park(store), engine.rows()


def away(machine: Machine, store: ConversationStore, seed: int, tokens: int = 11) -> tuple[Parked, list[np.ndarray]]:
    """A conversation that is on disk only."""
    there, rows = parked(machine, store, seed, tokens)
    assert pump(store, machine.fs) == []
    evict(store, there)
    return store.get(there.id), rows


__all__ = [
    "BLOCK_BYTES",
    "KEY",
    "Machine",
    "NoRoom",
    "away",
    "evict",
    "on_disk",
    "parked",
    "promote",
    "pump",
    "rows_of",
    "run",
    "started",
]
