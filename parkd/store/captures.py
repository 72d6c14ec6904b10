"""Captures in flight: what each holds between its reservation and its commit.

open     takes the room that was made        (engine copies)        release    gives it back, if nothing is committed
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parkd.state import StateLayout
from parkd.store.admission import Replaced
from parkd.store.blocks import Owner
from parkd.store.budget import Kind, conversation_metadata_bytes
from parkd.store.history import History
from parkd.store.planning import CapturePlan
from parkd.store.records import BlockId, Capture, CheckpointId, ParkedCheckpoint
from parkd.store.shelf import Shelf
from parkd.store.transfers import capture_transfer


@dataclass(frozen=True, eq=False)
class Flight:
    """What an open capture holds besides its reserved bytes."""

    plan: CapturePlan
    position: int
    blocks: tuple[BlockId, ...]
    fresh_blocks: tuple[BlockId, ...]
    checkpoints: tuple[ParkedCheckpoint, ...]
    fresh_checkpoints: tuple[CheckpointId, ...]
    replaces: Replaced
    """The ancestors that its commit will supersede, so that it takes no further conversation slot."""
    history: History


@dataclass(frozen=True, slots=True)
class Fresh:
    """The blocks that a capture copies."""

    shapes: Sequence[tuple[int, int, bytes]]
    """`(index, rows, identity)` of each."""
    names: Sequence[BlockId | None]
    """The ids that they already have on disk; None for a new block."""


def open_flight(
    shelf: Shelf,
    layout: StateLayout,
    owner: Owner,
    plan: CapturePlan,
    position: int,
    fresh: Fresh,
    replaces: Replaced,
    history: History,
) -> tuple[Capture, Flight]:
    """Takes the room that was made. If it raises OSError or MemoryError, only what the plan holds is left to
    release."""
    places = plan.fresh_checkpoints(position)
    shelf.reserve(plan.need(position), len(places))
    fresh_checkpoints = tuple(shelf.checkpoints.allocate(places, plan.checkpoint_sizes(places)))
    held, inherited = plan.held_at(position), plan.inherited_at(position)
    behind, request = held[-1] if held else None, plan.request
    try:
        allocated = shelf.blocks.allocate(owner, fresh.shapes, behind, fresh.names, request.sizes, request.file)
    except BaseException:
        shelf.checkpoints.release(fresh_checkpoints)
        raise
    blocks = tuple(allocated)
    shelf.budget.charge(Kind.METADATA, conversation_metadata_bytes(position, shelf.block_tokens))
    shelf.blocks.release(owner, plan.held[len(held) :])
    shelf.checkpoints.release(checkpoint.id for checkpoint in plan.inherited[len(inherited) :])
    copied = map(ParkedCheckpoint, places, fresh_checkpoints)
    checkpoints = tuple(sorted((*inherited, *copied), key=lambda checkpoint: checkpoint.position))
    flight = Flight(plan, position, held + blocks, blocks, checkpoints, fresh_checkpoints, replaces, history)
    transfer = capture_transfer(shelf, layout, plan.start(position), position, blocks, fresh_checkpoints)
    return Capture(owner, plan.request, position, transfer), flight


def release_flight(shelf: Shelf, capture: Capture, flight: Flight) -> None:
    """Frees everything that an open capture reserved."""
    shelf.blocks.release(capture.serial, flight.blocks)
    shelf.checkpoints.release(checkpoint.id for checkpoint in flight.checkpoints)
    shelf.budget.credit(Kind.METADATA, conversation_metadata_bytes(capture.position, shelf.block_tokens))
