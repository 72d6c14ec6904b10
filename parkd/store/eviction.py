"""The order in which conversations go for one capture.

Everything that may go is rated once. An eviction changes the rating of those only whose blocks it left them alone with,
so only these are rated again: a heap with outdated places that are skipped when they come up.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from parkd.store.policy import Costs, Evictable, Policy, Rank, rank
from parkd.store.records import ConversationId
from parkd.store.shelf import Entry, Shelf


@dataclass(frozen=True, slots=True)
class Toll:
    """What a plan would evict, foreseen without evicting."""

    most_score: float
    """The highest score among them, without those that are superseded or free nothing; -inf when there are none."""
    count: int


class Queue:
    """Candidates for eviction, first to go first. Valid until something other than its own victims changes."""

    def __init__(
        self,
        shelf: Shelf,
        policy: Policy,
        costs: Costs,
        now_s: float,
        *,
        family: Iterable[Entry],
        superseded: Iterable[Entry],
    ) -> None:
        """`family` are the ancestors of the conversation that room is made for; it will replace those `superseded`."""
        self._shelf, self._policy, self._costs, self.now_s = shelf, policy, costs, now_s
        self._superseded = {entry.owner for entry in superseded}
        self._ids = {entry.owner: entry.parked.id for entry in shelf.entries.values() if entry.may_go}
        shelf.blocks.take_left_alone()
        rated = [shelf.rated(shelf.entries[i], owner in self._superseded) for owner, i in self._ids.items()]
        kin = {entry.parked.id for entry in family}
        others = [candidate for candidate in rated if candidate.id not in kin]
        # Whoever was of use last, and is no ancestor, left the arenas for the one that is parked now.
        self._partner = max(others, key=lambda other: other.last_used_s).id if others else None
        self._places: dict[ConversationId, Rank] = {}
        self._heap = [self._placed(candidate) for candidate in rated]
        heapq.heapify(self._heap)
        self.freed_slots = sum(shelf.blocks.exclusive(owner) for owner in self._ids)
        """Slots that are free once all have gone, at least: what only two of them share is not counted."""

    def __len__(self) -> int:
        return len(self._places)

    def pop(self) -> Entry:
        """The next to go; the caller evicts it before it asks again. Raises IndexError when nobody is left."""
        for owner in self._shelf.blocks.take_left_alone():
            conversation_id = self._ids.get(owner)
            if conversation_id in self._places:
                entry = self._shelf.entries[conversation_id]
                heapq.heappush(self._heap, self._placed(self._shelf.rated(entry, owner in self._superseded)))
        while True:
            place, conversation_id, candidate = heapq.heappop(self._heap)
            if self._places.get(conversation_id) == place:
                del self._places[conversation_id]
                if candidate.freed_bytes and not candidate.is_superseded:
                    self._shelf.floor = max(self._shelf.floor, place[2])
                return self._shelf.entries[conversation_id]

    def foresee(self, wanted_bytes: int, wanted_count: int) -> Toll:
        """Who would go until so many bytes and conversations are free. Sharing is not followed through, so it may name
        one too many, never one too few."""
        freed, count, most = 0, 0, float("-inf")
        for place, conversation_id, candidate in sorted(self._heap):
            if freed >= wanted_bytes and count >= wanted_count:
                break
            if self._places.get(conversation_id) != place:
                continue
            freed += candidate.freed_bytes
            count += 1
            if candidate.freed_bytes and not candidate.is_superseded:
                most = max(most, place[2])
        return Toll(most, count)

    def _placed(self, candidate: Evictable) -> tuple[Rank, ConversationId, Evictable]:
        is_partner = candidate.id == self._partner
        place = rank(candidate, self._policy, self._costs, self.now_s, is_partner=is_partner)
        self._places[candidate.id] = place
        return place, candidate.id, candidate
