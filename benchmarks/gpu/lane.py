"""Turns as the daemon runs them (engine, store, parking), from token ids: no HTTP, rendering or tokenising."""

from __future__ import annotations

import dataclasses
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from parkd.config import ModelConfig
from parkd.engine_adapter.torch_engine.engine import TorchEngine
from parkd.errors import RestoreFailed
from parkd.identity.chain import prefix_hashes
from parkd.identity.units import units_of
from parkd.lane.checkpoints import checkpoints_to_take
from parkd.lane.cost import CostMeter
from parkd.lane.live_conversation import LiveConversation
from parkd.lane.metrics import Metrics
from parkd.lane.prompt_tail import PromptTail
from parkd.lane.start import cold_start, decide_start
from parkd.lane.thread.engine_thread import EngineThread
from parkd.state import BLOCK_TOKENS, EngineConfig
from parkd.store.records import StoreConfig
from parkd.store.store import ConversationStore
from parkd.types import ConversationKey, ImageSpan, PromptIdentity, SamplingParams

Ids = npt.NDArray[np.int64]
GREEDY = SamplingParams(temperature=0)
NEVER = threading.Event()


@dataclass(frozen=True)
class TurnFigures:
    """The tokens and times of a turn. Seconds are counted from when the lane takes it."""

    tokens: list[int]
    outcome: str
    reused: int
    first_token_s: float
    decode_s: float
    """Seconds per token after the first."""
    wall_s: float
    """Seconds to the last token."""


def load(model: str, devices: tuple[str, ...], cache_dir: Path, **layout: Any) -> TorchEngine:
    return TorchEngine.load(
        ModelConfig(model, cache_dir, layout=EngineConfig(devices=devices, **layout)), fresh_seed=lambda: 1
    )


class GpuLane:
    """An engine and its store. For one task at a time."""

    def __init__(self, engine: TorchEngine, budget_bytes: int) -> None:
        self.engine = engine
        self.hooks = engine.host_memory_hooks()
        self.store = ConversationStore(
            StoreConfig(budget_bytes, BLOCK_TOKENS), engine.info.layout, clock=time.monotonic, slab_hooks=self.hooks
        )
        if self.hooks is not None:
            self.store.grow_ahead()
        self.costs = CostMeter()
        self.sampling = GREEDY
        self.thread = EngineThread()
        self.thread.start()
        metrics = Metrics(waiting=lambda: 0, store_stats=self.store.stats)
        self.live = LiveConversation(engine, self.thread, self.store, metrics, self.costs, time.monotonic)

    def prompt(self, namespace: str, ids: Ids, images: tuple[ImageSpan, ...] = ()) -> PromptIdentity:
        key = ConversationKey(namespace, self.engine.info.fingerprint)
        units = units_of(ids, images)
        return PromptIdentity(key, ids, units, prefix_hashes(units, key.digest, BLOCK_TOKENS), images=images)

    async def turn(self, prompt: PromptIdentity, count: int) -> TurnFigures:
        """Reads `prompt`, decodes `count` tokens greedily, and parks behind the reply."""
        began_s = time.perf_counter()
        parked = [entry for entry, _ in self.store.candidates(prompt.key.digest, prompt.prefix_hashes)]
        start = decide_start(
            prompt,
            [self.live.seated],
            parked,
            layout=self.engine.info.layout,
            cost=dataclasses.replace(self.costs.measured, read_s=1.0),  # reading costs so much that any state is reused
        )
        try:
            await self.live.start_from(start, prompt.key, PromptTail(prompt, start.common, None))
        except RestoreFailed:
            start = cold_start()
            await self.live.start_from(start, prompt.key)
        reused, position = start.position, self.live.rows.position
        places = checkpoints_to_take(prompt, position, start.common, self.engine.info.ctx_checkpoints)
        await self.live.call(self.engine.begin, prompt.token_ids, self.sampling, images=prompt.images)
        await self.live.call(  # Nothing to read if the end was read during the restore.
            self.engine.extend, prompt.token_ids[position:-1], cancel=NEVER, checkpoint_at=places
        )
        await self.live.advance(prompt.key, prompt.units)
        tokens, times = await self.live.call(self._decode, count)
        units = np.concatenate([prompt.units, np.array(tokens, dtype=np.uint64)])
        await self.live.advance(prompt.key, units)
        await self.live.check()
        figures = TurnFigures(
            tokens,
            start.source.value,
            reused,
            times[0] - began_s,
            (times[-1] - times[0]) / max(1, count - 1),
            times[-1] - began_s,
        )
        await self.live.park()
        return figures

    def cold(self, token_ids: Ids, count: int) -> list[int]:
        """Reads a prompt into the empty engine and decodes `count` tokens greedily, without the lane or the store."""
        self.engine.begin(token_ids, self.sampling)
        self.engine.extend(token_ids[:-1], cancel=NEVER)
        return self._decode(count)[0]

    def _decode(self, count: int) -> tuple[list[int], list[float]]:
        tokens: list[int] = []
        times = []
        for step in self.engine.generate():
            tokens += step
            times.append(time.perf_counter())
            if len(tokens) >= count:
                break
        return tokens, times

    def close(self) -> None:
        self.thread.stop(30.0)
        self.store.close()
        self.engine.close()


def random_ids(count: int, vocab_size: int, seed: int) -> Ids:
    return np.random.default_rng(seed).integers(0, vocab_size, count)


def following(prompt: Ids, figures: TurnFigures, more: Ids) -> Ids:
    """The next prompt of a conversation: everything so far and the user's new tokens."""
    return np.concatenate([prompt, np.array(figures.tokens, dtype=np.int64), more])
