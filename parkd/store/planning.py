"""What a capture up to a given position would take. Pure.

rows     0 ........ held ............ position ......... n
         |-- stored --|-- to copy ------|-- not parked --|
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from parkd.state import StateSizes
from parkd.store.budget import BLOCK_BYTES, Need, conversation_metadata_bytes
from parkd.store.checkpoints import checkpoint_charge
from parkd.store.records import BlockId, CaptureRequest, ParkedCheckpoint
from parkd.store.segments import segment_charge


def block_identity(request: CaptureRequest, index: int, rows: int, block_tokens: int) -> bytes:
    """16 bytes that name the units up to row `rows` of block `index`. A guard against a lineage that names the wrong
    block; equal identities alone never make a block reusable."""
    if rows == block_tokens:
        return request.prefix_hashes[index]
    before = request.prefix_hashes[index - 1] if index else request.key_digest
    tail = request.units[index * block_tokens : index * block_tokens + rows]
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


@dataclass(frozen=True, eq=False)
class CapturePlan:
    """A request, and what the store already holds of it by lineage."""

    request: CaptureRequest
    held: tuple[BlockId, ...]
    inherited: tuple[ParkedCheckpoint, ...]
    """Checkpoints that belong to held blocks, ascending."""
    block_tokens: int
    slot_bytes: int
    checkpoint_bytes: int
    dropped: tuple[int, ...] = ()
    """Positions of inherited checkpoints that are given up, because the conversation has too many."""

    def blocks(self, position: int) -> int:
        return -(-position // self.block_tokens)

    def held_at(self, position: int) -> tuple[BlockId, ...]:
        return self.held[: self.blocks(position)]

    def inherited_at(self, position: int) -> tuple[ParkedCheckpoint, ...]:
        if not self.inherited:
            return ()
        return tuple(checkpoint for checkpoint in self.inherited if checkpoint.position <= position)

    def fresh_checkpoints(self, position: int) -> tuple[int, ...]:
        """Positions of checkpoints that must be copied."""
        if not self.request.checkpoints:
            return ()
        known = {checkpoint.position for checkpoint in self.inherited}
        return tuple(place for place in self.request.checkpoints if place <= position and place not in known)

    def checkpoint_positions(self, position: int) -> tuple[int, ...]:
        """All checkpoints of the parked conversation, ascending."""
        known = {checkpoint.position for checkpoint in self.inherited_at(position)}
        return tuple(sorted(known.union(self.fresh_checkpoints(position))))

    def fresh_shapes(self, position: int) -> list[tuple[int, int, bytes]]:
        """`(index, rows, identity)` of each block that must be copied."""
        size, hashes = self.block_tokens, self.request.prefix_hashes
        whole, rest = divmod(position, size)
        first = len(self.held_at(position))
        shapes = [(index, size, name) for index, name in enumerate(hashes[first:whole], first)]
        if rest and first <= whole:
            shapes.append((whole, rest, block_identity(self.request, whole, rest, size)))
        return shapes

    def start(self, position: int) -> int:
        """First row that must be copied."""
        return min(len(self.held_at(position)) * self.block_tokens, position)

    def need(self, position: int) -> Need:
        blocks = -(-position // self.block_tokens)
        slots = blocks - min(blocks, len(self.held))
        side_bytes = conversation_metadata_bytes(position, self.block_tokens) + slots * BLOCK_BYTES
        return Need(slots, side_bytes + self.fresh_checkpoint_bytes(position))

    def fresh_checkpoint_bytes(self, position: int) -> int:
        return len(self.fresh_checkpoints(position)) * self.checkpoint_bytes

    def fresh_bytes(self, position: int) -> int:
        """Bytes of state that must be copied, as they are charged."""
        return self.need(position).slots * self.slot_bytes + self.fresh_checkpoint_bytes(position)

    def checkpoint_sizes(self, places: Sequence[int]) -> list[int] | None:  # noqa: ARG002
        """Bytes of the checkpoints at `places`; None: as the layout says."""
        return None

    def need_bytes(self, position: int) -> int:
        need = self.need(position)
        return need.slots * self.slot_bytes + need.side_bytes


@dataclass(frozen=True, eq=False)
class OpaquePlan(CapturePlan):
    """A plan for an opaque state, which is parked as one segment or not at all."""

    @property
    def sizes(self) -> StateSizes:
        assert self.request.sizes is not None
        return self.request.sizes

    def blocks(self, position: int) -> int:  # noqa: ARG002 - however long it is
        return 1

    def start(self, position: int) -> int:
        return position if self.held else 0

    def fresh_shapes(self, position: int) -> list[tuple[int, int, bytes]]:
        if self.held:
            return []
        return [(0, position, block_identity(self.request, 0, position, self.block_tokens))]

    def need(self, position: int) -> Need:
        fresh = 0 if self.held else BLOCK_BYTES + self._segment_bytes
        metadata = conversation_metadata_bytes(position, self.block_tokens)
        return Need(0, metadata + fresh + self.fresh_checkpoint_bytes(position))

    def fresh_checkpoint_bytes(self, position: int) -> int:
        places = self.fresh_checkpoints(position)
        return sum(checkpoint_charge((size,)) for size in self.checkpoint_sizes(places))

    def fresh_bytes(self, position: int) -> int:
        return (0 if self.held else self._segment_bytes) + self.fresh_checkpoint_bytes(position)

    def checkpoint_sizes(self, places: Sequence[int]) -> list[int]:
        known = dict(zip(self.request.checkpoints, self.sizes.checkpoints, strict=True))
        return [known[place] for place in places]

    @property
    def _segment_bytes(self) -> int:
        return 0 if self.request.file is not None else segment_charge(self.sizes.whole)
