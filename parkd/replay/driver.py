"""Replays a trace on the real store, with the same admission, eviction and accounting, but without a model or data.

Slabs are reserved as on a server but never written, so a replay takes address space and no memory. Differences from a
server: turns are cut to full blocks, time is the trace's, and reading and copying take the time given by `Costs`. With
a disk budget, the store is the one for RAM and disk; its file operations complete at once and touch no file.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count

import numpy as np

from parkd.replay.result import ReplayConfig, ReplayResult
from parkd.replay.trace import TraceHeader, TurnRecord
from parkd.state import Checksums, StageLayout, StateLayout, last_exact
from parkd.store.disk import DiskTier
from parkd.store.disk_policy import WriteAllowance
from parkd.store.disk_records import DiskConfig
from parkd.store.opening import index_bytes_for
from parkd.store.records import BlockId, CaptureRequest, Parked, Refused, StoreConfig, Tier
from parkd.store.store import CANDIDATE_LIMIT, ConversationStore
from parkd.store.tiers import TieredStore
from parkd.store.write_queue import DiskSources
from parkd.types import Units


def layout_of(header: TraceHeader) -> StateLayout:
    stages = tuple(
        StageLayout(index, index + 1, rows, fixed, b"replayed" + bytes([index]) * 8)
        for index, (rows, fixed) in enumerate(zip(header.row_bytes, header.fixed_bytes, strict=True))
    )
    return StateLayout(stages, "none")


@dataclass
class _Live:
    """The conversation that the arenas would hold."""

    key: str = ""
    chain: tuple[bytes, ...] = ()
    lineage: tuple[BlockId, ...] = ()
    checkpoints: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Start:
    position: int
    cost_s: float
    parked: Parked | None = None
    keep_rows: int = 0


class Replayer:
    """One lane with one store."""

    def __init__(self, header: TraceHeader, config: ReplayConfig) -> None:
        self._size = header.block_tokens
        self._layout = layout_of(header)
        self._costs = config.costs
        self._now_s = 0.0
        self._tiers: TieredStore | None = None
        store_config = StoreConfig(config.budget_bytes, self._size, config.slots)
        self.store: ConversationStore
        if config.disk_bytes:
            self.store = self._tiers = _tiered(store_config, config, self._layout, lambda: self._now_s)
        else:
            self.store = ConversationStore(store_config, self._layout, lambda: self._now_s, policy=config.policy)
        self.store.measured(config.costs)
        self.result = ReplayResult(config.policy.name, config.budget_bytes, config.disk_bytes)
        self._live = _Live()
        self._keys: dict[str, bytes] = {}

    def turn(self, turn: TurnRecord) -> None:
        self._now_s = max(self._now_s, turn.at_s)
        key = self._keys.setdefault(turn.key, len(self._keys).to_bytes(16, "big"))
        prompt = turn.chain[: turn.prompt_tokens // self._size]
        cold_s = self._costs.reading_s(0, turn.prompt_tokens)
        live = self._live_start(turn, prompt)
        starts = [live, *self._parked_starts(turn, key, prompt), _Start(0, cold_s)]
        result = self.result
        result.requests += 1
        result.prompt_tokens += turn.prompt_tokens
        result.cold_s += cold_s
        result.live_saved_s += max(0.0, cold_s - live.cost_s)
        for start in sorted(starts, key=lambda option: option.cost_s):
            lineage = self._begun(start)
            if lineage is not None:
                result.saved_s += cold_s - start.cost_s
                self._park(turn, key, lineage, start.position)
                break
        self._work()

    def _begun(self, start: _Start) -> tuple[BlockId, ...] | None:
        """The lineage of a turn with this start; None if memory has no room for state that must come from disk."""
        blocks = start.position // self._size
        if start.parked is None:
            self.result.live_hit_tokens += start.position
            return self._live.lineage[:blocks]
        parked = start.parked
        if parked.tier is Tier.DISK:
            assert self._tiers is not None
            promotion = self._tiers.promote(parked.id, start.position)
            if isinstance(promotion, Refused):
                return None
            read = self._tiers.promoted(promotion, None)
            if read is None or read.position < start.position:
                return None
            self.result.disk_hit_tokens += start.position
            parked = read
        self.result.parked_hit_tokens += start.position
        with self.store.lease(parked.id, start.position, start.keep_rows) as lease:
            return lease.lineage[:blocks]

    def _work(self) -> None:
        """Completes the disk's jobs at once: on a server, they run behind the reply."""
        while self._tiers is not None and (job := self._tiers.next_job()) is not None:
            self._tiers.finished(job, None)

    def finish(self) -> ReplayResult:
        stats = self.store.stats()
        self.result.evictions = stats.evictions_total
        self.result.peak_bytes = stats.peak_bytes_allocated
        self.result.partial = stats.partial_captures_total
        self.result.refusals = Counter(stats.refusals_total)
        if self._tiers is not None:
            disk = self._tiers.disk_stats()
            self.result.disk_written_bytes, self.result.disk_read_bytes = (
                disk.written_bytes_total,
                disk.read_bytes_total,
            )
        self.store.close()
        return self.result

    def _live_start(self, turn: TurnRecord, prompt: tuple[bytes, ...]) -> _Start:
        live = self._live
        if live.key != turn.key or not live.chain:
            return _Start(0, float("inf"))
        position = self._resumable(_shared(live.chain, prompt), turn.prompt_tokens, live.checkpoints)
        return _Start(position, self._costs.reading_s(position, turn.prompt_tokens))

    def _parked_starts(self, turn: TurnRecord, key: bytes, prompt: tuple[bytes, ...]) -> list[_Start]:
        """The cheapest of the deepest starts, for each tier."""
        best: dict[bool, _Start] = {}
        # Deepest first. Without fixed state, no later one has more; with it, a later one may have a better checkpoint.
        # A start in memory may be cheaper even if more is on disk.
        simple = not self._layout.resume.needs_checkpoints and self._tiers is None
        for parked, shared in self.store.candidates(key, prompt, 1 if simple else CANDIDATE_LIMIT):
            places = tuple(checkpoint.position for checkpoint in parked.checkpoints)
            position = self._resumable(shared, turn.prompt_tokens, places)
            is_on_disk = parked.tier is Tier.DISK
            known = best.get(is_on_disk)
            if position == 0 or (known is not None and position <= known.position):
                continue
            # As on a server, the last block is restored in any case.
            keep = _shared(self._live.lineage, parked.blocks[: (position - 1) // self._size]) * self._size
            moved = (position - keep) * self._layout.row_bytes + self._layout.fixed_bytes
            cost_s = self._costs.reading_s(position, turn.prompt_tokens) + self._costs.moving_s(moved, from_disk=False)
            if is_on_disk:
                whole = position * self._layout.row_bytes + self._layout.fixed_bytes * len(places)
                cost_s += self._costs.moving_s(whole, from_disk=True)
            if known is None or cost_s < known.cost_s:
                best[is_on_disk] = _Start(position, cost_s, parked, keep)
        return list(best.values())

    def _resumable(self, shared: int, prompt_tokens: int, checkpoints: tuple[int, ...]) -> int:
        """The tokens that can be reused: never the last one of a prompt, which always runs."""
        return last_exact(min(shared * self._size, prompt_tokens - 1), checkpoints, self._layout.resume.floor)

    def _park(self, turn: TurnRecord, key: bytes, lineage: tuple[BlockId, ...], position: int) -> None:
        chain, size = turn.chain, self._size
        live = _Live(turn.key, chain, lineage)
        self._live = live
        if not chain:
            return
        if self._layout.resume.needs_checkpoints:
            ends = {turn.prompt_tokens // size * size, len(chain) * size}
            live.checkpoints = tuple(sorted(end for end in ends if position <= end <= len(chain) * size and end))
        request = CaptureRequest(
            key,
            _units(chain, size),
            chain,
            lineage,
            self._layout.digest,
            live.checkpoints,
            rewindable=not self._layout.resume.needs_checkpoints,
        )
        capture = self.store.begin_capture(request)
        if isinstance(capture, Refused):
            return
        self.result.written_bytes += capture.transfer.bytes
        blocks = -(-(capture.position - capture.transfer.start) // size)
        fixed = len(capture.transfer.stages[0].fixed)
        stages = len(self._layout.stages)
        sums = Checksums(np.zeros((blocks, stages), np.uint64), np.zeros((fixed, stages), np.uint64))
        live.lineage = self.store.commit(capture, sums).blocks[: capture.position // size]


def _tiered(
    store_config: StoreConfig, config: ReplayConfig, layout: StateLayout, clock: Callable[[], float]
) -> TieredStore:
    """A store for RAM and disk that touches no file."""
    index_bytes = index_bytes_for(store_config, config.disk_bytes, layout)
    numbers = count(1)
    return TieredStore(
        store_config,
        layout,
        clock,
        disk=DiskTier(DiskConfig(config.disk_bytes, bytes(16), index_bytes, config.write_bytes_per_day)),
        sources=DiskSources(clock, lambda: next(numbers), 1),
        allowance=WriteAllowance.full(config.write_bytes_per_day, clock()),
        policy=config.policy,
    )


def replay(
    header: TraceHeader,
    turns: Iterable[TurnRecord],
    config: ReplayConfig,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> ReplayResult:
    """Replays the turns on a new store."""
    began_s = clock()
    replayer = Replayer(header, config)
    for turn in turns:
        replayer.turn(turn)
    result = replayer.finish()
    result.wall_s = clock() - began_s
    return result


def _shared(left: tuple[bytes, ...] | tuple[int, ...], right: tuple[bytes, ...] | tuple[int, ...]) -> int:
    """The number of leading elements in common."""
    limit = min(len(left), len(right))
    if left[:limit] == right[:limit]:
        return limit
    return next(index for index, (mine, theirs) in enumerate(zip(left, right, strict=False)) if mine != theirs)


def _units(chain: tuple[bytes, ...], block_tokens: int) -> Units:
    """Units that stand in for the real ones: equal exactly where the chains are equal."""
    units = np.empty(len(chain) * block_tokens, dtype=np.uint64)
    units.reshape(-1, block_tokens)[:] = np.frombuffer(b"".join(chain), dtype="<u8")[:, np.newaxis]
    units.flags.writeable = False
    return units
