"""What is charged for the records of conversations is not below what these take of the machine's memory."""

from __future__ import annotations

import gc
import tracemalloc
from hashlib import blake2b

import numpy as np
import pytest

from parkd.state import Checksums, StageLayout, StateLayout
from parkd.store.budget import Kind
from parkd.store.records import BlockId, CaptureRequest, StoreConfig
from parkd.store.store import ConversationStore
from tests.unit.store.store_kit import Clock

CONVERSATIONS = 1000
BLOCK_TOKENS = 16


def layout_of(stages: int, fixed_bytes: int) -> StateLayout:
    """Rows of one byte: the slabs take next to nothing, and are mapped, not traced."""
    return StateLayout(tuple(StageLayout(i, i + 1, 1, fixed_bytes, bytes([i]) * 16) for i in range(stages)), "none")


def prefix_hashes(number: int, blocks: int, shared: int) -> tuple[bytes, ...]:
    """Each prompt computes its own, also those that are equal to another's."""
    seeds = [f"{0 if at < shared else number} {at}".encode() for at in range(blocks)]
    return tuple(blake2b(seed, digest_size=16).digest() for seed in seeds)


def park(store: ConversationStore, number: int, blocks: int, shared: int, lineage: tuple[BlockId, ...]):
    units = np.full(blocks * BLOCK_TOKENS, number, np.uint64)
    units[: shared * BLOCK_TOKENS] = 0
    places = (len(units),) if store.layout.fixed_bytes else ()
    hashes = prefix_hashes(number, blocks, shared)
    request = CaptureRequest(b"k" * 16, units, hashes, lineage, store.layout.digest, places)
    capture = store.begin_capture(request)
    fresh, stages = blocks - capture.transfer.start // BLOCK_TOKENS, len(store.layout.stages)
    sums = Checksums(np.zeros((fresh, stages), np.uint64), np.zeros((len(places), stages), np.uint64))
    return store.commit(capture, sums)


def fill(store: ConversationStore, blocks: int, shared: int) -> None:
    first = park(store, 1, blocks, shared, ())
    for number in range(2, CONVERSATIONS + 1):
        park(store, number, blocks, shared, first.blocks[:shared])
    assert len(store.table.in_ram) == CONVERSATIONS


@pytest.mark.parametrize(
    ("blocks", "shared", "stages", "fixed_bytes"),
    [(1, 0, 2, 0), (40, 0, 1, 0), (40, 0, 8, 0), (40, 39, 2, 0), (10, 0, 2, 64)],
    ids=["short", "one stage", "eight stages", "of a shared head", "fixed state"],
)
def test_records_take_no_more_than_is_charged(blocks: int, shared: int, stages: int, fixed_bytes: int) -> None:
    store = ConversationStore(StoreConfig(1 << 30, BLOCK_TOKENS), layout_of(stages, fixed_bytes), Clock())
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        fill(store, blocks, shared)
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    charged = store.table.memory.budget[Kind.METADATA]
    store.close()
    assert taken <= charged, (
        f"{taken / CONVERSATIONS:,.0f} bytes a conversation, {charged / CONVERSATIONS:,.0f} charged"
    )
