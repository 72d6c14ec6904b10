"""What moves: room in RAM that is being filled, by a copy or by a read from disk, and what the engine gets for it.

open     takes the room that was made        (engine copies, or a job reads)        release    gives it back

Transfers are the buffers of a capture, which the engine fills, and those of a lease, from which it restores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from parkd.state import StageTransfer, Transfer
from parkd.store.admission import Replaced
from parkd.store.blocks import Owner
from parkd.store.budget import Kind, conversation_metadata_bytes
from parkd.store.conversations import Conversation, Conversations
from parkd.store.files.disk_jobs import ReadJob
from parkd.store.files.manifest import ExtentRef
from parkd.store.history import History
from parkd.store.planning import Plan
from parkd.store.records import BlockId, CheckpointId, Held, Parked, ParkedCheckpoint


@dataclass(frozen=True, eq=False)
class Promotion:
    """Blocks of a conversation on their way from disk to RAM: run `job`, then call `ConversationStore.promoted`."""

    serial: int
    job: ReadJob
    is_ahead: bool = False
    """Nobody asked for it yet."""


class GivenUp(Exception):
    """A read that was made ahead ends, since another one is needed now. It says nothing about the files."""


@dataclass(frozen=True, eq=False)
class Flight:
    """What an open capture or promotion holds."""

    owner: Owner
    plan: Plan
    position: int
    blocks: tuple[BlockId, ...]
    fresh_blocks: tuple[BlockId, ...]
    checkpoints: tuple[ParkedCheckpoint, ...]
    fresh_checkpoints: tuple[CheckpointId, ...]
    replaces: Replaced
    """The ancestors that its end will supersede, so that it takes no further conversation slot."""
    history: History
    source: Conversation | None = None
    """The conversation on disk that is read; None: the engine copies."""
    file: ExtentRef | None = None
    """The file that the engine writes, charged at the most it may have."""


def open_flight(
    table: Conversations,
    owner: Owner,
    plan: Plan,
    position: int,
    replaces: Replaced,
    history: History,
    source: Conversation | None,
    file: ExtentRef | None,
) -> Flight:
    """Takes the room that was made. If it raises OSError or MemoryError, only what the plan holds is left to
    release."""
    planned = plan.checkpoints_at(position)
    table.memory.reserve(plan.need(position), len(planned))
    held = plan.held_at(position)
    shapes, names = plan.shapes(position, table.blocks)
    fresh = tuple(each.id or table.checkpoints.add(each.position) for each in planned)
    table.checkpoints.place(fresh, [each.size for each in planned] if table.kind.is_whole else None)
    try:
        blocks = tuple(table.blocks.place(owner, shapes, names, held[-1] if held else None))
    except BaseException:
        table.checkpoints.release(fresh)
        raise
    table.memory.budget.charge(Kind.METADATA, conversation_metadata_bytes(position, plan.kind.block_tokens))
    table.blocks.release(owner, plan.held[len(held) :])
    filled = (ParkedCheckpoint(each.position, known) for each, known in zip(planned, fresh, strict=True))
    checkpoints = tuple(sorted((*plan.inherited, *filled), key=lambda checkpoint: checkpoint.position))
    return Flight(owner, plan, position, held + blocks, blocks, checkpoints, fresh, replaces, history, source, file)


def release_flight(table: Conversations, flight: Flight) -> None:
    """Frees everything that an open flight reserved in RAM."""
    table.blocks.release(flight.owner, flight.blocks)
    table.checkpoints.release(checkpoint.id for checkpoint in flight.checkpoints)
    size = conversation_metadata_bytes(flight.position, flight.plan.kind.block_tokens)
    table.memory.budget.credit(Kind.METADATA, size)


def capture_transfer(
    table: Conversations, start: int, position: int, blocks: Sequence[BlockId], checkpoints: Sequence[CheckpointId]
) -> Transfer:
    """A transfer into `blocks`, which hold the rows `[start, position)`, and into `checkpoints`."""
    stages = _stages(table, blocks, position, checkpoints, writeable=True)
    return Transfer(table.kind.layout.digest, start, position, table.kind.block_tokens, stages)


def lease_transfer(table: Conversations, parked: Parked, start: int, stop: int) -> Transfer:
    """A transfer out of the blocks that hold `[start, stop)`, the last block whole. Raises ValueError for other ranges
    than the conversation can serve."""
    kind, size = table.kind, table.kind.block_tokens
    if start % size or not 0 <= start <= stop or not 0 < stop <= parked.position:
        raise ValueError(f"rows [{start}, {stop}) of a conversation of {parked.position} tokens")
    checkpoints = [checkpoint.id for checkpoint in parked.checkpoints if checkpoint.position == stop]
    if kind.needs_checkpoints and not checkpoints:
        raise ValueError(f"no checkpoint at {stop}")
    blocks = parked.blocks[start // size : -(-stop // size)]
    end = stop
    if blocks:
        last = table.blocks[blocks[-1]]
        end = last.index * size + last.rows
    fixed = [table.checkpoints.checksums(checkpoint_id) for checkpoint_id in checkpoints]
    return Transfer(
        kind.layout.digest,
        start,
        end,
        size,
        _stages(table, blocks, end, checkpoints, writeable=False),
        checksums=table.blocks.checksums(blocks),
        fixed_checksums=np.array(fixed, dtype=np.uint64).reshape(len(fixed), kind.stages),
        resume_at=None if end == stop else stop,
    )


def held_in_ram(table: Conversations, conversation: Conversation) -> Held:
    """All blocks and checkpoints of a conversation that is in RAM. A state in a file keeps that too."""
    parked, kind = conversation.parked, table.kind
    file = conversation.disk if kind.is_file else None
    end = table.hold(conversation)
    if file is not None:
        file.readers += 1

    def release() -> None:
        if file is not None:
            file.readers -= 1
        end()

    blocks = []
    for block_id in parked.blocks:
        block = table.blocks[block_id]
        stop = block.index * kind.block_tokens + block.rows
        blocks.append(tuple(runs[0] for runs in table.blocks.runs([block_id], stop, writeable=False)))
    ids = [checkpoint.id for checkpoint in parked.checkpoints]
    sums = [table.checkpoints.checksums(checkpoint_id) for checkpoint_id in ids]
    return Held(
        parked,
        tuple(blocks),
        table.blocks.checksums(parked.blocks),
        tuple(tuple(table.checkpoints.parts(checkpoint_id, writeable=False)) for checkpoint_id in ids),
        np.array(sums, dtype=np.uint64).reshape(len(ids), kind.stages),
        release,
    )


def lineage_of(table: Conversations, parked: Parked, stop: int) -> tuple[BlockId, ...]:
    """The blocks whose rows are all within the live rows `[0, stop)`; of an opaque state, its only one."""
    if table.kind.is_whole:
        return parked.blocks
    whole, rest = divmod(stop, table.kind.block_tokens)
    if rest:
        whole += table.blocks[parked.blocks[whole]].rows == rest
    return parked.blocks[:whole]


def _stages(
    table: Conversations,
    blocks: Sequence[BlockId],
    stop: int,
    checkpoints: Sequence[CheckpointId],
    *,
    writeable: bool,
) -> tuple[StageTransfer, ...]:
    rows = table.blocks.runs(blocks, stop, writeable=writeable)
    fixed = [table.checkpoints.parts(checkpoint_id, writeable=writeable) for checkpoint_id in checkpoints]
    return tuple(StageTransfer(runs, tuple(parts[stage] for parts in fixed)) for stage, runs in enumerate(rows))
