"""A conversation whose answer ended in a tool call is in memory again before the tool's result comes."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from parkd.answers.base import OutputFormat, ToolFormat
from parkd.lane.cost import CostMeter
from parkd.lane.disk_worker import DiskWorker
from parkd.store.records import Tier, name_of
from tests.fakes.engine import FakeEngine
from tests.fault.fault_fs import FaultFs
from tests.fault.tier_kit import away, started
from tests.integration.api.api_harness import Running, body_of, until
from tests.integration.api.disk_harness import running_on, written

pytestmark = pytest.mark.anyio

CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
ASK = [{"role": "user", "content": "Look at the files, please. " * 40}]


async def counts(server: Running) -> list[float]:
    page = (await server.client.get("/metrics")).text
    names = ("parkd_read_ahead_total", "parkd_read_ahead_hits_total", "parkd_read_ahead_waste_total")
    return [float(page.split(f"\n{name} ")[1].split()[0]) for name in names]


@pytest.mark.parametrize("calls", [True, False])
async def test_what_a_tool_is_looked_for_is_read_from_disk_while_nobody_runs(calls: bool, tmp_path: Path) -> None:
    engine = FakeEngine(script=lambda prompt: CALL if calls and "files" in prompt and "nothing" not in prompt else None)
    async with running_on(tmp_path / "park", engine, output=OutputFormat(ToolFormat.HERMES)) as server:
        body: dict[str, Any] = {**body_of(ASK, 60), "tools": [TOOL]}
        message = (await server.client.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
        store = await written(server)
        there = store.get(server.server.proxy.lives[0].rows.parked_id or "")
        assert there is not None
        assert store.move_to_disk(name_of(there.id)) is None
        assert (await counts(server))[0] == 0

        def tier() -> Tier | None:
            now = store.get(there.id)
            return None if now is None else now.tier

        read = engine.read_tokens
        other = len(server.prompt_tokens([{"role": "user", "content": "Another."}]))
        await server.chat([{"role": "user", "content": "Another."}])
        await server.settled()
        if calls:
            await until(lambda: tier() is Tier.PROMOTED)
        assert tier() is (Tier.PROMOTED if calls else Tier.DISK)
        assert engine.read_tokens - read < other, "and nothing was computed for it"
        assert await counts(server) == [float(calls), 0, 0]
        result = {"role": "tool", "tool_call_id": "x", "content": "nothing there"}
        await server.client.post("/v1/chat/completions", json={**body, "messages": [*ASK, message, result]})
        assert await counts(server) == [float(calls), float(calls), 0]


class FirstIsHeld:
    """A file system whose first open waits until it is let go."""

    def __init__(self, whole: FaultFs) -> None:
        self._whole = whole
        self.reached, self.opened = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    def open(self, name: str) -> Any:
        if not self.reached.is_set():
            self.reached.set()
            assert self.opened.wait(20)
        return self._whole.open(name)


@pytest.mark.parametrize("is_wanted", [True, False])
async def test_a_read_ahead_is_given_up_for_another_that_a_turn_needs(is_wanted: bool) -> None:
    machine, store = started()
    ahead, other = (away(machine, store, seed, 40)[0] for seed in (1, 2))
    held: Any = FirstIsHeld(machine.fs)
    worker = DiskWorker(store, held, CostMeter(), time.monotonic)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(worker.serve)
        async with anyio.create_task_group() as reads:
            reads.start_soon(worker.promote_ahead, ahead.id, 40)
            await until(held.reached.is_set)
            reads.start_soon(worker.promote, (other if is_wanted else ahead).id, 40)
            await anyio.lowlevel.checkpoint()
            held.opened.set()
        tiers = [None if now is None else now.tier for now in (store.get(ahead.id), store.get(other.id))]
        assert tiers == ([Tier.DISK, Tier.PROMOTED] if is_wanted else [Tier.PROMOTED, Tier.DISK])
        assert await worker.promote(ahead.id, 40) is not None or not is_wanted
        tasks.cancel_scope.cancel()
    worker.stop()
    assert store.disk_stats().read_failures_total == 0
