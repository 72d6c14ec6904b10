"""What the store's tests share: a small layout, prompts with their hashes, and an engine that only copies bytes.

Rows that are computed twice differ in bits, as they may on a real engine, so every mix-up of blocks shows.
"""

from __future__ import annotations

import itertools
from collections import Counter
from hashlib import blake2b
from typing import Protocol

import numpy as np

from parkd.state import Checksums, StageLayout, StateLayout, Transfer
from parkd.store.budget import BLOCK_BYTES, Kind, conversation_metadata_bytes
from parkd.store.records import Capture, CaptureRequest, Lease, Parked, Refused, StoreConfig
from parkd.store.store import ConversationStore

KEY = blake2b(b"a key", digest_size=16).digest()
OTHER_KEY = blake2b(b"another key", digest_size=16).digest()


def make_layout(row_bytes=(256, 128), fixed_bytes=(0, 0)) -> StateLayout:
    stages = tuple(
        StageLayout(index, index + 1, rows, fixed, bytes([index]) * 16)
        for index, (rows, fixed) in enumerate(zip(row_bytes, fixed_bytes, strict=True))
    )
    return StateLayout(stages, "test-sum")


def make_units(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50_000, count, dtype=np.uint64)


def make_hashes(units: np.ndarray, block_tokens: int, key: bytes = KEY, width: int = 16) -> tuple[bytes, ...]:
    """A chain; `width` bytes wide, so that a small width collides."""
    hashes, last = [], key
    for stop in range(block_tokens, len(units) + 1, block_tokens):
        last = blake2b(last + units[stop - block_tokens : stop].tobytes(), digest_size=width).digest()
        hashes.append(last)
    return tuple(hashes)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


class TimedStore(ConversationStore):
    """With the clock that was passed in, for tests to advance."""

    def __init__(self, config, layout, clock, **options) -> None:
        self.clock = clock
        super().__init__(config, layout, clock, **options)


def make_store(
    budget_bytes,
    layout=None,
    *,
    block_tokens=4,
    slots=None,
    slab_bytes=1 << 20,
    min_free_bytes=0,
    checkpoint_limit=16,
    **options,
):
    """A store whose budget is looked at after every change."""
    holder: list[ConversationStore] = []

    def observe() -> None:
        if holder:
            assert_within_budget(holder[0])

    config = StoreConfig(budget_bytes, block_tokens, slots, slab_bytes, min_free_bytes, checkpoint_limit)
    store = TimedStore(config, layout or make_layout(), Clock(), observer=observe, **options)
    holder.append(store)
    return store


def assert_within_budget(store: ConversationStore) -> None:
    table, memory = store.table, store.table.memory
    held = memory.slabs.held_bytes + table.blocks.places.held_bytes
    held += table.checkpoints.held_bytes + memory.idle.held_bytes
    assert memory.bytes_in_use <= memory.budget.allocated_bytes <= store.config.budget_bytes
    assert held + memory.budget[Kind.METADATA] <= store.config.budget_bytes


