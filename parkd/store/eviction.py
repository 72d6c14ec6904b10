"""The order in which conversations are evicted for one capture.

Ratings are reused from capture to capture, for as long as the policy allows. An eviction changes only the ratings of
conversations that shared blocks with the evicted one, so only these are rated again. The order is a heap in which
outdated entries are skipped.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

from parkd.state import Costs
from parkd.store.blocks import Owner
from parkd.store.budget import BLOCK_BYTES
from parkd.store.conversations import Conversation, Conversations, InRam, Rating
from parkd.store.policy import Evictable, Policy, Rank, rank


@dataclass(frozen=True, slots=True)
class Toll:
    """What would be evicted for a capture, estimated without evicting."""

    most_score: float
    """The highest score among them, except those that are superseded or free nothing; -inf if there are none."""
    count: int


def rated(
    table: Conversations, conversation: Conversation, ram: InRam, policy: Policy, costs: Costs, now_s: float
) -> Rating:
    """Rates a conversation in RAM as it is now, and keeps the rating."""
    parked, freed = conversation.parked, table.blocks.freed_by(ram.owner, conversation.parked.blocks)
    outside_bytes = freed.outside_bytes + table.checkpoints.bytes_freed_by(c.id for c in parked.checkpoints)
    freed_bytes = freed.slots * table.memory.geometry.slot_bytes + outside_bytes
    position, used_s = len(parked.units), parked.last_used_s
    is_cut = not (table.kind.is_whole and freed_bytes)
    candidate = Evictable(
        parked.id,
        position,
        freed_bytes,
        parked.parked_at_s,
        used_s,
        min(position, freed.slots * table.kind.block_tokens) if is_cut else position,
        ram.history,
        ram.floor,
        conversation.is_on_disk,
    )
    score = policy.score(candidate, costs, now_s)
    place = rank(candidate, score, is_superseded=False, is_partner=False)
    side_bytes = table.metadata_bytes(parked) + freed.blocks * BLOCK_BYTES + outside_bytes
    until_s = now_s + policy.steady_s(ram.history, now_s - used_s)
    ram.rating = Rating(score, candidate, place, freed.slots, side_bytes, until_s)
    return ram.rating


class Queue:
    """Candidates for eviction in order. Valid as long as conversations are only removed."""

    def __init__(
        self,
        table: Conversations,
        policy: Policy,
        costs: Costs,
        now_s: float,
        *,
        family: Iterable[Conversation],
        superseded: Iterable[Conversation],
    ) -> None:
        """`family` are the ancestors of the conversation that needs the room; it will replace those in `superseded`."""
        self._table, self._policy, self._costs, self.now_s = table, policy, costs, now_s
        self._superseded = {each.ram.owner for each in superseded if each.ram is not None}
        kin = {each.id for each in family}
        # The most recently used conversation that is no ancestor is the other side of the switch.
        partner = next((each.ram for each in reversed(table.in_ram.values()) if each.id not in kin), None)
        self._partner = 0 if partner is None else partner.owner
        self._places: dict[Owner, Rank] = {}
        self._numbers = count(1)
        self.freed_slots = self.freed_side_bytes = 0
        """Least that evicting all of them frees: blocks that they share among themselves are not counted."""
        self._forget_changed()
        self._heap = self._all_placed()
        self.freed_slots = sum(rating.freed_slots for *_, rating in self._heap)
        self.freed_side_bytes = sum(rating.freed_side_bytes for *_, rating in self._heap)
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._places)

    def pop(self) -> Conversation:
        """The next to evict. The caller evicts it before it calls this again. Raises IndexError if none is left."""
        for owner in self._forget_changed():
            if owner in self._places:
                heapq.heappush(self._heap, self._placed(owner, self._table.owned[owner]))
        while True:
            place, owner, _, rating = heapq.heappop(self._heap)
            if self._places.get(owner) == place:
                del self._places[owner]
                if owner not in self._table.owned:
                    continue  # it is gone already, because its file was removed to make room on disk
                if rating.candidate.freed_bytes and owner not in self._superseded:
                    self._table.floor = max(self._table.floor, place[2])
                return self._table.owned[owner]

    def foresee(self, wanted_bytes: int, wanted_count: int) -> Toll:
        """What would be evicted to free so many bytes and conversations, before anything is. Ignores that evictions
        change what others share, so it may name one too many, but never too few."""
        freed, going, most = 0, 0, float("-inf")
        heap = self._heap.copy()
        while heap and (freed < wanted_bytes or going < wanted_count):
            place, owner, _, rating = heapq.heappop(heap)
            freed += rating.candidate.freed_bytes
            going += 1
            if rating.candidate.freed_bytes and owner not in self._superseded:
                most = max(most, place[2])
        return Toll(most, going)

    def _forget_changed(self) -> list[Owner]:
        """Drops the ratings of conversations whose shared blocks have changed, and returns their owners."""
        owned = self._table.owned
        changed = [owner for owner in self._table.blocks.take_changed() if owner in owned]
        for owner in changed:
            ram = owned[owner].ram
            assert ram is not None
            ram.rating = None
        return changed

    def _all_placed(self) -> list[tuple[Rank, Owner, int, Rating]]:
        """`_placed` of all candidates. There may be thousands, and most ratings are still valid: these are used
        inline."""
        special, now_s, places = {self._partner, *self._superseded}, self.now_s, self._places
        heap = []
        for owner, conversation in self._table.owned.items():
            if not conversation.may_leave_ram:
                continue
            assert conversation.ram is not None
            rating = conversation.ram.rating
            if rating is None or rating.until_s < now_s or owner in special:
                heap.append(self._placed(owner, conversation))
            else:
                places[owner] = rating.rank
                heap.append((rating.rank, owner, 0, rating))
        return heap

    def _placed(self, owner: Owner, conversation: Conversation) -> tuple[Rank, Owner, int, Rating]:
        """The heap entry of a candidate. The number tells equal ratings of one conversation apart."""
        ram = conversation.ram
        assert ram is not None
        rating = ram.rating
        if rating is None or rating.until_s < self.now_s:
            rating = rated(self._table, conversation, ram, self._policy, self._costs, self.now_s)
        place = rating.rank
        if owner == self._partner or owner in self._superseded:
            is_superseded, is_partner = owner in self._superseded, owner == self._partner
            place = rank(rating.candidate, rating.score, is_superseded=is_superseded, is_partner=is_partner)
        self._places[owner] = place
        return place, owner, next(self._numbers), rating
