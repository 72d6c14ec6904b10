"""Replays a trace on the real store, with the same admission, eviction and accounting, but without a model or data.

Slabs are reserved as on a server but never written, so a replay takes address space and no memory. Differences from a
server: turns are cut to full blocks, time is the trace's, and reading and copying take the time given by `Costs`. With
a disk budget, the store is the one for RAM and disk; its file operations complete at once and touch no file. How a turn
starts is decided by the lane's own function.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import count

import numpy as np

from parkd.lane.live_rows import LiveRows
from parkd.lane.start import Seated, Start, decide_start, promotion_s
from parkd.replay.result import ReplayConfig, ReplayResult
from parkd.replay.trace import TraceHeader, TurnRecord
from parkd.state import Checksums, StageLayout, StateLayout
from parkd.store.disk import DiskSetup
from parkd.store.disk_policy import WriteAllowance
from parkd.store.opening import index_bytes_for
from parkd.store.records import BlockId, CaptureRequest, DiskConfig, Refused, StoreConfig
from parkd.store.store import ConversationStore
from parkd.types import CacheOutcome, ConversationKey, PromptIdentity, Units


def layout_of(header: TraceHeader) -> StateLayout:
    stages = tuple(
        StageLayout(index, index + 1, rows, fixed, b"replayed" + bytes([index]) * 8)
        for index, (rows, fixed) in enumerate(zip(header.row_bytes, header.fixed_bytes, strict=True))
    )
    return StateLayout(stages, "none", block_tokens=header.block_tokens)


NO_BLOCK = np.uint64(2**64 - 1)
"""The unit of tokens behind a prompt's last full block, which no trace has anything of."""


