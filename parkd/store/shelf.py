"""The parked conversations in RAM and what they hold: blocks, checkpoints, index and budget.

A conversation that is taken off the shelf while it is leased is invisible at once, but keeps its bytes, which stay
charged, until the last lease ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from parkd.state import Costs, StateLayout
from parkd.store.blocks import BlockPool, Owner
from parkd.store.budget import Budget, Kind, Need, Room, conversation_metadata_bytes
from parkd.store.checkpoints import CheckpointPool
from parkd.store.history import Ghosts, History
from parkd.store.index import PrefixIndex
from parkd.store.policy import Evictable, Policy, Rank, rank
from parkd.store.records import ConversationGone, ConversationId, Parked, StoreConfig
from parkd.store.segments import SegmentPool
from parkd.store.slabs import SlabGeometry, SlabHooks, SlabPool
from parkd.types import Units

CHECKPOINTS_AHEAD_SHARE = 4
"""Of memory that is allocated ahead, one part in this many is for checkpoints: conversations of 80,000 tokens of a 27B
hybrid model, with 8 checkpoints each, take about this share."""


@dataclass(frozen=True, slots=True, eq=False)
class Rating:
    """A policy's score of an entry. Valid until `until_s`, or until the entry or what it shares changes."""

    score: float
    candidate: Evictable
    place: Rank
    """Its place in the order of eviction, unless it is superseded or the other side of the switch."""
    freed_slots: int
    freed_side_bytes: int
    until_s: float


@dataclass(eq=False)
class Waiter:
    """A queued request that would start from `entry`, or from what supersedes it."""

    entry: Entry | None

    def move(self, entry: Entry | None) -> None:
        if self.entry is not None:
            self.entry.awaited_by.remove(self)
        if entry is not None:
            entry.awaited_by.append(self)
        self.entry = entry


@dataclass(eq=False)
class Entry:
    parked: Parked
    owner: Owner
    """Under which the blocks are held."""
    leases: int = 0
    is_pinned: bool = False
    is_published: bool = True
    awaited_by: list[Waiter] = field(default_factory=list)
    history: History = field(default_factory=History)
    floor: float = 0.0
    """`Shelf.floor` when this entry was last used."""
    rating: Rating | None = None

    @property
    def may_go(self) -> bool:
        return self.is_published and not self.leases and not self.is_pinned and not self.awaited_by


