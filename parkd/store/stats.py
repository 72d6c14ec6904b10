"""What a store holds, at one instant."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from parkd.store.budget import Kind
from parkd.store.captures import Flight
from parkd.store.disk import DiskTier
from parkd.store.disk_records import DiskStats
from parkd.store.records import StoreConfig, StoreStats
from parkd.store.shelf import Shelf
from parkd.store.write_queue import WriteQueue


def ram_stats(
    config: StoreConfig,
    shelf: Shelf,
    flights: Collection[Flight],
    totals: Mapping[str, int],
    refusals: Mapping[str, int],
) -> StoreStats:
    entries = shelf.entries.values()
    flying_row_bytes = sum(shelf.blocks.bytes_of(flight.fresh_blocks) for flight in flights)
    flying_checkpoint_bytes = sum(shelf.checkpoints.bytes_of(i) for flight in flights for i in flight.fresh_checkpoints)
    used_bytes = shelf.slabs.used_slots * shelf.geometry.slot_bytes + shelf.budget[Kind.SEGMENTS]
    return StoreStats(
        conversations=len(shelf.entries),
        conversation_slots=config.conversation_slots,
        pinned=sum(entry.is_pinned for entry in entries),
        leased=sum(entry.leases > 0 for entry in (*entries, *shelf.fading.values())),
        captures_in_flight=len(flights),
        blocks=len(shelf.blocks),
        shared_blocks=shelf.blocks.shared,
        budget_bytes=config.budget_bytes,
        bytes_in_use=shelf.bytes_in_use,
        bytes_allocated=shelf.budget.allocated_bytes,
        peak_bytes_allocated=shelf.budget.peak_bytes,
        row_bytes=used_bytes - flying_row_bytes,
        checkpoint_bytes=shelf.budget[Kind.CHECKPOINTS] - flying_checkpoint_bytes,
        in_flight_bytes=flying_row_bytes + flying_checkpoint_bytes,
        metadata_bytes=shelf.budget[Kind.METADATA],
        captures_total=totals["captures"],
        partial_captures_total=totals["partial"],
        aborts_total=totals["aborts"],
        leases_total=totals["leases"],
        evictions_total=totals["evictions"],
        superseded_total=totals["superseded"],
        dropped_total=totals["dropped"],
        captured_tokens_total=totals["captured_tokens"],
        reused_tokens_total=totals["reused_tokens"],
        refusals_total=MappingProxyType(dict(refusals)),
    )


def disk_stats(disk: DiskTier, queue: WriteQueue, reads: Mapping[str, int]) -> DiskStats:
    return DiskStats(
        conversations=len(disk.entries),
        extents=disk.extent_count,
        budget_bytes=disk.config.budget_bytes,
        bytes_in_use=disk.bytes_in_use,
        foreign_conversations=sum(entry.is_foreign for entry in disk.entries.values()),
        index_bytes=disk.index_bytes,
        waiting_conversations=len(queue),
        allowance_bytes=int(queue.allowance.left_bytes),
        writes_total=queue.writes,
        written_bytes_total=queue.written_bytes,
        write_failures_total=queue.failures,
        reads_total=reads["reads"],
        read_bytes_total=reads["bytes"],
        read_failures_total=reads["failures"],
        evictions_total=disk.evictions,
        not_written_total=queue.not_written,
    )
