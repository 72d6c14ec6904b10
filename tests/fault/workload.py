"""A scripted life of a store on a disk that may fail, and what must be true of that disk afterwards."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from parkd.state import Grain, RowRun
from parkd.store.conversations import Conversation
from parkd.store.inspection import InspectedConversation, Inspection
from parkd.store.records import Parked, Refused, Tier
from parkd.store.store import ConversationStore
from tests.fault.fault_fs import Crashed, FaultFs
from tests.fault.tier_kit import BLOCK_TOKENS, Machine, evict, on_disk, promote, pump
from tests.fault.whole_kit import FIXED_BYTES, whole_layout, whole_state
from tests.unit.store.lineage_model import FixedState, Known, LineageModel
from tests.unit.store.store_kit import (
    CopyEngine,
    assert_counts,
    assert_within_budget,
    leased_state,
    make_layout,
    make_units,
)

FIXED = make_layout(fixed_bytes=(700, 1000))
LAYOUTS = {
    "rows": make_layout(),
    "fixed state": FIXED,
    "whole": whole_layout(Grain.OPAQUE),
    "whole with checkpoints": whole_layout(Grain.OPAQUE, FIXED_BYTES),
    "file": whole_layout(Grain.FILE),
}


class Wrong(AssertionError):
    """The store broke its word."""


@dataclass
class Life:
    """A machine, the conversations that were ever parked, and those whose writing was acknowledged."""

    machine: Machine
    known: dict[str, Known] = field(default_factory=dict)
    """Everything that was ever parked, and what was read from disk under an id of its own."""
    acknowledged: set[str] = field(default_factory=set)
    no_room: int = 0
    """Reads that memory was too small for."""
    store: ConversationStore | None = None
    engine: CopyEngine | None = None

    def __post_init__(self) -> None:
        self.model = LineageModel(self.machine.layout, BLOCK_TOKENS)

    def start(self) -> None:
        self.store = None
        self.machine.fs.peak_bytes = 0
        self.store = self.machine.start()
        self.engine = self.machine.engine(self.machine.starts)
        self.model.live, self.model.covered = (), 0
        self.engine.watcher = self.model
        self.note()

    def note(self) -> None:
        """What the disk tier says is there may be relied on from now on."""
        assert self.store is not None
        seen = self.store.inspect().conversations.values()
        self.acknowledged = {each.id for each in seen if each.is_on_disk and not each.is_foreign}

    def work(self) -> None:
        """Does the file work there is, and notes what is acknowledged step by step."""
        assert self.store is not None
        while (job := self.store.next_job()) is not None:
            self.note()
            run_one(self.store, self.machine.fs, job)
            self.note()

    def park(self) -> Parked | None:
        """Parks what is live. Raises Wrong for anything but what the live state descends from and what is new."""
        store, engine = self.store, self.engine
        assert store is not None
        assert engine is not None
        seen, tokens = store.inspect(), engine.position
        in_ram = {i for i, block in seen.blocks.items() if block.slot is not None and block.is_sealed}
        stored = {piece for block, piece in self.model.names.items() if block in in_ram}
        kin = [self.known[i] for i, each in seen.conversations.items() if each.is_in_ram]
        capture = store.begin_capture(engine.request())
        if isinstance(capture, Refused):
            return None
        expected = self.model.expected(engine, capture.position, stored, kin)
        inheritable = self.model.inheritable(expected.shared, self.known.values(), tokens)
        if capture.transfer.start != expected.start:
            raise Wrong(f"rows are copied from {capture.transfer.start}, not from {expected.start}")
        try:
            parked = engine.finish(store, capture)
        except OSError:  # an engine that cannot write its file parks nothing
            store.abort(capture)
            return None
        known = expected.known
        self._check_places(parked, known, {*inheritable, *known.checkpoints})
        for checkpoint in parked.checkpoints:
            if checkpoint.position not in known.checkpoints:
                known.checkpoints[checkpoint.position] = inheritable[checkpoint.position][0]
        self.model.name(known, parked.blocks, keeps_names=True)
        self.model.captured(known)
        self.known[parked.id] = known
        return parked

    def restore(self, parked: Parked, stop: int) -> None:
        """Makes a conversation in RAM live up to `stop`. Raises OSError if its file cannot be read."""
        assert self.store is not None
        assert self.engine is not None
        known = self.known[parked.id]
        with self.store.lease(parked.id, stop) as lease:
            self.engine.restore(lease)
        self.model.restored(known, stop)
        if self.model.pieces_of(lease.lineage) != self.model.live:
            raise Wrong(f"live rows of {self.model.live} are said to be of {lease.lineage}")

    def read(self, parked: Parked, stop: int | None = None) -> bool:
        """Gets the state at `stop` from whichever tier has it. False for a miss; raises Wrong for other bytes than
        were put."""
        store, fs = self.store, self.machine.fs
        assert store is not None
        stop = parked.position if stop is None else stop
        if parked.tier is Tier.DISK:
            before = store.inspect().blocks
            loaded = promote(store, fs, parked, stop)
            if isinstance(loaded, Parked):
                self._loaded(parked.id, loaded, {i for i, block in before.items() if block.slot is not None})
            if isinstance(loaded, Refused) or (loaded is not None and loaded.position < stop):
                self.no_room += 1
                return False
            if loaded is None:
                self.note()
                return False
            parked = loaded
        is_whole = store.layout.is_opaque
        state = whole_state(store, fs, parked, stop) if is_whole else leased_state(store, parked.id, stop)
        self.note()
        if state is None:
            return False
        rows, fixed = state
        known = self.known[parked.id]
        if not np.array_equal(known.units[:stop], parked.units[:stop]):
            raise Wrong(f"{parked.id} has other units")
        if not all(np.array_equal(got, want[:stop]) for got, want in zip(rows, known.rows, strict=True)):
            raise Wrong(f"{parked.id} has other bytes")
        if store.layout.fixed_bytes and not any(_is_same(fixed, put) for put in self._states(known, stop)):
            raise Wrong(f"{parked.id} has other bytes of fixed state at {stop}")
        return True

    def check_conversations(self) -> None:
        """What both tiers say that they hold is what was put in, and each block has the owners that name it."""
        assert self.store is not None
        seen = self.store.inspect()
        usable = [each for each in seen.conversations.values() if not each.is_foreign]
        for each in usable:
            known = self.known[each.id]
            if not np.array_equal(each.units, known.units):
                raise Wrong(f"{each.id} has other units")
            if self.model.pieces_of(each.blocks) != known.pieces:
                raise Wrong(f"{each.id} has blocks {each.blocks}")
            states = {c.position for c in each.checkpoints if self._states(known, c.position)}
            self._check_places(each, known, states)
        for each in seen.fading:
            if self.model.pieces_of(each.blocks) != self.known[each.id].pieces:
                raise Wrong(f"{each.id}, which fades, has blocks {each.blocks}")
        there = [*(each for each in usable if each.is_in_ram), *seen.fading, *seen.captures]
        owners = Counter(block for each in there for block in each.blocks)
        if {i: block.owners for i, block in seen.blocks.items() if block.owners} != owners:
            raise Wrong("blocks in memory are owned by nobody that needs them, or need owning")
        owners = Counter(checkpoint.id for each in there for checkpoint in each.checkpoints)
        if {i: checkpoint.owners for i, checkpoint in seen.checkpoints.items() if checkpoint.owners} != owners:
            raise Wrong("checkpoints in memory are owned by nobody that needs them, or need owning")
        self._check_extents(seen)
        if any(block.slot is not None and not block.owners for block in seen.blocks.values()):
            raise Wrong("a block is in memory and nobody owns it")
        if any(block.slot is None and block.extent is None for block in seen.blocks.values()):
            raise Wrong("a block is owned and nowhere")

    def _check_extents(self, seen: Inspection) -> None:
        """Each extent is held by the conversations whose files name it, and these name all that they need."""
        assert seen.disk is not None
        names = Counter(name for each in seen.conversations.values() for name in each.files[1:])
        if {extent.name: extent.holders for extent in seen.disk.extents.values()} != names:
            raise Wrong("extents are held by nobody that needs them, or need holding")
        for each in seen.conversations.values():
            if each.is_on_disk and not each.is_foreign:
                places = [seen.blocks[block].extent for block in each.blocks]
                places += [seen.checkpoints[checkpoint.id].extent for checkpoint in each.checkpoints]
                if any(at is None or seen.disk.extents[at].name not in each.files for at in places):
                    raise Wrong(f"{each.id} does not hold all that it needs on disk")

    def _loaded(self, source: str, loaded: Parked, in_ram: set[int]) -> None:
        """Notes what was read from disk: a conversation, or the beginning of one under an id of its own. `in_ram` are
        the blocks that were in memory before."""
        known = self.known[source]
        pieces = known.pieces[: len(loaded.blocks)]
        if self.model.is_opaque and in_ram & {piece.block for piece in pieces}:
            # Its bytes were in memory for another conversation, and were read once more, into a block of their own.
            [block] = loaded.blocks
            if self.model.names.setdefault(block, pieces[0]) is not pieces[0]:
                raise Wrong(f"{source} was read into the block of others")
        elif loaded.blocks != tuple(piece.block for piece in pieces):
            raise Wrong(f"{source} was read into blocks {loaded.blocks}")
        if loaded.id != source:
            checkpoints = {place: state for place, state in known.checkpoints.items() if place <= loaded.position}
            rows = [stage[: loaded.position] for stage in known.rows]
            self.known[loaded.id] = Known(known.units[: loaded.position], rows, pieces, checkpoints)
        elif loaded.position != known.position:
            raise Wrong(f"{source} was read in part, under its own id")

    def _states(self, known: Known, stop: int) -> list[FixedState]:
        """Every fixed state that was put in at `stop` for the rows that `known` has there."""
        own = [known.checkpoints[stop]] if stop in known.checkpoints else []
        if self.model.is_opaque:
            alike = [each for each in self.known.values() if each.pieces == known.pieces]
        else:
            blocks = -(-stop // BLOCK_TOKENS)
            alike = [each for each in self.known.values() if each.pieces[:blocks] == known.pieces[:blocks]]
        return own + [each.checkpoints[stop] for each in alike if stop in each.checkpoints]

    def _check_places(self, parked: Parked | InspectedConversation, known: Known, allowed: set[int]) -> None:
        """It may have more than was put in: checkpoints that it inherited later, of the same rows."""
        places = [checkpoint.position for checkpoint in parked.checkpoints]
        if not set(places) <= allowed:
            raise Wrong(f"{parked.id} has checkpoints at {sorted({*places} - allowed)} that its rows have not")
        lost = set(known.checkpoints) - set(places)
        if lost and len(places) < self.model.checkpoint_limit:
            raise Wrong(f"{parked.id} has lost its checkpoints at {sorted(lost)}")
        if places != sorted(places):
            raise Wrong(f"{parked.id} has checkpoints in the order {places}")


def _is_same(fixed: tuple[np.ndarray, ...], put: FixedState) -> bool:
    """At the end of an opaque state nothing is put: its bytes have it."""
    if not put.parts:
        return not any(part.nbytes for part in fixed)
    return all(np.array_equal(got, want) for got, want in zip(fixed, put.parts, strict=True))


def run_one(store: ConversationStore, fs: FaultFs, job: object) -> None:
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
    for entry in list(on_disk(store).values()):
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
        entry = life.store.table.in_ram.get(parked.id)
        if entry is not None and entry.may_leave_ram:
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
    missing = promised - set(on_disk(store))
    if missing:
        raise Wrong(f"acknowledged and lost: {sorted(missing)}")
    for conversation_id, entry in list(on_disk(store).items()):
        parked = store.get(conversation_id) or entry.parked
        if not life.read(parked) and conversation_id in promised:
            raise Wrong(f"acknowledged and not readable: {conversation_id}")
    assert_within_budget(store)
    assert_counts(store)


def check_rest(life: Life) -> None:
    """What must be true of a running store once there is no file work to do, whatever failed before."""
    store, fs = life.store, life.machine.fs
    assert store is not None
    disk, entries = store.disk, store.table.in_ram.values()
    is_down = fs.fault is not None and fs.fault.sticky  # what can't be removed is charged, if it is there or not
    if disk.bytes_in_use < fs.bytes or (disk.bytes_in_use > fs.bytes and not is_down):
        raise Wrong(f"{fs.bytes} bytes on disk, {disk.bytes_in_use} in the books")
    needed = Counter(ref.id for entry in on_disk(store).values() for ref in entry.disk.extents)
    if {ref.id: holders for ref, holders in disk.extents()} != needed:
        raise Wrong("extents are held by nobody that needs them, or need holding")
    if sum(entry.ram.leases for entry in entries) != len(store.queue):
        raise Wrong("somebody is leased who does not wait for the disk")
    if life.machine.layout.grain is Grain.FILE:
        files = {run.file.path.name for entry in entries for run in _runs(store, entry)}
        if not files <= set(fs.names()):
            raise Wrong(f"{sorted(files - set(fs.names()))} are said to be there")
    assert_counts(store)


def _runs(store: ConversationStore, entry: Conversation) -> tuple[RowRun, ...]:
    [runs] = store.table.blocks.runs(entry.parked.blocks, entry.parked.position, writeable=False)
    return runs


def check_files(store: ConversationStore, fs: FaultFs, budget_bytes: int) -> None:
    """Nothing lies there that no manifest names, and the books agree with the files."""
    named = {ref.name for entry in on_disk(store).values() for ref in entry.disk.extents}
    named |= {entry.disk.name for entry in on_disk(store).values()}
    if set(fs.names()) != named:
        raise Wrong(f"files {sorted(set(fs.names()) ^ named)} are too many or missing")
    if fs.bytes > budget_bytes:
        raise Wrong(f"{fs.bytes} bytes on disk of {budget_bytes}")
    if store.disk.bytes_in_use != fs.bytes:
        raise Wrong(f"{fs.bytes} bytes on disk, {store.disk.bytes_in_use} in the books")


__all__ = ["FIXED", "Crashed", "Life", "Tier", "Wrong", "check", "check_files", "live", "pump", "survive"]
