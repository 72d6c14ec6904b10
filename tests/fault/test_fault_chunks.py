"""Chunks of an engine's own memory on a disk that fails, forgets and fills up."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import pytest

from parkd.state import Bytes
from parkd.store import disk_policy
from parkd.store.chunks import Chunk, ChunkOptions, ChunkStore, Done, Key
from parkd.store.files.disk_jobs import DamagedPart, RemoveJob, read, remove, write
from tests.fault.fault_fs import Crashed, Fault, FaultFs

CHUNK_BYTES = 3 * 4096 + 100
PLACE_BYTES = 4 * 4096
"""Of a chunk in a file; each manifest here takes a page."""
DAY_BYTES = 1 << 40
WEIGHTS = b"the weights, one"


def key(talk: str, at: int) -> Key:
    return f"{talk}/{at:04}".encode().ljust(36, b".")


def content(name: Key) -> Bytes:
    """What an engine computes for a key: always the same, and different for each."""
    seed = int.from_bytes(name, "little") % (1 << 63)
    return np.random.default_rng(seed).integers(0, 256, CHUNK_BYTES, dtype=np.uint8)


def keys(talk: str, stop: int, start: int = 0) -> list[Key]:
    return [key(talk, at) for at in range(start, stop)]


def chunks(names: Iterable[Key]) -> list[Chunk]:
    return [Chunk(name, content(name)) for name in names]


@dataclass
class Machine:
    """What outlives a process: the disk, and time."""

    fs: FaultFs = field(default_factory=FaultFs)
    disk_bytes: int = 64 * PLACE_BYTES
    waiting_bytes: int = 64 * CHUNK_BYTES
    batch_bytes: int = 64 * CHUNK_BYTES
    write_bytes_per_day: int = DAY_BYTES
    now: float = 1000.0

    def clock(self) -> float:
        self.now += 1.0
        return self.now

    def wall(self) -> float:
        return self.now + 1.7e9

    def start(self, fingerprint: bytes = WEIGHTS) -> ChunkStore:
        options = ChunkOptions(self.disk_bytes, 1 << 20, self.write_bytes_per_day, self.waiting_bytes, self.batch_bytes)
        return ChunkStore(self.fs, options, CHUNK_BYTES, fingerprint, clock=self.clock, wall=self.wall)


def pump(store: ChunkStore, fs: FaultFs) -> list[Done]:
    """Does all there is to do."""
    for _ in range(1000):
        job = store.next_job()
        if job is None:
            return store.take_done()
        if isinstance(job, RemoveJob):
            store.finished(job, None, remove(fs, job))
            continue
        try:
            write(fs, job)
        except OSError as error:
            store.finished(job, error)
        else:
            store.finished(job, None)
    raise AssertionError("it never ends")


def park(store: ChunkStore, fs: FaultFs, talk: str, names: list[Key], run: str | None = None) -> list[Done]:
    """A request of the engine, from its first look-up to its end."""
    run = run or talk
    store.follow(run, names)
    store.offer(1, run, chunks(name for name in names if not store.has(name)))
    store.ended(run)
    return pump(store, fs)


def fetched(store: ChunkStore, fs: FaultFs, names: list[Key]) -> Exception | list[Bytes] | None:
    """What a restore brings, into memory that held something else before."""
    into = [Chunk(name, np.full(CHUNK_BYTES, 0xEE, dtype=np.uint8)) for name in names]
    job = store.begin_read(into)
    if job is None:
        return None
    try:
        read(fs, job)
    except (DamagedPart, OSError) as error:
        store.finished_read(job, error)
        return error
    store.finished_read(job, None)
    return [chunk.buffer for chunk in into]


def assert_right(store: ChunkStore, fs: FaultFs, names: list[Key]) -> None:
    got = fetched(store, fs, names)
    assert isinstance(got, list), got
    for name, buffer in zip(names, got, strict=True):
        assert np.array_equal(buffer, content(name))


def test_a_conversation_is_there_after_a_restart() -> None:
    machine = Machine()
    assert park(machine.start(), machine.fs, "a", keys("a", 5)) == [Done(1, 5 * CHUNK_BYTES)]
    machine.fs.crash(kept=0.0)
    again = machine.start()
    assert_right(again, machine.fs, keys("a", 5))
    assert not again.has(key("a", 5))


def test_of_a_conversation_that_has_ended_nothing_stays_in_memory() -> None:
    machine = Machine()
    store = machine.start()
    store.follow("cold", keys("a", 1))
    store.ended("cold")
    store.ended("unknown")
    assert store.running == 0
    store.offer(1, "a", chunks(keys("a", 2)))
    store.ended("a")
    assert store.running == 1
    pump(store, machine.fs)
    assert store.running == 0


def test_what_is_not_written_yet_is_not_there() -> None:
    machine = Machine()
    store = machine.start()
    store.offer(1, "a", chunks(keys("a", 2)))
    assert not store.has(key("a", 0))
    assert store.next_job() is None, "it may grow: it is written when it ends"
    store.ended("a")
    assert len(pump(store, machine.fs)) == 1
    assert store.has(key("a", 1))


def test_a_conversation_that_runs_is_written_in_parts() -> None:
    machine = Machine(batch_bytes=3 * CHUNK_BYTES)
    store = machine.start()
    for at in range(7):
        store.offer(at, "a", chunks([key("a", at)]))
        pump(store, machine.fs)
        assert [store.has(name) for name in keys("a", 7)] == [n < (at + 1) // 3 * 3 for n in range(7)]
    store.ended("a")
    pump(store, machine.fs)
    manifests = [name for name in machine.fs.sizes() if name.endswith(".manifest")]
    assert len(manifests) == 1, "each later one takes the place of the one before"
    assert_right(machine.start(), machine.fs, keys("a", 7))


def test_a_turn_writes_only_what_is_new() -> None:
    machine = Machine()
    store = machine.start()
    park(store, machine.fs, "a", keys("a", 5))
    written = store.counts["written_bytes"]
    done = park(store, machine.fs, "a", keys("a", 7), run="turn 2")
    assert done == [Done(1, 2 * CHUNK_BYTES)]
    assert store.counts["written_bytes"] - written < 4 * CHUNK_BYTES
    assert_right(store, machine.fs, keys("a", 7))
    assert len(store.table.on_disk()) == 1, "the first turn is part of the second"


def test_the_same_prompt_again_writes_nothing() -> None:
    machine = Machine()
    store = machine.start()
    park(store, machine.fs, "a", keys("a", 5))
    operations = machine.fs.operations
    store.offer(9, "again", chunks(keys("a", 5)))
    store.ended("again")
    assert pump(store, machine.fs) == [Done(9, 0)]
    assert machine.fs.operations == operations


def test_two_branches_share_their_beginning_and_go_alone() -> None:
    machine = Machine()
    store = machine.start()
    one, two = keys("a", 6), keys("a", 3) + keys("b", 3)
    park(store, machine.fs, "one", one)
    written = store.counts["written_bytes"]
    park(store, machine.fs, "two", two)
    assert store.counts["written_bytes"] - written < 5 * CHUNK_BYTES
    assert len(store.table.on_disk()) == 2
    assert_right(store, machine.fs, one)
    assert_right(store, machine.fs, two)
    first = next(each for each, _ in store.table.on_disk() if each.parked.prefix_hashes == tuple(one))
    store.table.leave_disk(first)
    pump(store, machine.fs)
    assert_right(store, machine.fs, two)


@pytest.mark.parametrize("bit", [0, 7])
@pytest.mark.parametrize("at", [0, 4096, CHUNK_BYTES - 1])
def test_a_flipped_bit_is_a_miss(at: int, bit: int) -> None:
    machine = Machine()
    store = machine.start()
    park(store, machine.fs, "a", keys("a", 3))
    park(store, machine.fs, "b", keys("b", 3))
    [place] = [disk for each, disk in store.table.on_disk() if each.parked.prefix_hashes[0] == key("a", 0)]
    machine.fs.flip(place.extents[0].name, at, bit)
    assert isinstance(fetched(store, machine.fs, keys("a", 3)), DamagedPart)
    assert not any(map(store.has, keys("a", 3))), "it would fail again"
    assert store.counts["read_failures"] == store.counts["dropped"] == 1
    assert_right(store, machine.fs, keys("b", 3))
    park(store, machine.fs, "a", keys("a", 3))
    assert_right(store, machine.fs, keys("a", 3))


def test_a_truncated_file_is_a_miss() -> None:
    machine = Machine()
    store = machine.start()
    park(store, machine.fs, "a", keys("a", 3))
    [name] = [name for name in machine.fs.sizes() if name.endswith(".extent")]
    del machine.fs._names[name].data[CHUNK_BYTES:]
    assert isinstance(fetched(store, machine.fs, keys("a", 3)), DamagedPart)
    assert not machine.start().has(key("a", 0))


def test_another_fingerprint_sees_nothing_and_may_take_the_room() -> None:
    machine = Machine(disk_bytes=10 * PLACE_BYTES)
    park(machine.start(), machine.fs, "a", keys("a", 5))
    store = machine.start(b"the weights, two")
    assert not any(map(store.has, keys("a", 5)))
    assert fetched(store, machine.fs, keys("a", 5)) is None
    assert len(park(store, machine.fs, "b", keys("b", 3))) == 1
    assert len(store.table.on_disk()) == 2, "there is room for both"
    park(store, machine.fs, "c", keys("c", 3))
    assert not any(each.is_foreign for each, _ in store.table.on_disk()), "it makes room first"
    assert_right(store, machine.fs, keys("b", 3))


def test_the_least_recently_used_makes_room() -> None:
    machine = Machine(disk_bytes=10 * PLACE_BYTES)
    store = machine.start()
    for talk in "abc":
        park(store, machine.fs, talk, keys(talk, 3))
    store.touch(keys("a", 3))
    park(store, machine.fs, "d", keys("d", 3))
    assert [store.has(key(talk, 0)) for talk in "abcd"] == [True, False, True, True]
    assert machine.fs.peak_bytes <= machine.disk_bytes
    assert sum(machine.fs.sizes().values()) <= store.disk.bytes_in_use <= machine.disk_bytes


def test_what_its_write_builds_on_stays_while_room_is_made() -> None:
    """The second turn needs the room of the first, whose chunks it names."""
    machine = Machine(disk_bytes=6 * PLACE_BYTES)
    store = machine.start()
    park(store, machine.fs, "a", keys("a", 3))
    park(store, machine.fs, "b", keys("b", 2))
    assert park(store, machine.fs, "a", keys("a", 5), run="turn 2")[0].why_not == ""
    assert_right(store, machine.fs, keys("a", 5))
    assert machine.fs.peak_bytes <= machine.disk_bytes


def test_more_than_the_disk_holds_is_not_kept_and_costs_nobody() -> None:
    machine = Machine(disk_bytes=8 * PLACE_BYTES)
    store = machine.start()
    park(store, machine.fs, "a", keys("a", 3))
    [done] = park(store, machine.fs, "b", keys("b", 9))
    assert done.bytes == 0
    assert "on disk" in done.why_not
    assert_right(store, machine.fs, keys("a", 3))


def test_a_tail_is_not_kept_without_its_head() -> None:
    machine = Machine()
    store = machine.start()
    store.follow("a", keys("a", 6))
    store.offer(1, "a", chunks(keys("a", 6, start=2)))
    store.ended("a")
    [done] = pump(store, machine.fs)
    assert done.why_not == "its beginning is not on disk"
    assert not store.has(key("a", 3))


def test_memory_that_waits_is_bounded() -> None:
    machine = Machine(waiting_bytes=3 * CHUNK_BYTES)
    store = machine.start()
    store.offer(1, "a", chunks(keys("a", 2)))
    store.offer(2, "b", chunks(keys("b", 2)))
    [done] = store.take_done()
    assert (done.offer, done.bytes) == (2, 0)
    assert "wait" in done.why_not
    assert [each.offer for each in pump(store, machine.fs)] == [1], "what waits is written at once then"
    store.offer(3, "b", chunks(keys("b", 2)))
    store.ended("b")
    assert [each.bytes for each in pump(store, machine.fs)] == [2 * CHUNK_BYTES]


def test_the_allowance_of_the_day_is_kept() -> None:
    machine = Machine(write_bytes_per_day=10 * PLACE_BYTES)
    store = machine.start()
    assert park(store, machine.fs, "a", keys("a", 6))[0].bytes
    [done] = park(store, machine.fs, "b", keys("b", 2))
    assert "today" in done.why_not, "what was seen once is not worth the rest"
    assert park(store, machine.fs, "a", keys("a", 7), run="turn 2")[0].bytes
    assert "today" in park(store, machine.fs, "a", keys("a", 14), run="turn 3")[0].why_not
    assert "today" in park(machine.start(), machine.fs, "c", keys("c", 2))[0].why_not, "a restart is no new day"
    machine.now += disk_policy.DAY_S
    assert park(store, machine.fs, "c", keys("c", 2))[0].bytes


def test_a_full_disk_costs_nothing_but_hits() -> None:
    machine = Machine()
    store = machine.start()
    park(store, machine.fs, "a", keys("a", 3))
    machine.fs.fault = Fault(machine.fs.operations + 1, code=errno.ENOSPC, sticky=True)
    store.offer(1, "b", chunks(keys("b", 3)))
    store.offer(2, "c", chunks(keys("c", 3)))
    store.ended("b")
    done = pump(store, machine.fs)
    assert sorted(each.offer for each in done) == [1, 2], "nothing holds memory for a broken disk"
    assert all(each.why_not for each in done)
    store.offer(3, "b", chunks(keys("b", 3)))
    assert [each.offer for each in store.take_done()] == [3]
    assert_right(store, machine.fs, keys("a", 3))
    machine.fs.fault = None
    machine.now += disk_policy.FIRST_PAUSE_S
    assert park(store, machine.fs, "b", keys("b", 3))[0].bytes


def test_one_failed_read_costs_no_conversation_and_a_second_gives_it_up() -> None:
    machine = Machine()
    store = machine.start()
    park(store, machine.fs, "a", keys("a", 3))
    for there in (True, False):
        machine.fs.fault = Fault(machine.fs.operations + 2)
        assert isinstance(fetched(store, machine.fs, keys("a", 3)), OSError)
        machine.fs.fault = None
        assert store.has(key("a", 0)) == there


def test_a_read_keeps_its_files_while_they_are_evicted() -> None:
    machine = Machine()
    store = machine.start()
    park(store, machine.fs, "a", keys("a", 3))
    into = [Chunk(name, np.zeros(CHUNK_BYTES, dtype=np.uint8)) for name in keys("a", 3)]
    job = store.begin_read(into)
    assert job is not None
    [(known, _)] = store.table.on_disk()
    store.table.leave_disk(known)
    pump(store, machine.fs)
    read(machine.fs, job)
    store.finished_read(job, None)
    assert all(np.array_equal(chunk.buffer, content(chunk.key)) for chunk in into)
    pump(store, machine.fs)
    assert store.disk.bytes_in_use == 0
    assert machine.fs.sizes() == {}


def lives(machine: Machine) -> None:
    """A few turns of three conversations under a budget that holds two."""
    store = machine.start()
    for turn in range(1, 4):
        for talk in "abc":
            names = keys(talk, 2 * turn)
            fetched(store, machine.fs, [name for name in names if store.has(name)])
            park(store, machine.fs, talk, names, run=f"{talk} {turn}")


@pytest.mark.parametrize("kind", ["error", "short", "crash-before", "crash-after"])
def test_the_nth_operation_fails_for_every_n(kind: str) -> None:
    def fresh() -> Machine:
        return Machine(disk_bytes=16 * PLACE_BYTES, batch_bytes=2 * CHUNK_BYTES)

    whole = fresh()
    lives(whole)
    assert whole.fs.operations > 100
    for nth in range(1, whole.fs.operations + 1):
        machine = fresh()
        machine.fs.rng = np.random.default_rng(nth)
        machine.fs.fault = Fault(nth, kind)  # type: ignore[arg-type]
        try:
            lives(machine)
        except OSError:
            assert machine.fs.operations < 8, "only an opening may fail"
        except Crashed:
            pass
        machine.fs.crash()
        store = machine.start()
        for talk in "abc":
            for name in keys(talk, 6):
                if store.has(name):
                    assert_right(store, machine.fs, [name])
        assert store.counts["read_failures"] == 0, "what a manifest names is whole"
        assert machine.fs.peak_bytes <= machine.disk_bytes
        park(store, machine.fs, "d", keys("d", 2))
        assert_right(store, machine.fs, keys("d", 2))
