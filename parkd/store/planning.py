"""What it would take to have a conversation in RAM up to a given position: what is there, and what must be filled.

rows     0 ........ held ............ position ......... n
         |-- there ---|-- to fill ------|-- left out ----|

A capture fills places from the arenas, a promotion from disk. Both are planned, admitted and reserved alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from parkd.state import StateFile
from parkd.store.blocks import Block, BlockTable, Shape, StateKind, whole_charge
from parkd.store.budget import BLOCK_BYTES, Need, conversation_metadata_bytes
from parkd.store.checkpoints import Checkpoint, checkpoint_bytes_of, checkpoint_charge
from parkd.store.conversations import Conversations
from parkd.store.records import BlockId, CaptureRequest, CheckpointId, Parked, ParkedCheckpoint
from parkd.types import Units


def block_identity(
    key_digest: bytes, units: Units, prefix_hashes: tuple[bytes, ...], block_tokens: int, index: int, rows: int
) -> bytes:
    """16 bytes that name the units up to row `rows` of block `index`. A guard against a lineage that names the wrong
    block; equal identities alone never make a block reusable."""
    if rows == block_tokens:
        return prefix_hashes[index]
    before = prefix_hashes[index - 1] if index else key_digest
    tail = units[index * block_tokens : index * block_tokens + rows]
    return blake2b(before + tail.tobytes(), digest_size=16, person=b"parkd-tail").digest()


def bounded(
    inherited: Sequence[ParkedCheckpoint], fresh: Sequence[int], limit: int
) -> tuple[tuple[ParkedCheckpoint, ...], tuple[int, ...]]:
    """The `inherited` checkpoints to keep, and the positions of those to drop, so that with `fresh` they are at most
    `limit`.

    Each turn adds a few, so without a limit a long conversation would be mostly checkpoints. The earliest is kept,
    since others branch off there; of the rest the earliest are dropped, since few will continue there. Those that the
    engine holds are kept.
    """
    excess = len({checkpoint.position for checkpoint in inherited}.union(fresh)) - limit
    going = [checkpoint.position for checkpoint in inherited[1:] if checkpoint.position not in fresh][: max(0, excess)]
    return tuple(checkpoint for checkpoint in inherited if checkpoint.position not in going), tuple(going)


def check_request(request: CaptureRequest, layout_digest: bytes, block_tokens: int) -> None:
    """Raises ValueError on a request that contradicts itself or the store's layout."""
    tokens = len(request.units)
    if request.layout_digest != layout_digest:
        raise ValueError("the request's layout is not the store's")
    if tokens == 0:
        raise ValueError("an empty conversation can't be parked")
    if len(request.prefix_hashes) != tokens // block_tokens:
        raise ValueError(f"{tokens} units have {tokens // block_tokens} hashes, not {len(request.prefix_hashes)}")
    places = request.checkpoints
    if any(later <= earlier for earlier, later in zip((0, *places), places, strict=False)) or places[-1:] > (tokens,):
        raise ValueError(f"checkpoints must ascend within (0, {tokens}]")
    if request.sizes is not None and len(request.sizes.checkpoints) != len(places):
        raise ValueError("the sizes are not those of the checkpoints")


KIN_LIMIT = 64
"""Conversations searched for checkpoints to inherit."""


@dataclass(frozen=True, slots=True)
class PlannedCheckpoint:
    """A checkpoint whose place in RAM must be filled."""

    position: int
    size: int = 0
    """Bytes of an opaque checkpoint; others have as many as the layout says."""
    id: CheckpointId | None = None
    """The checkpoint on disk that is read; None: a new one."""


