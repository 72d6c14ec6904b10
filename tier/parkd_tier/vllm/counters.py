"""What the tier counts, under vLLM's metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata, OffloadingMetricMetadata

from parkd.store.chunks import ChunkStore

COUNTERS: Mapping[str, str] = {
    "writes": "Conversations that were written to disk, one for each turn.",
    "written_bytes": "Bytes that were written to disk, manifests included.",
    "write_failures": "Writes that the disk failed.",
    "not_written": "Offers of state that were not kept: no room, no allowance, or a failed disk.",
    "reads": "Reads of state from disk into memory.",
    "read_bytes": "Bytes that were read from disk and compared with their checksums.",
    "read_failures": "Reads that brought other bytes than were written, or failed. vLLM computes again.",
    "dropped": "Conversations that were dropped because their state was damaged.",
    "evictions": "Conversations that left the disk because others needed the room.",
}
"""By the name in `ChunkStore.counts`."""
GAUGES: Mapping[str, str] = {
    "disk_bytes": "Bytes of disk in use.",
    "conversations": "Conversations on disk that this model can use.",
}


def metric(name: str) -> str:
    return f"vllm:parkd_tier_{name}"


def definitions() -> dict[str, OffloadingMetricMetadata]:
    counters = {metric(name): OffloadingCounterMetadata(documentation=text) for name, text in COUNTERS.items()}
    gauges = {metric(name): OffloadingGaugeMetadata(documentation=text) for name, text in GAUGES.items()}
    return {**counters, **gauges}


class Counted:
    """Tells vLLM what was counted since it asked last."""

    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        self._told: dict[str, int] = {}

    def take(self) -> Any:
        """vLLM's statistics; None if nothing has changed."""
        known = {**self._store.counts, "evictions": self._store.disk.evictions}
        if known == self._told:
            return None
        stats = OffloadingConnectorStats()
        for name in COUNTERS:
            more = known.get(name, 0) - self._told.get(name, 0)
            if more:
                stats.increase_counter(metric(name), more)
        rows = self._store.table.on_disk()
        stats.set_gauge(metric("disk_bytes"), self._store.disk.bytes_in_use)
        stats.set_gauge(metric("conversations"), sum(not each.is_foreign for each, _ in rows))
        self._told = known
        return stats
