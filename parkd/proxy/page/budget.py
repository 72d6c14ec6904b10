"""What memory holds, as `/parkd/budget` tells it: bars that add up to what the process uses, what more would fit, and
what another budget would hold.

    resident  |-- weights --|-- arenas --|-- parked --|- writing -|- remembered -|-- other --|
                                                                                     what no part accounts for

What was reserved and not touched yet is in no page of memory. It is told apart (`untouched_bytes`), so that
    parts + other - untouched = resident
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from parkd.engine_adapter.base import EngineInfo
from parkd.state import StateLayout
from parkd.store.budget import Room
from parkd.store.records import DiskStats, RefusalReason, StoreConfig, StoreStats
from parkd.store.sizes import EXAMPLE_TOKENS, Sizes

MAIN_MEMORY = "cpu"
REASONS: Mapping[RefusalReason, str] = {
    RefusalReason.OFF: "parking is off",
    RefusalReason.BUDGET: "it does not fit the budget, even if all that may go were evicted",
    RefusalReason.SLOTS: "all conversation slots are in use or pinned",
    RefusalReason.NO_CHECKPOINT: "the engine held no checkpoint to resume from",
    RefusalReason.VALUE: "what would be evicted for it is expected to save more",
    RefusalReason.MEMORY: "the machine gave no more memory",
    RefusalReason.BUSY: "a part of it was being read or written",
    RefusalReason.MEMORY_FLOOR: "too little of the machine's memory would stay free",
}
"""In words, for people."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the process's memory, in bytes."""

    name: str
    bytes: int

    @property
    def shown(self) -> Mapping[str, Any]:
        return {"name": self.name, "bytes": self.bytes}


@dataclass(frozen=True, slots=True)
class Machine:
    """Main memory as the system counts it, in bytes."""

    resident_bytes: int
    free_bytes: int
    total_bytes: int


def parts_of(info: EngineInfo, ram: StoreStats | None, remembered_bytes: int) -> list[Part]:
    """What the process is known to take of main memory."""
    parts = [*_engine_parts(info)]
    if ram is not None:
        parts += [
            Part("parked", ram.bytes_allocated - ram.in_flight_bytes),
            Part("being written", ram.in_flight_bytes),
        ]
    return [part for part in [*parts, Part("remembered", remembered_bytes)] if part.bytes]


def _engine_parts(info: EngineInfo) -> list[Part]:
    """Of stages in main memory, by the engine's own account where it keeps one."""
    if not info.memory:
        here = all(device in (MAIN_MEMORY, "llama.cpp") for device in info.devices)
        return [Part("weights", info.weights_bytes), Part("arenas", info.arena_bytes)] if here else []
    sums: dict[str, int] = {}
    for device, account in zip(info.devices, info.memory, strict=True):
        if device == MAIN_MEMORY:
            for name, size in account.items():
                sums[name] = sums.get(name, 0) + size
    return [Part(name, size) for name, size in sums.items()]


def process(parts: Sequence[Part], machine: Machine) -> Mapping[str, Any]:
    """The bar of main memory: `parts` and `other` less `untouched_bytes` are what is resident."""
    known = sum(part.bytes for part in parts)
    other = max(0, machine.resident_bytes - known)
    return {
        "resident_bytes": machine.resident_bytes,
        "free_bytes": machine.free_bytes,
        "total_bytes": machine.total_bytes,
        "parts": [part.shown for part in (*parts, Part("other", other))],
        "untouched_bytes": known + other - machine.resident_bytes,
    }


def devices(info: EngineInfo) -> list[Mapping[str, Any]]:
    """The stages on devices with memory of their own, by the engine's account."""
    return [
        {
            "device": device,
            "first_layer": stage.first_layer,
            "end_layer": stage.end_layer,
            "parts": [Part(name, size).shown for name, size in account.items()],
        }
        for device, stage, account in zip(info.devices, info.layout.stages, info.memory, strict=False)
        if device != MAIN_MEMORY
    ]


def tiers(ram: StoreStats, disk: DiskStats | None) -> Mapping[str, Any]:
    """The budgets of parked conversations."""
    return {
        "ram": {
            "limit_bytes": ram.budget_bytes,
            "parts": [
                Part("rows", ram.row_bytes).shown,
                Part("checkpoints", ram.checkpoint_bytes).shown,
                Part("being written", ram.in_flight_bytes).shown,
                Part("records", ram.metadata_bytes).shown,
                Part("kept for reuse", ram.bytes_allocated - ram.bytes_in_use).shown,
            ],
            "used_bytes": ram.bytes_in_use,
            "conversations": ram.conversations,
            "pinned": ram.pinned,
            "evictions": ram.evictions_total,
        },
        "disk": None
        if disk is None
        else {
            "limit_bytes": disk.budget_bytes,
            "used_bytes": disk.bytes_in_use,
            "conversations": disk.conversations,
            "waiting": disk.waiting_conversations,
            "evictions": disk.evictions_total,
            "write_failures": disk.write_failures_total,
        },
    }


def refusals(ram: StoreStats) -> list[Mapping[str, Any]]:
    """Most frequent first."""
    counted = sorted(ram.refusals_total.items(), key=lambda item: -item[1])
    return [{"reason": reason, "count": count, "words": REASONS[RefusalReason(reason)]} for reason, count in counted]


def example_tokens(seen: Sequence[int], context_tokens: int) -> list[int]:
    """Lengths to plan with: the middle one and the longest of those parked, else those that `parkd plan` shows."""
    if seen:
        ordered = sorted(seen)
        return sorted({ordered[len(ordered) // 2], ordered[-1]})
    return sorted({*(size for size in EXAMPLE_TOKENS if size < context_tokens), context_tokens})


def held(sizes: Sizes, lengths: Sequence[int], room: Room | None, context_tokens: int) -> Mapping[str, Any]:
    """What a budget holds, as `parkd plan` tells it. `room` is what is free of it now; None: nothing is parked. No
    conversation is longer than the context."""
    off = sizes.budget_bytes == 0
    return {
        "budget_bytes": sizes.budget_bytes,
        "longest_tokens": 0 if off else min(sizes.longest(), context_tokens),
        "fits": [
            {
                "tokens": tokens,
                "bytes": sizes.need_bytes(tokens),
                "conversations": 0 if off else sizes.count(tokens),
                "more": None if room is None else 0 if off else sizes.count_in(room, tokens),
            }
            for tokens in lengths
        ],
    }


def sizes_for(layout: StateLayout, config: StoreConfig, budget_bytes: int | None = None) -> Sizes:
    """Of this store, or of one with another budget."""
    return Sizes(layout, config if budget_bytes is None else replace(config, budget_bytes=budget_bytes))
