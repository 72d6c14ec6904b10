"""Every operation of a scripted life fails in every way, and the machine stops before and after each.

Whatever happens: a get returns the bytes that were put, or a miss; what was acknowledged survives; nothing is left
behind; the budgets hold.
"""

from __future__ import annotations

import errno

import pytest

from tests.fault.fault_fs import Crashed, Fault, FaultFs
from tests.fault.tier_kit import Machine
from tests.fault.workload import LAYOUTS, Life, live, survive

DISK_BYTES = 140_000
"""Holds about three of the conversations, so that some go to make room."""


def new_life(layout: str, seed: int = 0) -> Life:
    return Life(Machine(FaultFs(seed), LAYOUTS[layout], ram_bytes=300_000, disk_bytes=DISK_BYTES))


def operations(layout: str) -> int:
    life = new_life(layout)
    live(life)
    return life.machine.fs.operations


@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_faults_everything_is_there(layout: str) -> None:
    life = new_life(layout)
    live(life)
    assert life.machine.fs.peak_bytes <= DISK_BYTES
    stats = life.store.disk_stats()
    assert stats.conversations >= 2
    assert stats.read_failures_total == 0
    kinds = {line.split()[0] + (" file" if "sync file" in line else "") for line in life.machine.fs.log}
    assert kinds >= {"create", "write", "sync file", "sync", "rename", "remove", "open", "read", "load", "sizes"}
    survive(life, 0)


@pytest.mark.parametrize("kept", [0.0, 1.0, None], ids=["nothing unsynced", "all", "some"])
@pytest.mark.parametrize("kind", ["crash-before", "crash-after"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stop_at_every_operation(layout: str, kind: str, kept: float | None) -> None:
    for nth in range(1, operations(layout) + 1):
        life = new_life(layout, seed=nth)
        life.machine.fs.fault = Fault(nth, kind)  # type: ignore[arg-type]
        try:
            live(life)
            assert kind == "crash-after"
        except Crashed:
            pass
        survive(life, kept)


@pytest.mark.parametrize(
    ("kind", "code", "sticky"),
    [
        ("error", errno.EIO, False),
        ("error", errno.EIO, True),
        ("error", errno.ENOSPC, False),
        ("error", errno.ENOSPC, True),
        ("short", errno.EIO, False),
    ],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_error_at_every_operation(layout: str, kind: str, code: int, sticky: bool) -> None:
    for nth in range(1, operations(layout) + 1):
        life = new_life(layout, seed=nth)
        fs = life.machine.fs
        fs.fault = Fault(nth, kind, code, sticky)  # type: ignore[arg-type]
        try:
            live(life)
        except OSError:
            # the directory can't be read: the process does not start, and nothing is served
            assert life.store is None
        assert fs.peak_bytes <= DISK_BYTES
        survive(life, None)
