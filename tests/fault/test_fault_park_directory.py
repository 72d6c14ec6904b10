"""The files of a park directory are those that were always written, byte for byte, and are read after a restart."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import pytest

from tests.fault.fault_fs import FaultFs
from tests.fault.tier_kit import Machine, Times, evict, on_disk, pump, rows_of, started
from tests.fault.workload import LAYOUTS
from tests.unit.store.store_kit import assert_same_rows, make_units

WRITTEN = {
    "rows": "96515dff3583959f2aa990b58f498d19",
    "fixed state": "9ca5eb732bec5bcfecf0d802fa7c4435",
    "whole": "e328bf4cddb4c880369407e2663a4b7e",
    "whole with checkpoints": "bd21d5b205cf4babcd16ab153b3e943b",
    "file": "af5b8dbb6c26b83bafe2948941ef819e",
}
"""Digests of the names and contents of all files, as they were when conversations on disk had tables of their own
(2026-12-01), but for the ids of conversations that continue one, which begin with its name. A change here means that
directories of earlier versions may no longer be read: see docs/FORMAT.md."""


class StillTimes(Times):
    """What is written does not depend on how often the clock is read."""

    def clock(self) -> float:
        return self.now


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_park_directory_is_written_as_ever_and_read_again(layout: str) -> None:
    """A conversation, what it grew to, and one that shares its beginning."""
    machine = Machine(FaultFs(), LAYOUTS[layout], times=StillTimes())
    store, engine = machine.start(), machine.engine()
    rows = {}
    for seed, tokens in ((1, 9), (2, 6), (3, 7)):
        if seed == 3:
            engine.read(np.concatenate([engine.units[:8], make_units(seed, tokens)]), checkpoint=True)
        else:
            engine.extend(make_units(seed, tokens), checkpoint=True)
        rows[engine.park(store).id] = engine.rows()
        machine.times.now += 10
        assert pump(store, machine.fs) == []
    digest = blake2b(digest_size=16)
    for name in sorted(machine.fs.names()):
        digest.update(name.encode() + bytes(machine.fs.content(name)))
    assert digest.hexdigest() == WRITTEN[layout]
    again = machine.start()
    assert sorted(on_disk(again)) == sorted(rows)[1:], "the first was superseded"
    for name in on_disk(again):
        assert_same_rows(rows_of(again, machine.fs, again.get(name)), rows[name])


@pytest.mark.parametrize("is_same", [True, False])
def test_blocks_that_a_crash_brought_back_are_not_taken_for_others_of_their_ids(is_same: bool) -> None:
    """The files of a conversation come back that were being removed, and its blocks were written again since: the same
    bytes, or others after the live rows had changed."""
    machine, store = started()
    engine = machine.engine().read(make_units(1, 8))
    first, of_first = engine.park(store), engine.rows()
    assert pump(store, machine.fs) == []
    removed = {name: bytes(machine.fs.content(name)) for name in machine.fs.names()}
    if is_same:
        store.table.leave_disk(store.table.known(first.id))
    else:
        evict(store, first)
        lineage = engine.lineage
        engine.arenas[0][2] ^= 1
        engine.lineage = lineage
    engine.extend(make_units(2, 4))
    second, of_second = engine.park(store), engine.rows()
    assert second.blocks[:2] == first.blocks
    assert pump(store, machine.fs) == []
    assert not set(removed) & set(machine.fs.names())
    for name, data in removed.items():
        machine.fs.create(name).write(0, [np.frombuffer(data, np.uint8)])
    store = machine.start()
    assert sorted(on_disk(store)) == sorted([first.id, second.id])
    assert_same_rows(rows_of(store, machine.fs, store.get(first.id)), of_first)
    store.drop(first.id, "a test")
    assert pump(store, machine.fs) == []
    assert_same_rows(rows_of(store, machine.fs, store.get(second.id)), of_second)
    evict(store, second)
    assert_same_rows(rows_of(store, machine.fs, store.get(second.id)), of_second)