def assert_counts(store: ConversationStore) -> None:
    """Owners, slots and charges against a count from the conversations and captures there are."""
    table, seen = store.table, store.inspect()
    there = [each for each in seen.conversations.values() if each.is_in_ram]
    holders = [*there, *seen.fading, *seen.captures]
    blocks = Counter(itertools.chain(*(each.blocks for each in holders)))
    checkpoints = Counter(c.id for c in itertools.chain(*(each.checkpoints for each in holders)))
    assert {known: block.owners for known, block in table.blocks.items() if block.ram is not None} == blocks
    assert {known: c.owners for known, c in table.checkpoints.items() if c.ram is not None} == checkpoints
    assert all(block.ram is not None or block.disk is not None for _, block in table.blocks.items())
    assert all(each.ram is not None or each.disk is not None for _, each in table.checkpoints.items())
    assert seen.ram.charged_bytes["segments"] == seen.ram.held_bytes["segments"]
    assert seen.ram.charged_bytes["checkpoints"] == sum(seen.checkpoints[known].ram_bytes for known in checkpoints)
    if store.layout.is_opaque:  # it takes no slots
        assert seen.ram.charged_bytes["segments"] == sum(seen.blocks[known].ram_bytes for known in blocks)
        return
    slots = [seen.blocks[block_id].slot for block_id in blocks]
    assert len(set(slots)) == len(slots) == seen.ram.used_slots
    for owner, each in table.owned.items():
        assert table.blocks.exclusive(owner) == sum(blocks[b] == 1 for b in each.parked.blocks)
    owned = len(blocks) * BLOCK_BYTES
    size = store.config.block_tokens
    owned += sum(conversation_metadata_bytes(each.position, size) for each in (*there, *seen.fading))
    if not seen.captures:
        assert seen.ram.charged_bytes["metadata"] == owned
    assert seen.ram.charged_bytes["idle"] == seen.ram.held_bytes["idle"]
    assert seen.ram.charged_bytes["slabs"] == seen.ram.held_bytes["slabs"]
    if store.config.conversation_slots is not None:
        assert len(there) <= store.config.conversation_slots


class Hooks:
    """Notes the memory that is to be page-locked: address -> bytes."""

    def __init__(self):
        self.known = {}
        self.added_total = 0

    def added(self, memory):
        self.known[memory.ctypes.data] = memory.nbytes
        self.added_total += 1

    def removed(self, memory):
        del self.known[memory.ctypes.data]


def part_sum(data: np.ndarray) -> int:
    return int.from_bytes(blake2b(data.tobytes(), digest_size=8).digest(), "little")


class Watcher(Protocol):
    """Told what happens to the live rows."""

    def extended(self, start: int) -> None: ...

    def cut(self, position: int) -> None: ...