@dataclass(frozen=True, eq=False)
class Plan:
    """A conversation that is to be in RAM, and what of it is there."""

    kind: StateKind
    slot_bytes: int
    key_digest: bytes
    units: Units
    prefix_hashes: tuple[bytes, ...]
    held: tuple[BlockId, ...]
    """Its first blocks, which are in RAM."""
    inherited: tuple[ParkedCheckpoint, ...]
    """Checkpoints in RAM that belong to held blocks, ascending. None is beyond where it is parked: that is the last
    checkpoint, or at least a block more than what is held."""
    checkpoints: tuple[PlannedCheckpoint, ...]
    """Ascending."""
    ends: tuple[int, ...] | None
    """Positions up to which it may be parked, ascending; None: any."""
    dropped: tuple[int, ...] = ()
    """Positions of checkpoints that could be inherited and are given up, because the conversation has too many, or
    because they were only for a pause."""
    lineage: tuple[BlockId, ...] = ()
    """For a capture: the blocks that the live state descends from. Those on disk alone keep their ids."""
    on_disk: tuple[tuple[BlockId, Block], ...] = ()
    """For a promotion: the blocks of the conversation on disk."""
    whole_bytes: int = 0
    """Bytes of an opaque state."""
    file: StateFile | None = None
    """The file of an opaque state that stays in it."""

    def held_at(self, position: int) -> tuple[BlockId, ...]:
        return self.held[: self.kind.blocks(position)]

    def checkpoints_at(self, position: int) -> tuple[PlannedCheckpoint, ...]:
        """Those that must be filled."""
        return tuple(checkpoint for checkpoint in self.checkpoints if checkpoint.position <= position)

    def checkpoint_positions(self, position: int) -> tuple[int, ...]:
        """All checkpoints of the conversation if it is parked up to `position`, ascending."""
        inherited = (checkpoint.position for checkpoint in self.inherited)
        return tuple(sorted((*inherited, *(checkpoint.position for checkpoint in self.checkpoints_at(position)))))

    def start(self, position: int) -> int:
        """First row that must be filled."""
        if self.kind.is_whole:
            return position if self.held else 0
        return min(len(self.held_at(position)) * self.kind.block_tokens, position)

    def shapes(self, position: int, blocks: BlockTable) -> tuple[list[Shape], list[BlockId | None]]:
        """Each block that must be filled, and its id if it is on disk.

        A promoted block is read with all rows it was written with. These may reach further than the conversation, if it
        was parked in part because no more fitted.
        """
        first, end = len(self.held_at(position)), self.kind.blocks(position)
        if self.on_disk:
            found = self.on_disk[first:end]
            shapes = [Shape(b.index, b.rows, b.identity, self.whole_bytes, self.file) for _, b in found]
            return shapes, [block_id for block_id, _ in found]
        size = position if self.kind.is_whole else self.kind.block_tokens
        known = self.key_digest, self.units, self.prefix_hashes, self.kind.block_tokens
        shapes = []
        for index in range(first, end):
            rows = min(size, position - index * size)
            shapes.append(Shape(index, rows, block_identity(*known, index, rows), self.whole_bytes, self.file))
        return shapes, self._names(shapes, blocks)

    def _names(self, shapes: Sequence[Shape], blocks: BlockTable) -> list[BlockId | None]:
        """The ids that blocks to be copied have on disk, up to the first that has none: so a block that is in RAM
        follows the same blocks in every conversation."""
        names: list[BlockId | None] = []
        for shape, name in zip(shapes, self.lineage[len(self.held) :], strict=False):
            block = blocks.get(name)
            if block is None or block.ram is not None or (block.rows, block.identity) != (shape.rows, shape.identity):
                break
            names.append(name)
        return names + [None] * (len(shapes) - len(names))

    def need(self, position: int) -> Need:
        fresh, metadata_bytes = self._fresh_blocks(position), self._metadata_bytes(position)
        side_bytes = metadata_bytes + self._checkpoint_bytes(position)
        return Need(0, side_bytes + fresh * self._own_bytes) if self.kind.is_whole else Need(fresh, side_bytes)

    def need_bytes(self, position: int) -> int:
        need = self.need(position)
        return need.slots * self.slot_bytes + need.side_bytes

    def fresh_bytes(self, position: int) -> int:
        """Bytes of state that must be filled, as they are charged."""
        return self.need_bytes(position) - self._metadata_bytes(position)

    def _fresh_blocks(self, position: int) -> int:
        return max(0, self.kind.blocks(position) - len(self.held))

    def _metadata_bytes(self, position: int) -> int:
        fresh = self._fresh_blocks(position)
        return conversation_metadata_bytes(position, self.kind.block_tokens) + fresh * BLOCK_BYTES

    @property
    def _own_bytes(self) -> int:
        """What an opaque state takes in memory."""
        return 0 if self.file is not None else whole_charge(self.whole_bytes)

    def _checkpoint_bytes(self, position: int) -> int:
        planned = self.checkpoints_at(position)
        if not self.kind.is_whole:
            return len(planned) * checkpoint_bytes_of(self.kind.layout)
        return sum(checkpoint_charge((checkpoint.size,)) for checkpoint in planned)


