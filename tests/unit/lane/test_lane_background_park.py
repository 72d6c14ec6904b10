"""Parking behind the reply where the engine can go on meanwhile: the next prompt waits for nothing."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from parkd.errors import EngineFailure
from parkd.identity.chain import prefix_hashes
from parkd.lane.cost import CostMeter
from parkd.lane.live_conversation import LiveConversation
from parkd.lane.metrics import Metrics
from parkd.lane.start import Start, cold_start
from parkd.lane.thread.engine_thread import EngineThread
from parkd.state import BLOCK_TOKENS, Checksums, Transfer
from parkd.store.records import StoreConfig
from parkd.store.store import ConversationStore
from parkd.types import CacheOutcome, ConversationKey, PromptIdentity
from tests.fakes.engine import FakeEngine

pytestmark = pytest.mark.anyio
NEVER = threading.Event()


class SlowCapture:
    def __init__(self, checksums: Checksums) -> None:
        self.gate = threading.Event()
        self.fails = False
        self._checksums = checksums

    def wait(self) -> Checksums:
        assert self.gate.wait(10)
        if self.fails:
            raise EngineFailure("the copy broke")
        return self._checksums


class OverlappingFake(FakeEngine):
    """Copies at once, and says that it is done when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.captures: list[SlowCapture] = []

    def start_capture(self, transfer: Transfer) -> SlowCapture:
        self.captures.append(SlowCapture(self.capture(transfer)))
        return self.captures[-1]


class Lane:
    def __init__(self) -> None:
        self.engine = OverlappingFake()
        layout = self.engine.info.layout
        self.store = ConversationStore(StoreConfig(64 << 20, BLOCK_TOKENS), layout, clock=time.monotonic)
        self.thread = EngineThread()
        metrics = Metrics(waiting=lambda: 0, store_stats=None)
        self.live = LiveConversation(self.engine, self.thread, self.store, metrics, CostMeter(), time.monotonic)

    def prompt(self, length: int, seed: int) -> PromptIdentity:
        key = ConversationKey("", self.engine.info.fingerprint)
        ids = np.random.default_rng(seed).integers(0, 256, length)
        units = ids.astype(np.uint64)
        return PromptIdentity(key, ids, units, prefix_hashes(units, key.digest, BLOCK_TOKENS))

    async def read(self, prompt: PromptIdentity) -> None:
        """Cold, as a turn would."""
        await self.live.start_from(cold_start(), prompt.key)
        await self.live.call(self.engine.extend, prompt.token_ids, cancel=NEVER)
        await self.live.advance(prompt.key, prompt.units)

    def joined(self, head: PromptIdentity, end: PromptIdentity) -> PromptIdentity:
        units = np.concatenate([head.units, end.units])
        return PromptIdentity(
            head.key, units.astype(np.int64), units, prefix_hashes(units, head.key.digest, BLOCK_TOKENS)
        )

    async def go_on(self, prompt: PromptIdentity) -> None:
        """Behind what is live, with which the prompt begins."""
        await self.live.call(self.engine.extend, prompt.token_ids[self.live.rows.position :], cancel=NEVER)
        await self.live.advance(prompt.key, prompt.units)


@asynccontextmanager
async def lane() -> AsyncIterator[Lane]:
    made = Lane()
    made.thread.start()
    try:
        yield made
        await made.live.settle()
    finally:
        made.thread.stop(5)


async def test_the_next_prompt_does_not_wait_and_nothing_is_published_early() -> None:
    async with lane() as it:
        a, b = it.prompt(700, 1), it.prompt(300, 2)
        await it.read(a)
        await it.live.park()
        await asyncio.wait_for(it.read(b), 5)
        assert it.store.stats().conversations == 0
        assert len(it.engine.captures) == 1, "what is being copied is not copied again"
        it.engine.captures[0].gate.set()
        await it.live.settle()
        (parked, _), *others = it.store.candidates(a.key.digest, a.prefix_hashes)
        assert not others
        assert np.array_equal(parked.units, a.units)
        assert (it.live.rows.lineage, it.live.rows.parked_id) == ((), None), "B is live, and not A"


async def test_what_is_still_live_descends_from_what_was_captured() -> None:
    async with lane() as it:
        a = it.prompt(700, 1)
        await it.read(a)
        await it.live.park()
        it.engine.captures[0].gate.set()
        await it.live.settle()
        live = it.live.rows
        assert live.parked_id is not None
        parked = it.store.get(live.parked_id)
        assert parked is not None
        assert (live.covered, live.lineage) == (700, parked.blocks)


async def test_rows_cut_meanwhile_do_not_descend_from_it() -> None:
    async with lane() as it:
        a = it.prompt(900, 1)
        await it.read(a)
        await it.live.park()
        await it.live.truncate(600)
        more = it.prompt(200, 3)
        await it.live.call(it.engine.extend, more.token_ids, cancel=NEVER)
        await it.live.advance(a.key, np.concatenate([a.units[:600], more.units]))
        it.engine.captures[0].gate.set()
        await it.live.settle()
        live = it.live.rows
        assert (live.position, live.covered, len(live.lineage), live.parked_id) == (800, 512, 2, None)


async def test_a_copy_that_breaks_is_given_up_whole() -> None:
    async with lane() as it:
        await it.read(it.prompt(700, 1))
        await it.live.park()
        it.engine.captures[0].fails = True
        it.engine.captures[0].gate.set()
        await it.live.settle()
        stats = it.store.stats()
        assert (stats.conversations, stats.blocks, stats.captures_in_flight) == (0, 0, 0)
        assert it.live.rows.parked_id is None
        await it.live.park()
        assert len(it.engine.captures) == 2, "it is tried again"
        it.engine.captures[1].gate.set()


async def test_a_conversation_restored_meanwhile_still_descends_from_its_own_blocks() -> None:
    """Both have a head in common, as a parent and its workers have; that of the one that left is copied last."""
    async with lane() as it:
        head, ends = it.prompt(2 * BLOCK_TOKENS, 1), [it.prompt(300, seed) for seed in (2, 3)]
        both = [it.joined(head, end) for end in ends]
        for prompt in (head, both[0]):
            await it.go_on(prompt)
            await it.live.park()
            it.engine.captures[-1].gate.set()
            await it.live.settle()
        staying = it.live.rows
        assert staying.parked_id is not None
        await it.live.truncate(len(head))
        await it.go_on(both[1])
        await it.live.park()
        parked = it.store.get(staying.parked_id)
        start = Start(CacheOutcome.RESTORED_RAM, staying.position, len(head), parked)
        await it.live.start_from(start, head.key)
        it.engine.captures[-1].gate.set()
        await it.live.settle()
        live = it.live.rows
        assert np.array_equal(live.units, staying.units)
        assert (live.covered, live.lineage, live.parked_id) == (staying.covered, staying.lineage, staying.parked_id)
        captures = len(it.engine.captures)
        await it.live.park()
        assert len(it.engine.captures) == captures, "it is parked already"