class Replayer:
    """One lane with one store."""

    def __init__(self, header: TraceHeader, config: ReplayConfig) -> None:
        self._size = header.block_tokens
        self._layout = layout_of(header)
        self._costs = config.costs
        self._now_s = 0.0
        store_config = StoreConfig(config.budget_bytes, self._size, config.slots)

        def clock() -> float:
            return self._now_s

        disk = _disk(store_config, config, self._layout, clock) if config.disk_bytes else None
        self.store = ConversationStore(store_config, self._layout, clock, policy=config.policy, disk=disk)
        self.store.measured(config.costs)
        self.result = ReplayResult(config.policy.name, config.budget_bytes, config.disk_bytes)
        self._live = Seated()

    def turn(self, turn: TurnRecord) -> None:
        self._now_s = max(self._now_s, turn.at_s)
        prompt = self._prompt(turn)
        cold_s = self._costs.reading_s(0, turn.prompt_tokens)
        live_s = self._costs.reading_s(self._decide(prompt, parked=False).position, turn.prompt_tokens)
        start, from_disk_s = self._find_start(prompt)
        moving_s = self._costs.moving_s(start.move_bytes, from_disk=False) + from_disk_s
        result = self.result
        result.requests += 1
        result.prompt_tokens += turn.prompt_tokens
        result.cold_s += cold_s
        result.live_saved_s += cold_s - live_s
        read_s = self._costs.reading_s(start.position, turn.prompt_tokens) + moving_s
        result.saved_s += cold_s - read_s
        result.turn_read_s.append(read_s)
        self._park(turn, prompt.key, self._begun(start), start.position)
        self._work()

    def _prompt(self, turn: TurnRecord) -> PromptIdentity:
        chain = turn.chain[: turn.prompt_tokens // self._size]
        units = np.full(turn.prompt_tokens, NO_BLOCK)
        units[: len(chain) * self._size] = _units(chain, self._size)
        return PromptIdentity(ConversationKey(turn.key, b""), units.view(np.int64), units, chain)

    def _decide(self, prompt: PromptIdentity, *, parked: bool = True, on_disk: bool = True) -> Start:
        found = self.store.candidates(prompt.key.digest, prompt.prefix_hashes) if parked else []
        return decide_start(
            prompt,
            [self._live],
            [candidate for candidate, _ in found],
            layout=self._layout,
            cost=self._costs,
            on_disk=on_disk,
        )

    def _find_start(self, prompt: PromptIdentity) -> tuple[Start, float]:
        """The start, and the seconds to read it from disk. As on a server, what is on disk is left out if memory has no
        room for it."""
        start = self._decide(prompt)
        if not start.is_on_disk:
            return start, 0.0
        from_disk_s = self._promote(start)
        start = self._decide(prompt)
        if start.is_on_disk:
            start = self._decide(prompt, on_disk=False)
        return start, from_disk_s

    def _promote(self, start: Start) -> float:
        """Reads what the start needs from disk. Returns the seconds; 0 if memory has no room for it."""
        assert start.parked is not None
        promotion = self.store.promote(start.parked.id, start.position)
        if isinstance(promotion, Refused):
            return 0.0
        self.store.promoted(promotion, None)
        return promotion_s(self._costs, promotion.job.bytes)

    def _begun(self, start: Start) -> tuple[BlockId, ...]:
        """The lineage of a turn with this start."""
        blocks = start.position // self._size
        if start.parked is None:
            self.result.live_hit_tokens += start.position
            return self._live.rows.lineage[:blocks]
        if start.outcome is CacheOutcome.RESTORED_DISK:
            self.result.disk_hit_tokens += start.position
        self.result.parked_hit_tokens += start.position
        with self.store.lease(start.parked.id, start.position, start.keep_rows) as lease:
            return lease.lineage[:blocks]

    def _work(self) -> None:
        """Completes the disk's jobs at once: on a server, they run behind the reply."""
        while (job := self.store.next_job()) is not None:
            self.store.finished(job, None)

    def finish(self) -> ReplayResult:
        stats = self.store.stats()
        self.result.evictions = stats.evictions_total
        self.result.peak_bytes = stats.peak_bytes_allocated
        self.result.partial = stats.partial_captures_total
        self.result.refusals = Counter(stats.refusals_total)
        if self.store.has_disk:
            disk = self.store.disk_stats()
            self.result.disk_written_bytes, self.result.disk_read_bytes = (
                disk.written_bytes_total,
                disk.read_bytes_total,
            )
        self.store.close()
        return self.result

    def _park(self, turn: TurnRecord, key: ConversationKey, lineage: tuple[BlockId, ...], position: int) -> None:
        chain, size = turn.chain, self._size
        units = _units(chain, size)
        self._live = Seated(LiveRows(key, units, lineage, len(lineage) * size, block_tokens=size))
        if not chain:
            return
        checkpoints: tuple[int, ...] = ()
        if self._layout.resume.needs_checkpoints:
            ends = {turn.prompt_tokens // size * size, len(chain) * size}
            checkpoints = tuple(sorted(end for end in ends if position <= end <= len(chain) * size and end))
            self._live = Seated(self._live.rows, checkpoints)
        request = CaptureRequest(
            key.digest,
            units,
            chain,
            lineage,
            self._layout.digest,
            checkpoints,
        )
        capture = self.store.begin_capture(request)
        if isinstance(capture, Refused):
            return
        self.result.written_bytes += capture.transfer.bytes
        blocks = -(-(capture.position - capture.transfer.start) // size)
        fixed = len(capture.transfer.stages[0].fixed)
        stages = len(self._layout.stages)
        sums = Checksums(np.zeros((blocks, stages), np.uint64), np.zeros((fixed, stages), np.uint64))
        lineage = self.store.commit(capture, sums).blocks[: capture.position // size]
        self._live = Seated(LiveRows(key, units, lineage, len(lineage) * size, block_tokens=size), checkpoints)


def _disk(
    store_config: StoreConfig, config: ReplayConfig, layout: StateLayout, clock: Callable[[], float]
) -> DiskSetup:
    """A disk for a store that touches no file."""
    index_bytes = index_bytes_for(store_config, config.disk_bytes, layout)
    numbers = count(1)
    return DiskSetup(
        DiskConfig(config.disk_bytes, bytes(16), index_bytes, config.write_bytes_per_day),
        WriteAllowance.full(config.write_bytes_per_day, clock()),
        clock,
        lambda: next(numbers),
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


def _units(chain: tuple[bytes, ...], block_tokens: int) -> Units:
    """Units that stand in for the real ones: equal exactly where the chains are equal."""
    units = np.empty(len(chain) * block_tokens, dtype=np.uint64)
    units.reshape(-1, block_tokens)[:] = np.frombuffer(b"".join(chain), dtype="<u8")[:, np.newaxis]
    units.flags.writeable = False
    return units