class Shelf:
    """Parked conversations over one budget."""

    def __init__(
        self,
        config: StoreConfig,
        layout: StateLayout,
        hooks: SlabHooks | None,
        observer: Callable[[], None] | None,
    ) -> None:
        self.block_tokens = config.block_tokens
        self.is_opaque = layout.is_opaque
        self.budget = Budget(config.budget_bytes, observer)
        self.geometry = SlabGeometry.of(layout, config.block_tokens, config.slab_bytes, config.budget_bytes)
        self.slabs = SlabPool(self.geometry, self.budget, hooks)
        pool = SegmentPool if layout.is_opaque else BlockPool
        self.blocks: BlockPool = pool(layout, config.block_tokens, self.slabs, self.budget)
        self.checkpoints = CheckpointPool(layout, self.budget, hooks)
        self.index = PrefixIndex()
        self.entries: dict[ConversationId, Entry] = {}
        """Published entries, the most recently used last."""
        self.owned: dict[Owner, Entry] = {}
        """The same entries by owner."""
        self.fading: dict[Owner, Entry] = {}
        """Entries that were taken off while leased."""
        self.ghosts = Ghosts()
        self.floor = 0.0
        """The highest score that was evicted so far."""
        self.is_on_disk: Callable[[ConversationId], bool] = lambda _: False
        """Whether all of a conversation is also on disk."""

    @property
    def bytes_in_use(self) -> int:
        return self.slabs.used_slots * self.geometry.slot_bytes + self.budget.side_bytes

    def entry(self, conversation_id: ConversationId) -> Entry:
        """Raises ConversationGone."""
        entry = self.entries.get(conversation_id)
        if entry is None:
            raise ConversationGone(conversation_id)
        return entry

    def put(self, entry: Entry) -> None:
        """Publishes a conversation whose bytes are held by `entry.owner` and charged."""
        parked = entry.parked
        self.entries[parked.id] = self.owned[entry.owner] = entry
        self.index.add(parked.id, parked.key_digest, parked.prefix_hashes)

    def take_off(self, entry: Entry) -> None:
        """Makes a conversation invisible, and frees what only it holds once no lease is left."""
        parked = entry.parked
        del self.entries[parked.id], self.owned[entry.owner]
        self.index.remove(parked.id, parked.key_digest, parked.prefix_hashes)
        entry.is_published = False
        if entry.leases:
            self.fading[entry.owner] = entry
        else:
            self._free(entry)

    def used(self, entry: Entry, now_s: float) -> None:
        entry.parked = replace(entry.parked, last_used_s=now_s)
        entry.floor = self.floor
        entry.rating = None
        if entry.is_published:
            self.entries[entry.parked.id] = self.entries.pop(entry.parked.id)

    def lease(self, entry: Entry, now_s: float) -> Callable[[], None]:
        """Returns the function that ends the lease. Call it once."""
        entry.leases += 1
        entry.history = entry.history.forked(now_s - entry.parked.last_used_s)
        self.used(entry, now_s)

        def release() -> None:
            entry.leases -= 1
            if not entry.is_published and not entry.leases:
                del self.fading[entry.owner]
                self._free(entry)

        return release

    def prefixes_of(
        self, key_digest: bytes, units: Units, prefix_hashes: tuple[bytes, ...], known: Sequence[Entry] = ()
    ) -> list[Entry]:
        """All conversations of the key whose units are a prefix of `units`, or equal. Those in `known` are not compared
        again."""
        found = (self.entries[i] for i in self.index.ending_within(key_digest, prefix_hashes))
        return [entry for entry in found if entry in known or _is_prefix(entry.parked.units, units)]

    def metadata_bytes(self, parked: Parked) -> int:
        return conversation_metadata_bytes(parked.position, self.block_tokens)

    def rated(self, entry: Entry, policy: Policy, costs: Costs, now_s: float) -> Rating:
        """Rates the entry as it is now, and stores the rating in it."""
        parked, slots = entry.parked, self.blocks.exclusive(entry.owner)
        checkpoint_bytes = self._exclusive_checkpoint_bytes(parked) if parked.checkpoints else 0
        freed_bytes = self.blocks.exclusive_bytes(entry.owner, parked.blocks) + checkpoint_bytes
        tokens = min(len(parked.units), slots * self.block_tokens)
        if self.is_opaque and freed_bytes:
            tokens = len(parked.units)
        position, used_s = len(parked.units), parked.last_used_s
        candidate = Evictable(
            parked.id,
            position,
            freed_bytes,
            parked.parked_at_s,
            used_s,
            tokens,
            entry.history,
            entry.floor,
            self.is_on_disk(parked.id),
        )
        score = policy.score(candidate, costs, now_s)
        place = rank(candidate, score, is_superseded=False, is_partner=False)
        side_bytes = self.metadata_bytes(parked) + self.blocks.metadata_bytes(slots)
        side_bytes += freed_bytes - slots * self.geometry.slot_bytes
        until_s = now_s + policy.steady_s(entry.history, now_s - used_s)
        entry.rating = Rating(score, candidate, place, slots, side_bytes, until_s)
        return entry.rating

    def moved(self, conversation_id: ConversationId) -> None:
        """Called when a conversation comes to disk or leaves it, which changes what it is worth in memory."""
        entry = self.entries.get(conversation_id)
        if entry is not None:
            entry.rating = None

    def fits(self, need: Need, room: Room) -> bool:
        return self.geometry.fits(need, room)

    def room(self) -> Room:
        return self.slabs.room()

    def reserve(self, need: Need, checkpoints: int) -> None:
        """Makes `need` allocatable, which includes this many checkpoints. The caller has checked that it fits `room()`.
        Raises as `SlabPool.reserve` does."""
        need = self._beyond_idle(need, checkpoints)
        while self.checkpoints.idle > checkpoints:
            if self.fits(need, Room(self.slabs.free_slots, self.budget.free_bytes)):
                break
            self.checkpoints.give_back()
        self.slabs.reserve(need)

    def untouched_bytes(self, need: Need, checkpoints: int) -> int:
        """Bytes that `need`, with this many checkpoints, would take from the machine at least."""
        return self.slabs.untouched_bytes(self._beyond_idle(need, checkpoints))

    def grow_ahead(self) -> None:
        """Allocates the budget before it is needed. Raises OSError or MemoryError; what was allocated stays."""
        self.checkpoints.grow_ahead(self.budget.limit_bytes // CHECKPOINTS_AHEAD_SHARE)
        while self.slabs.grow_ahead():
            pass

    def _beyond_idle(self, need: Need, checkpoints: int) -> Need:
        """What remains of `need` once this many checkpoints have taken what idle buffers there are."""
        return Need(need.slots, need.side_bytes - self.checkpoints.reused_bytes(checkpoints))

    def most_room(self) -> tuple[Room, int]:
        """The room if everything that may go were evicted, and the bytes that would then be free, in single slots."""
        going = [entry for entry in self.entries.values() if entry.may_go]
        slots = self.blocks.slots_freed_with(entry.parked.blocks for entry in going)
        side_bytes = sum(self.metadata_bytes(entry.parked) for entry in going)
        side_bytes += self.blocks.side_bytes_freed_with(entry.parked.blocks for entry in going)
        side_bytes += self.checkpoints.bytes_freed_with(
            [checkpoint.id for checkpoint in entry.parked.checkpoints] for entry in going
        )
        in_use = self.bytes_in_use - len(slots) * self.geometry.slot_bytes - side_bytes
        return self.slabs.room(slots, side_bytes), self.budget.limit_bytes - in_use

    def close(self) -> None:
        """Frees all memory. There must be no entry left."""
        self.checkpoints.close()
        self.slabs.close()

    def _exclusive_checkpoint_bytes(self, parked: Parked) -> int:
        alone = [c.id for c in parked.checkpoints if self.checkpoints.owners(c.id) == 1]
        return sum(self.checkpoints.bytes_of(checkpoint_id) for checkpoint_id in alone)

    def _free(self, entry: Entry) -> None:
        parked = entry.parked
        self.blocks.release(entry.owner, parked.blocks)
        self.checkpoints.release(checkpoint.id for checkpoint in parked.checkpoints)
        self.budget.credit(Kind.METADATA, self.metadata_bytes(parked))


def _is_prefix(short: Units, long: Units) -> bool:
    return len(short) <= len(long) and bool(np.array_equal(short, long[: len(short)]))


def superseded(prefixes: Iterable[Entry], position: int, checkpoints: Iterable[int]) -> list[Entry]:
    """The prefixes that a conversation parked up to `position` with these checkpoints makes superfluous: wherever they
    can be resumed, it can be resumed too."""
    places = set(checkpoints)
    return [
        entry
        for entry in prefixes
        if entry.parked.position <= position and places.issuperset(c.position for c in entry.parked.checkpoints)
    ]