def plan_capture(
    table: Conversations, request: CaptureRequest, checkpoint_limit: int, file: StateFile | None = None
) -> Plan:
    """What a capture of the request would find in RAM, and what it would copy. `file` is where a state goes that stays
    in its file."""
    kind, tokens = table.kind, len(request.units)
    sizes: dict[int, int] = {}
    if kind.is_whole:
        assert request.sizes is not None, "the size of an opaque state is told"
        sizes = dict(zip(request.checkpoints, request.sizes.checkpoints, strict=True))
        sizes.setdefault(tokens, 0)  # the end is always a checkpoint, and part of the whole state
        request = replace(request, checkpoints=tuple(sizes))
    held = _usable_lineage(table, request)
    inherited: tuple[ParkedCheckpoint, ...] = ()
    dropped: tuple[int, ...] = ()
    fresh: tuple[PlannedCheckpoint, ...] = ()
    if kind.needs_checkpoints:
        lasting = [each for each in _inheritable(table, request, held) if each.position not in request.passing]
        inherited, dropped = bounded(lasting, request.checkpoints, checkpoint_limit)
        dropped += request.passing
        known = {checkpoint.position for checkpoint in inherited}
        fresh = tuple(PlannedCheckpoint(at, sizes.get(at, 0)) for at in request.checkpoints if at not in known)
    plan = Plan(
        kind=kind,
        slot_bytes=table.memory.geometry.slot_bytes,
        key_digest=request.key_digest,
        units=request.units,
        prefix_hashes=request.prefix_hashes,
        held=held,
        inherited=inherited,
        checkpoints=fresh,
        ends=None,
        dropped=dropped,
        lineage=() if kind.is_whole else request.lineage,  # the same tokens computed again need not give the same bytes
        whole_bytes=0 if request.sizes is None else request.sizes.whole,
        file=file,
    )
    if kind.is_whole:
        return replace(plan, ends=(tokens,))
    # Parked state can be resumed only at a checkpoint, even where the live state could be cut elsewhere.
    ends = plan.checkpoint_positions(tokens) if kind.needs_checkpoints else None
    if request.is_indivisible:
        ends = (tokens,) if ends is None or tokens in ends else ()
    return replace(plan, ends=ends)