class CopyEngine:
    """Live rows of all stages, and the lineage that the daemon would keep for them."""

    def __init__(self, layout: StateLayout, block_tokens: int = 4, context_tokens: int = 4096, seed: int = 1) -> None:
        self.layout = layout
        self.block_tokens = block_tokens
        self.arenas = [np.zeros((context_tokens, stage.row_bytes), np.uint8) for stage in layout.stages]
        self.units = np.zeros(0, np.uint64)
        self.fixed: dict[int, list[np.ndarray]] = {}
        self.lineage: tuple[int, ...] = ()
        self.rng = np.random.default_rng(seed)
        self.watcher: Watcher | None = None

    @property
    def position(self) -> int:
        return len(self.units)

    def truncate(self, position: int) -> None:
        if position < self.position:
            if self.watcher is not None:
                self.watcher.cut(position)
            self.units = self.units[:position]
            self.lineage = self.lineage[: position // self.block_tokens]
            self.fixed = {place: parts for place, parts in self.fixed.items() if place <= position}

    def extend(self, units: np.ndarray, *, checkpoint: bool = False) -> None:
        start, stop = self.position, self.position + len(units)
        if self.watcher is not None:
            self.watcher.extended(start)
        self.lineage = self.lineage[: start // self.block_tokens]
        self.units = np.concatenate([self.units, units])
        for arena in self.arenas:
            arena[start:stop] = self.rng.integers(0, 256, arena[start:stop].shape, dtype=np.uint8)
        if checkpoint:
            self.fixed[stop] = [
                self.rng.integers(0, 256, stage.fixed_bytes, dtype=np.uint8) for stage in self.layout.stages
            ]

    def read(self, units: np.ndarray, *, checkpoint: bool = False) -> CopyEngine:
        self.truncate(0)
        self.extend(units, checkpoint=checkpoint)
        return self

    def request(self, key: bytes = KEY, *, width: int = 16) -> CaptureRequest:
        return CaptureRequest(
            key_digest=key,
            units=self.units,
            prefix_hashes=make_hashes(self.units, self.block_tokens, key, width),
            lineage=self.lineage,
            layout_digest=self.layout.digest,
            checkpoints=tuple(sorted(self.fixed)),
        )

    def capture(self, transfer: Transfer) -> Checksums:
        assert transfer.stop <= self.position
        for stage, part in enumerate(transfer.stages):
            assert_contiguous(part.rows, transfer)
            for run in part.rows:
                run.buffer[:] = self.arenas[stage][run.start : run.stop].reshape(-1)
            for fixed in part.fixed:
                fixed.buffer[:] = self.fixed[fixed.position][stage]
        places = [fixed.position for fixed in transfer.stages[0].fixed]
        fixed_sums = [[part_sum(part) for part in self.fixed[place]] for place in places]
        return Checksums(self._sums(transfer), np.array(fixed_sums, np.uint64).reshape(len(places), len(self.arenas)))

    def restore(self, lease: Lease) -> None:
        """Checks everything that a real engine checks."""
        transfer = lease.transfer
        assert transfer.layout_digest == self.layout.digest
        assert transfer.position == lease.stop
        for stage, part in enumerate(transfer.stages):
            assert_contiguous(part.rows, transfer)
            for run in part.rows:
                assert not run.buffer.flags.writeable
                self.arenas[stage][run.start : run.stop] = run.buffer.reshape(-1, self.layout.stages[stage].row_bytes)
        assert np.array_equal(self._sums(transfer), transfer.checksums)
        self.fixed = {}
        if self.layout.fixed_bytes:
            parts = [part.fixed[0] for part in transfer.stages]
            assert {part.position for part in parts} == {lease.stop}
            assert [[part_sum(part.buffer) for part in parts]] == transfer.fixed_checksums.tolist()
            self.fixed[lease.stop] = [part.buffer.copy() for part in parts]
        self.units = lease.parked.units[: lease.stop].copy()
        self.lineage = lease.lineage

    def park(self, store: ConversationStore, key: bytes = KEY) -> Parked | Refused:
        capture = store.begin_capture(self.request(key))
        if isinstance(capture, Refused):
            return capture
        return self.finish(store, capture)

    def finish(self, store: ConversationStore, capture: Capture) -> Parked:
        parked = store.commit(capture, self.capture(capture.transfer))
        self.lineage = parked.blocks
        return parked

    def rows(self, stop: int | None = None) -> list[np.ndarray]:
        return [arena[: self.position if stop is None else stop].copy() for arena in self.arenas]

    def _sums(self, transfer: Transfer) -> np.ndarray:
        size, start, stop = self.block_tokens, transfer.start, transfer.stop
        edges = sorted({start, stop, *range(-(-start // size) * size, stop, size)})
        sums = [[part_sum(arena[first:last]) for arena in self.arenas] for first, last in itertools.pairwise(edges)]
        return np.array(sums, np.uint64).reshape(len(sums), len(self.arenas))


def assert_contiguous(runs, transfer: Transfer) -> None:
    at = transfer.start
    for run in runs:
        assert run.start == at
        assert run.stop > run.start
        at = run.stop
    assert at == transfer.stop


def leased_state(
    store: ConversationStore, conversation_id: str, stop: int
) -> tuple[list[np.ndarray], tuple[np.ndarray, ...]]:
    """The rows `[0, stop)` and the fixed state at `stop` of each stage, as a lease gives them."""
    with store.lease(conversation_id, stop) as lease:
        rows = [
            np.concatenate([run.buffer for run in part.rows]).reshape(-1, stage.row_bytes)[:stop].copy()
            for part, stage in zip(lease.transfer.stages, store.layout.stages, strict=True)
        ]
        return rows, tuple(fixed.buffer.copy() for part in lease.transfer.stages for fixed in part.fixed)


def leased_rows(store: ConversationStore, parked: Parked, stop: int | None = None) -> list[np.ndarray]:
    """The rows `[0, stop)` a stage, as a lease gives them."""
    return leased_state(store, parked.id, parked.position if stop is None else stop)[0]


def assert_same_rows(left, right) -> None:
    assert len(left) == len(right)
    assert all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))
