"""The table of conversations: each once, with an optional place in RAM and an optional place on disk.

    Conversation  |-- InRam     blocks, checkpoints and metadata that are held and charged under one owner
                  |-- OnDisk    a manifest and the extents that it names

A conversation is in the table as long as it has a place. There is one index, and one rule for what is superseded; it
empties the place in RAM when what supersedes it is in RAM, and the place on disk when that is on disk.

A conversation that leaves RAM while it is leased is no longer there for anyone else, but keeps its bytes, which stay
charged, until the last lease ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from parkd.state import Recut
from parkd.store.blocks import BlockTable, Owner, StateKind
from parkd.store.budget import Kind, Room, conversation_metadata_bytes
from parkd.store.checkpoints import CheckpointTable
from parkd.store.disk import Disk, OnDisk
from parkd.store.disk_policy import Removable, next_removal
from parkd.store.files.disk_jobs import MarkJob
from parkd.store.files.manifest import Manifest
from parkd.store.history import Ghosts, GoneMemory, History
from parkd.store.index import PrefixIndex
from parkd.store.memory import Memory
from parkd.store.policy import Evictable, Rank
from parkd.store.records import ConversationGone, ConversationId, Name, Parked, ParkedCheckpoint, Tier, name_of
from parkd.types import Units

MARK_STEP_S = 300.0
"""How often last uses are written to disk: a crash loses about this much of them."""


@dataclass(frozen=True, slots=True, eq=False)
class Rating:
    """A policy's score of a conversation in RAM. Valid until `until_s`, or until it or what it shares changes."""

    score: float
    candidate: Evictable
    rank: Rank
    """Its place in the order of eviction, unless it is superseded or the other side of the switch."""
    freed_slots: int
    freed_side_bytes: int
    until_s: float


@dataclass(eq=False)
class Waiter:
    """A queued request that would start from a conversation in RAM, or from what supersedes it."""

    place: InRam | None

    def move(self, place: InRam | None) -> None:
        if self.place is not None:
            self.place.awaited_by.remove(self)
        if place is not None:
            place.awaited_by.append(self)
        self.place = place


@dataclass(eq=False)
class InRam:
    """A conversation's place in RAM."""

    parked: Parked
    """Whose blocks and checkpoints are held."""
    owner: Owner
    """Under which the blocks are held."""
    history: History = field(default_factory=History)
    leases: int = 0
    awaited_by: list[Waiter] = field(default_factory=list)
    floor: float = 0.0
    """`Conversations.floor` when it was last used."""
    rating: Rating | None = None


@dataclass(eq=False)
class Conversation:
    """A row of the table."""

    parked: Parked
    ram: InRam | None = None
    disk: OnDisk | None = None
    is_pinned: bool = False
    keepers: int = 0
    """Paused turns that go on from exactly this state."""
    source: Conversation | None = None
    """The conversation on disk of which this one, in RAM alone, is the beginning, or all of it in this layer split."""
    leaves_ram: bool = False
    """Its place in RAM is to be emptied as soon as all of it is on disk."""

    @property
    def id(self) -> ConversationId:
        return self.parked.id

    @property
    def is_on_disk(self) -> bool:
        """Whether all of it is on disk."""
        return (self.source or self).disk is not None

    @property
    def is_foreign(self) -> bool:
        """Whether the running model cannot use it."""
        return self.disk is not None and self.disk.is_foreign

    @property
    def may_leave_ram(self) -> bool:
        """Of a conversation that is in RAM."""
        assert self.ram is not None
        held = self.ram.leases or self.is_pinned or self.ram.awaited_by
        return not held and (self.is_on_disk or not self.keepers)

    @property
    def may_leave_disk(self) -> bool:
        """Of a conversation that is on disk. Where a paused turn needs it, the copy in memory must be left then."""
        assert self.disk is not None
        return not (self.disk.readers or self.is_pinned) and (self.ram is not None or not self.keepers)


