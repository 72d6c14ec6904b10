"""The end of a prompt that is read while what comes before it is still being restored."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from parkd.errors import EngineFailure, RestoreFailed
from parkd.identity.chain import prefix_hashes
from parkd.lane import prompt_tail
from parkd.lane.cost import CostMeter
from parkd.lane.live_conversation import LiveConversation
from parkd.lane.metrics import Metrics
from parkd.lane.prompt_tail import PromptTail
from parkd.lane.start import Seated, Start, cold_start, decide_start
from parkd.lane.thread.engine_thread import EngineThread
from parkd.state import BLOCK_TOKENS, Transfer
from parkd.store.records import StoreConfig
from parkd.store.store import ConversationStore
from parkd.types import ConversationKey, PromptIdentity, TokenIds
from tests.fakes.engine import FakeEngine

pytestmark = pytest.mark.anyio
NEVER = threading.Event()
IDS = np.random.default_rng(1).integers(0, 256, 900)


class ReadingFake(FakeEngine):
    """Reads during a restore, and notes how many tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[int] = []
        self.info = replace(self.info, reads_while_restoring=True)

    def restore_and_read(self, transfer: Transfer, token_ids: TokenIds, checkpoint_at: Sequence[int] = ()) -> None:
        self.read.append(len(token_ids))
        super().restore_and_read(transfer, token_ids, checkpoint_at)


class Lane:
    def __init__(self) -> None:
        self.engine = ReadingFake()
        layout = self.engine.info.layout
        self.store = ConversationStore(StoreConfig(64 << 20, BLOCK_TOKENS), layout, clock=time.monotonic)
        self.thread = EngineThread()
        self.thread.start()
        metrics = Metrics(waiting=lambda: 0, store_stats=None)
        self.live = LiveConversation(self.engine, self.thread, self.store, metrics, CostMeter(), time.monotonic)

    def prompt(self, ids: TokenIds) -> PromptIdentity:
        key = ConversationKey("", self.engine.info.fingerprint)
        units = ids.astype(np.uint64)
        return PromptIdentity(key, ids, units, prefix_hashes(units, key.digest, BLOCK_TOKENS))

    async def park(self, ids: TokenIds) -> None:
        """Reads it cold, parks it, and reads another."""
        prompt = self.prompt(ids)
        await self.live.start_from(cold_start(), prompt.key)
        await self.live.call(self.engine.extend, ids, cancel=NEVER)
        await self.live.advance(prompt.key, prompt.units)
        await self.live.park()
        await self.live.reset()

    def start(self, prompt: PromptIdentity) -> Start:
        parked = [entry for entry, _ in self.store.candidates(prompt.key.digest, prompt.prefix_hashes)]
        layout, cost = self.engine.info.layout, CostMeter().measured
        return decide_start(prompt, [Seated(self.live.rows)], parked, layout=layout, cost=cost)


@pytest.fixture
def lane(monkeypatch: pytest.MonkeyPatch) -> Lane:
    monkeypatch.setattr(prompt_tail, "LEAST_BYTES", 0)
    return Lane()


async def begin(lane: Lane, more: int, adapters: Mapping[int, float] | None = None) -> PromptIdentity:
    """A prompt that goes on from what is parked by `more` tokens and the one that the answer begins with."""
    await lane.park(IDS[:600])
    prompt = lane.prompt(np.concatenate([IDS[:600], IDS[700 : 701 + more]]))
    start = lane.start(prompt)
    assert start.position == 600
    await lane.live.start_from(start, prompt.key, PromptTail(prompt, 600, None, adapters))
    return prompt


async def test_a_short_tail_is_read_at_once_and_the_rows_descend_from_what_is_parked(lane: Lane) -> None:
    prompt = await begin(lane, 30)
    assert lane.engine.read == [30]
    live = lane.live.rows
    assert (lane.engine.position, live.position) == (630, 630)
    assert np.array_equal(live.units, prompt.units[:630])
    assert (live.covered, live.parked_id) == (512, None), "full blocks; what was read is nowhere else"


@pytest.mark.parametrize(("more", "why"), [(0, "nothing to read"), (prompt_tail.MOST_TOKENS + 1, "long")])
async def test_other_tails_are_left_to_the_turn(
    lane: Lane, more: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_tail, "MOST_TOKENS", 100 if why == "long" else prompt_tail.MOST_TOKENS)
    await begin(lane, min(more, 120))
    assert lane.engine.read == []
    assert lane.live.rows.position == 600


async def test_an_engine_that_gains_nothing_is_not_asked(lane: Lane) -> None:
    lane.engine.info = replace(lane.engine.info, reads_while_restoring=False)
    await begin(lane, 30)
    assert (lane.engine.read, lane.live.rows.position) == ([], 600)


async def test_nothing_is_read_under_other_steering_than_the_prompts(
    lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn sets its steering behind its start; this reading comes before that."""
    steered: list[tuple[object, object]] = []
    monkeypatch.setattr(lane.engine, "steer", lambda *asked: steered.append(asked) or b"another")
    await begin(lane, 30, {0: 0.5})
    assert (steered, lane.engine.read, lane.live.rows.position) == ([(None, {0: 0.5})], [], 600)


async def test_of_a_damaged_restore_nothing_is_left(lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(transfer: Transfer, token_ids: TokenIds, checkpoint_at: Sequence[int] = ()) -> None:
        lane.engine.reset()
        raise RestoreFailed("a block differs from its checksum")

    monkeypatch.setattr(lane.engine, "restore_and_read", damaged)
    with pytest.raises(RestoreFailed):
        await begin(lane, 30)
    assert (lane.engine.position, lane.live.rows.position) == (0, 0)
    assert lane.store.stats().conversations == 0


async def test_of_a_tail_that_cannot_be_read_nothing_is_left(lane: Lane) -> None:
    """What was restored before it was not committed yet."""

    def fail(step: str, position: int) -> None:
        if (step, position) == ("chunk", 600):
            raise EngineFailure("the stage broke")

    lane.engine.hook = fail
    with pytest.raises(EngineFailure, match="broke"):
        await begin(lane, 30)
    assert lane.engine.position == 0
