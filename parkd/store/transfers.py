"""Builds the transfers that captures and leases give to the engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from parkd.state import StageTransfer, StateLayout, Transfer
from parkd.store.records import BlockId, CheckpointId, Parked
from parkd.store.shelf import Shelf


def capture_transfer(
    shelf: Shelf,
    layout: StateLayout,
    start: int,
    position: int,
    blocks: Sequence[BlockId],
    checkpoints: Sequence[CheckpointId],
) -> Transfer:
    """A transfer into `blocks`, which hold the rows `[start, position)`, and into `checkpoints`."""
    stages = _stages(shelf, blocks, position, checkpoints, writeable=True)
    return Transfer(layout.digest, start, position, shelf.block_tokens, stages)


def lease_transfer(shelf: Shelf, layout: StateLayout, parked: Parked, start: int, stop: int) -> Transfer:
    """A transfer out of the blocks that hold `[start, stop)`, the last block whole. Raises ValueError for other ranges
    than the conversation can serve."""
    size = shelf.block_tokens
    if start % size or not 0 <= start <= stop or not 0 < stop <= parked.position:
        raise ValueError(f"rows [{start}, {stop}) of a conversation of {parked.position} tokens")
    checkpoints = [checkpoint.id for checkpoint in parked.checkpoints if checkpoint.position == stop]
    if layout.fixed_bytes and not checkpoints:
        raise ValueError(f"no checkpoint at {stop}")
    blocks = parked.blocks[start // size : -(-stop // size)]
    end = stop
    if blocks:
        last = shelf.blocks.get(blocks[-1])
        assert last is not None, "a parked conversation holds its blocks"
        end = last.index * size + last.rows
    fixed = [shelf.checkpoints.checksums(checkpoint_id) for checkpoint_id in checkpoints]
    return Transfer(
        layout.digest,
        start,
        end,
        size,
        _stages(shelf, blocks, end, checkpoints, writeable=False),
        checksums=shelf.blocks.checksums(blocks),
        fixed_checksums=np.array(fixed, dtype=np.uint64).reshape(len(fixed), len(layout.stages)),
        resume_at=None if end == stop else stop,
    )


def lineage_of(shelf: Shelf, parked: Parked, stop: int) -> tuple[BlockId, ...]:
    """The blocks whose rows are all within the live rows `[0, stop)`; of an opaque state, its segment."""
    if shelf.is_opaque:
        return parked.blocks
    whole, rest = divmod(stop, shelf.block_tokens)
    if rest:
        tail = shelf.blocks.get(parked.blocks[whole])
        whole += tail is not None and tail.rows == rest
    return parked.blocks[:whole]


def _stages(
    shelf: Shelf, blocks: Sequence[BlockId], stop: int, checkpoints: Sequence[CheckpointId], *, writeable: bool
) -> tuple[StageTransfer, ...]:
    rows = shelf.blocks.runs(blocks, stop, writeable=writeable)
    fixed = [shelf.checkpoints.parts(checkpoint_id, writeable=writeable) for checkpoint_id in checkpoints]
    return tuple(StageTransfer(runs, tuple(parts[stage] for parts in fixed)) for stage, runs in enumerate(rows))
