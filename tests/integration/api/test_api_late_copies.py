"""A server that ends while a conversation is still being copied: the memory is there for as long as the copy writes."""

from __future__ import annotations

import ctypes
import gc
import logging
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import anyio
import pytest

from parkd.proxy import proxy
from parkd.proxy.config import ProxyConfig
from parkd.state import Checksums, Transfer
from parkd.store.records import StoreStats
from tests.fakes.engine import FakeEngine
from tests.integration.api.api_harness import Gate, running, until

pytestmark = pytest.mark.anyio
TALK = [{"role": "user", "content": "Hello there. " * 40}]
CUT_WAIT_S = 0.1


@pytest.fixture(autouse=True)
def stops_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "CUT_WAIT_S", CUT_WAIT_S)


@dataclass
class Written:
    """Memory of the store, known by its address alone, as a device knows it."""

    address: int
    size: int
    owner: weakref.ref[Any]

    @classmethod
    def of(cls, transfer: Transfer) -> Written:
        run = transfer.stages[0].rows[0]
        assert run.buffer.base is not None
        return cls(run.buffer.ctypes.data, run.buffer.nbytes, weakref.ref(run.buffer.base))

    def write(self) -> None:
        assert self.owner() is not None, "the memory is freed"
        ctypes.memset(self.address, 7, self.size)


class LateCopy:
    """A copy that has begun, by a device that holds no reference to anything."""

    def __init__(self, ends: threading.Event, checksums: Checksums) -> None:
        self._ends = ends
        self._checksums = checksums

    def wait(self) -> Checksums:
        assert self._ends.wait(20)
        return self._checksums


class LateEngine(FakeEngine):
    """Begins its copies only when it is let, and ends them later still."""

    def __init__(self) -> None:
        super().__init__()
        self.begins, self.ends = threading.Event(), threading.Event()
        self.written: list[Written] = []
        self.thread = threading.current_thread()
        """That calls it: it ends with the server."""

    def start_capture(self, transfer: Transfer) -> LateCopy:
        self.thread = threading.current_thread()
        checksums = self.capture(transfer)
        self.written.append(Written.of(transfer))
        del transfer
        assert self.begins.wait(20)
        return LateCopy(self.ends, checksums)


async def stopped_while_copying(engine: FakeEngine, gate: Gate | None = None) -> StoreStats:
    """Serves one turn, and stops while what it added is being copied. What the store says then."""
    async with running(engine, config=ProxyConfig(shutdown_deadline_s=CUT_WAIT_S)) as server:
        await server.chat(TALK)
        if isinstance(engine, LateEngine):
            await until(lambda: bool(engine.written))
        elif gate is not None:
            await gate.wait_reached()
    assert server.store is not None
    return server.store.stats()


async def test_what_the_engine_still_writes_is_not_given_back(caplog: pytest.LogCaptureFixture) -> None:
    """The memory of one capture could be unregistered from its device, or given to another, under the copy."""
    gate = Gate("capture")
    stats = await stopped_while_copying(FakeEngine(hook=gate), gate)
    assert (stats.captures_in_flight, stats.conversations) == (1, 0)
    assert "still being copied" in caplog.text
    gate.opened.set()


async def test_memory_outlives_a_copy_that_nobody_waits_for() -> None:
    engine = LateEngine()
    stats = await stopped_while_copying(engine)
    assert stats.captures_in_flight == 1
    engine.begins.set()
    await until(lambda: not engine.thread.is_alive())
    gc.collect()
    engine.written[0].write()
    engine.ends.set()


async def test_a_stop_waits_for_the_copy_behind_a_reply() -> None:
    engine = LateEngine()
    engine.begins.set()
    async with running(engine, config=ProxyConfig(shutdown_deadline_s=CUT_WAIT_S)) as server:
        await server.chat(TALK)
        await server.settled()
        server.server.should_exit = True
        await anyio.sleep(5 * CUT_WAIT_S)
        assert engine.thread.is_alive(), "the server has ended"
        engine.written[0].write()
        engine.ends.set()
    assert server.store is not None
    assert (server.store.stats().captures_in_flight, server.store.stats().conversations) == (0, 1)


async def test_a_server_that_ends_in_order_keeps_no_memory(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    engine = FakeEngine()
    owners: list[weakref.ref[Any]] = []
    capture = engine.capture

    def captured(transfer: Transfer) -> Checksums:
        owners.append(Written.of(transfer).owner)
        return capture(transfer)

    engine.capture = captured  # type: ignore[method-assign]
    stats = await stopped_while_copying(engine)
    assert stats.captures_in_flight == 0
    assert "still being copied" not in caplog.text
    gc.collect()
    assert [owner() for owner in owners] == [None]