class Conversations:
    """The table, over the tables of blocks and checkpoints."""

    def __init__(
        self,
        kind: StateKind,
        memory: Memory,
        blocks: BlockTable,
        checkpoints: CheckpointTable,
        disk: Disk,
        clock: Callable[[], float],
    ) -> None:
        self.kind = kind
        self.memory = memory
        self.blocks = blocks
        self.checkpoints = checkpoints
        self.disk = disk
        self.clock = clock
        self.in_ram: dict[ConversationId, Conversation] = {}
        """The most recently used last."""
        self.owned: dict[Owner, Conversation] = {}
        """The same by owner."""
        self.fading: dict[Owner, InRam] = {}
        """What left RAM while it was leased."""
        self.gone = GoneMemory()
        self.ghosts = Ghosts()
        self.floor = 0.0
        """The highest score that was evicted so far."""
        self._rows: dict[ConversationId, Conversation] = {}
        self._index = PrefixIndex()
        """Of conversations that the running model can use."""
        self._names: Counter[Name] = Counter()
        """Rows by name: one that grows has two until what it supersedes is gone."""

    # Look-up

    def get(self, conversation_id: ConversationId) -> Conversation | None:
        return self._rows.get(conversation_id)

    def known(self, conversation_id: ConversationId) -> Conversation:
        """Raises ConversationGone."""
        conversation = self._rows.get(conversation_id)
        if conversation is None:
            raise ConversationGone(conversation_id)
        return conversation

    def all(self) -> list[Conversation]:
        return list(self._rows.values())

    def on_disk(self) -> list[tuple[Conversation, OnDisk]]:
        return [(each, each.disk) for each in self._rows.values() if each.disk is not None]

    def find(self, key_digest: bytes, prefix_hashes: tuple[bytes, ...], limit: int) -> list[tuple[Conversation, int]]:
        """At most `limit` conversations of the key, each with the number of full blocks that it shares with the prompt:
        most shared first; among equals those in RAM first, then the latest."""
        found = dict(self._index.find(key_digest, prefix_hashes, limit, self.in_ram))
        found |= self._index.find(key_digest, prefix_hashes, limit)
        pairs = [(self._rows[conversation_id], shared) for conversation_id, shared in found.items()]
        pairs.sort(key=lambda pair: -pair[1])  # stable: what is in RAM stays before what is not
        return pairs[:limit]

    def find_in_ram(
        self, key_digest: bytes, prefix_hashes: tuple[bytes, ...], limit: int
    ) -> list[tuple[Conversation, int]]:
        """The same, only of those in RAM."""
        found = self._index.find(key_digest, prefix_hashes, limit, self.in_ram)
        return [(self._rows[conversation_id], shared) for conversation_id, shared in found]

    def prefixes_of(self, key_digest: bytes, units: Units, prefix_hashes: tuple[bytes, ...]) -> list[Conversation]:
        """All conversations of the key whose units are a prefix of `units`, or equal."""
        found = (self._rows[i] for i in self._index.ending_within(key_digest, prefix_hashes))
        return [each for each in found if _is_prefix(each.parked.units, units)]

    def named(self, name: Name) -> list[Conversation]:
        """The rows of a conversation, the longest first; empty if there is none of that name."""
        found = [each for each in self._rows.values() if name_of(each.id) == name] if name in self._names else []
        return sorted(found, key=lambda each: -each.parked.position)

    def continued(self, key_digest: bytes, units: Units, prefix_hashes: tuple[bytes, ...]) -> Name | None:
        """The name of the conversation that these units continue: every row of it is a prefix of them. None if there is
        none: two that go on differently from one point are two conversations, and the first of them keeps the name."""
        prefixes = self.prefixes_of(key_digest, units, prefix_hashes)
        within = Counter(name_of(each.id) for each in prefixes)
        whole = [each for each in prefixes if within[name_of(each.id)] == self._names[name_of(each.id)]]
        longest = max(whole, key=lambda each: each.parked.position, default=None)
        return None if longest is None else name_of(longest.id)

    # Use

    def used(self, conversation: Conversation) -> None:
        """Notes that a conversation, and with it the one that it is the beginning of, is used now."""
        now_s, ram = self.clock(), conversation.ram
        for each in (conversation, conversation.source):
            if each is not None:
                each.parked = replace(each.parked, last_used_s=now_s)
        if ram is not None:
            ram.floor, ram.rating = self.floor, None
            self.in_ram[conversation.id] = self.in_ram.pop(conversation.id)

    def lease(self, conversation: Conversation) -> Callable[[], None]:
        """Keeps the bytes in RAM for someone who continues from them. Returns the function that ends the lease; call it
        once."""
        ram = conversation.ram
        assert ram is not None
        ram.history = ram.history.forked(self.clock() - conversation.parked.last_used_s)
        self.used(conversation)
        return self.hold(conversation)

    def hold(self, conversation: Conversation) -> Callable[[], None]:
        """The same for a write to disk, which is no use of the conversation."""
        ram = conversation.ram
        assert ram is not None
        ram.leases += 1

        def release() -> None:
            ram.leases -= 1
            if not ram.leases and self.fading.pop(ram.owner, None) is not None:
                self._free(ram)

        return release

    # Places in RAM

    def enter_ram(self, conversation: Conversation, ram: InRam) -> None:
        """Publishes a conversation whose bytes are held by `ram.owner` and charged."""
        self._unlist(conversation)
        conversation.ram, conversation.parked = ram, ram.parked
        self._list(conversation)
        self.in_ram[conversation.id] = self.owned[ram.owner] = conversation

    def leave_ram(self, conversation: Conversation) -> None:
        """Empties the place in RAM: frees what only it holds once no lease is left."""
        ram = conversation.ram
        assert ram is not None
        del self.in_ram[conversation.id], self.owned[ram.owner]
        conversation.ram, conversation.source = None, None
        if conversation.disk is None:
            self._unlist(conversation)
        else:
            conversation.parked = replace(conversation.parked, tier=Tier.DISK)
        if ram.leases:
            self.fading[ram.owner] = ram
        else:
            self._free(ram)

    def forget_in_ram(self, conversation: Conversation, verb: str, reason: str) -> None:
        """Empties the place in RAM, and remembers why."""
        parked = conversation.parked
        self.gone.remember(parked.key_digest, parked.prefix_hashes, verb, reason, self.clock())
        self.leave_ram(conversation)

    def evict(self, conversation: Conversation, reason: str) -> None:
        """Makes room in RAM. What is also on disk is not gone."""
        if conversation.is_on_disk:
            self.leave_ram(conversation)
        else:
            self.forget_in_ram(conversation, "evicted", reason)

    def metadata_bytes(self, parked: Parked) -> int:
        return conversation_metadata_bytes(parked.position, self.kind.block_tokens)

    def most_room(self) -> tuple[Room, int]:
        """The room if everything that may go were evicted, and the bytes that would then be free, in single slots."""
        going = [each.parked for each in self.in_ram.values() if each.may_leave_ram]
        slots, side_bytes = self.blocks.freed_with(parked.blocks for parked in going)
        side_bytes += sum(map(self.metadata_bytes, going))
        side_bytes += self.checkpoints.bytes_freed_with([c.id for c in parked.checkpoints] for parked in going)
        memory = self.memory
        in_use = memory.bytes_in_use - len(slots) * memory.geometry.slot_bytes - side_bytes
        return memory.room(slots, side_bytes), memory.budget.limit_bytes - in_use

    # Places on disk

    def enter_disk(self, conversation: Conversation, manifest: Manifest, manifest_bytes: int) -> None:
        """Gives a conversation its place on disk, whose files are written and charged. One that left RAM meanwhile is
        back in the table."""
        conversation.disk = self.disk.add(manifest, manifest_bytes)
        conversation.source = None
        self.disk.place_blocks(manifest, conversation.disk)
        self.disk.place_checkpoints(manifest, {c.position: c.id for c in conversation.parked.checkpoints})
        if conversation.ram is None:
            conversation.parked = replace(conversation.parked, tier=Tier.DISK)
            self._list(conversation)
        else:
            conversation.ram.rating = None  # what it is worth in RAM has changed

    def found_on_disk(
        self,
        manifest: Manifest,
        manifest_bytes: int,
        parked: Parked,
        *,
        is_foreign: bool,
        recut: Recut | None = None,
    ) -> OnDisk:
        """Adds a conversation that an earlier process left, whose files are charged. What one names that is foreign, or
        of another layer split (`recut`), is entered in no table."""
        place = self.disk.add(manifest, manifest_bytes, is_foreign=is_foreign)
        place.recut = recut
        if recut is not None:
            parked = replace(parked, blocks=(), layout_digest=self.kind.layout.digest)  # as it will be once it is read
        elif not is_foreign:
            ids = self.disk.place_checkpoints(manifest, {})
            checkpoints = tuple(map(ParkedCheckpoint, (c.position for c in manifest.checkpoints), ids))
            parked = replace(parked, blocks=self.disk.place_blocks(manifest, place), checkpoints=checkpoints)
        self._list(Conversation(parked, disk=place))
        return place

    def leave_disk(self, conversation: Conversation, verb: str = "dropped", reason: str = "its file is gone") -> None:
        """Empties the place on disk. A state that stays in its file is gone with it, for which `reason` is told."""
        assert conversation.disk is not None
        if conversation.ram is None:
            self._unlist(conversation)
        self.disk.remove(conversation.disk)
        conversation.disk = None
        if conversation.ram is not None:
            conversation.ram.rating = None
            if self.kind.is_file:
                self.forget_in_ram(conversation, verb, reason)

    def leave_damaged(self, extent_id: int) -> list[Conversation]:
        """Empties the places on disk of all conversations that need a damaged extent, and returns them."""
        going = [each for each, disk in self.on_disk() if any(ref.id == extent_id for ref in disk.extents)]
        for each in going:
            self.leave_disk(each)
        self.disk.empty(extent_id)
        return going

    def next_marks(self, shift_s: float, *, stops: bool) -> MarkJob | None:
        """A job that writes down when conversations on disk were last used, if one is due; `stops`: the process ends,
        so all of them. `shift_s` is added to the clock to get seconds since the epoch."""
        step_s, times = 0.0 if stops else MARK_STEP_S, []
        for conversation, place in self.on_disk():
            used_s = conversation.parked.last_used_s
            if used_s > place.marked_s + step_s:
                place.marked_s = used_s
                times.append((place.name, used_s + shift_s))
        return MarkJob(tuple(times)) if times else None

    def make_disk_room(
        self, size: int, index_bytes: int, used_before_s: float, superseded: Sequence[Conversation] = ()
    ) -> bool:
        """Empties places on disk until `size` and `index_bytes` fit once the files are removed. False, with nothing
        changed, if that is impossible."""
        places = {each.id: disk for each, disk in self.on_disk()}
        removable = {
            name: Removable(name, self._rows[name].parked.last_used_s, disk.is_foreign, self._rows[name] in superseded)
            for name, disk in places.items()
            if self._rows[name].may_leave_disk
        }
        going: list[ConversationId] = []
        while not self.disk.fits_without((places[name] for name in going), size, index_bytes):
            chosen = next_removal(removable.values(), used_before_s)
            if chosen is None:
                return False
            going.append(removable.pop(chosen).id)
        for each in [self._rows[name] for name in going]:
            self.leave_disk(each, "evicted", "its room on disk was needed for another conversation")
            self.disk.evictions += each not in superseded
        return True

    def close(self) -> None:
        """Frees all memory."""
        for each in list(self.in_ram.values()):
            self.leave_ram(each)
        self.memory.close()

    def _list(self, conversation: Conversation) -> None:
        """Adds a row, as the latest."""
        parked = conversation.parked
        assert parked.id not in self._rows
        self._names[name_of(parked.id)] += 1
        self._rows[parked.id] = conversation
        if not conversation.is_foreign:
            self._index.add(parked.id, parked.key_digest, parked.prefix_hashes)

    def _unlist(self, conversation: Conversation) -> None:
        parked = conversation.parked
        if self._rows.pop(parked.id, None) is None:
            return
        name = name_of(parked.id)
        self._names[name] -= 1
        if not self._names[name]:
            del self._names[name]
        if not conversation.is_foreign:
            self._index.remove(parked.id, parked.key_digest, parked.prefix_hashes)

    def _free(self, ram: InRam) -> None:
        self.blocks.release(ram.owner, ram.parked.blocks)
        self.checkpoints.release(checkpoint.id for checkpoint in ram.parked.checkpoints)
        self.memory.budget.credit(Kind.METADATA, self.metadata_bytes(ram.parked))


def _is_prefix(short: Units, long: Units) -> bool:
    return bool(np.array_equal(short, long[: len(short)]))


def superseded(prefixes: Iterable[Conversation], checkpoints: Iterable[int]) -> list[Conversation]:
    """Those of its prefixes that a conversation with these checkpoints makes superfluous: wherever they can be resumed,
    it can be resumed too. A paused turn needs its own: the same tokens computed again need not give the same bits."""
    places = set(checkpoints)
    usable = (each for each in prefixes if not each.keepers)
    return [each for each in usable if places.issuperset(c.position for c in each.parked.checkpoints)]