def plan_promotion(table: Conversations, parked: Parked, stop: int, file: StateFile | None) -> Plan | None:
    """What a promotion of `[0, stop)`, or of all if it cannot be cut, would find in RAM and what it would read.

    None while a part of it is being filled. `file` is that of a state that stays in it.
    """
    kind, size = table.kind, table.kind.block_tokens
    is_cut = not (kind.needs_checkpoints or kind.is_whole)
    end = min(-(-stop // size) * size, parked.position) if is_cut else parked.position
    blocks = [(block_id, table.blocks[block_id]) for block_id in parked.blocks[: kind.blocks(end)]]
    checkpoints = [(c, table.checkpoints[c.id]) for c in parked.checkpoints]
    parts: list[Block | Checkpoint] = [*(block for _, block in blocks), *(known for _, known in checkpoints)]
    if any(part.owners and not part.is_sealed for part in parts):
        return None
    # What is in memory of a conversation is its beginning, since a block follows the same blocks in all of them.
    held = sum(block.ram is not None for _, block in blocks)
    return Plan(
        kind=kind,
        slot_bytes=table.memory.geometry.slot_bytes,
        key_digest=parked.key_digest,
        units=parked.units[:end],
        prefix_hashes=parked.prefix_hashes[: end // size],
        held=parked.blocks[:held],
        inherited=tuple(c for c, known in checkpoints if known.ram is not None),
        checkpoints=tuple(
            PlannedCheckpoint(c.position, _bytes_on_disk(known), c.id) for c, known in checkpoints if known.ram is None
        ),
        ends=None if is_cut else (end,),
        on_disk=tuple(blocks),
        whole_bytes=_bytes_on_disk(blocks[0][1]),
        file=file,
    )


def plan_recut(table: Conversations, parked: Parked) -> Plan:
    """What it takes to have a conversation on disk in RAM that is of another layer split: all of it, since it shares no
    block with what is here. As much as fits, if it can be cut."""
    request = CaptureRequest(
        key_digest=parked.key_digest,
        units=parked.units,
        prefix_hashes=parked.prefix_hashes,
        lineage=(),
        layout_digest=table.kind.layout.digest,
        checkpoints=tuple(checkpoint.position for checkpoint in parked.checkpoints),
        is_indivisible=table.kind.needs_checkpoints,
    )
    return plan_capture(table, request, len(parked.checkpoints))


def _bytes_on_disk(part: Block | Checkpoint) -> int:
    """Those of an opaque state or checkpoint; 0 for others."""
    assert part.disk is not None, "what is promoted is on disk"
    return part.disk.bytes


def _usable_lineage(table: Conversations, request: CaptureRequest) -> tuple[BlockId, ...]:
    """The blocks of the lineage that are in RAM and hold only rows of the request."""
    kind, tokens = table.kind, len(request.units)
    if kind.is_whole and request.covered != tokens:
        return ()  # it continued from inside the state, and equal tokens are not equal state
    held = table.blocks.lineage(request.lineage, request.prefix_hashes)
    index = len(held)
    tail = table.blocks.get(request.lineage[index]) if index < len(request.lineage) else None
    if tail is None or not tail.is_sealed or tail.index != index or index * kind.block_tokens + tail.rows != tokens:
        return tuple(held)
    known = request.key_digest, request.units, request.prefix_hashes
    if tail.identity == block_identity(*known, kind.block_tokens, index, tail.rows):
        held.append(request.lineage[index])
    return tuple(held)


def _inheritable(
    table: Conversations, request: CaptureRequest, held: tuple[BlockId, ...]
) -> tuple[ParkedCheckpoint, ...]:
    """Checkpoints in RAM of blocks that the live state descends from, so that they are valid for it too."""
    kind = table.kind
    lineage, end = (request.lineage, request.covered) if kind.is_whole else (held, len(request.units))
    found: dict[int, ParkedCheckpoint] = {}
    for kin, _ in table.find_in_ram(request.key_digest, request.prefix_hashes, KIN_LIMIT):
        parked = kin.parked
        for checkpoint in parked.checkpoints:
            if kind.is_whole and checkpoint.position == parked.position:
                continue  # it is part of the whole state, and has no bytes of its own
            blocks = kind.blocks(checkpoint.position)
            if parked.blocks[:blocks] == lineage[:blocks] and checkpoint.position <= end:
                found.setdefault(checkpoint.position, checkpoint)
    return tuple(found[position] for position in sorted(found))
