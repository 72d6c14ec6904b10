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
from parkd.store.policy import Policy, Rank, rank
from parkd.store.shelf import Entry, Rating, Shelf


@dataclass(frozen=True, slots=True)
class Toll:
    """What would be evicted for a capture, estimated without evicting."""

    most_score: float
    """The highest score among them, except those that are superseded or free nothing; -inf if there are none."""
    count: int


class Queue:
    """Candidates for eviction in order. Valid as long as conversations are only removed."""

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
        """`family` are the ancestors of the conversation that needs the room; it will replace those in `superseded`."""
        self._shelf, self._policy, self._costs, self.now_s = shelf, policy, costs, now_s
        self._superseded = {entry.owner for entry in superseded}
        kin = {entry.owner for entry in family}
        # The most recently used conversation that is no ancestor is the other side of the switch.
        self._partner = next(
            (owner for entry in reversed(shelf.entries.values()) if (owner := entry.owner) not in kin), 0
        )
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

    def pop(self) -> Entry:
        """The next to evict. The caller evicts it before it calls this again. Raises IndexError if none is left."""
        for entry in self._forget_changed():
            if entry.owner in self._places:
                heapq.heappush(self._heap, self._placed(entry))
        while True:
            place, owner, _, rating = heapq.heappop(self._heap)
            if self._places.get(owner) == place:
                del self._places[owner]
                if owner not in self._shelf.owned:
                    continue  # it is gone already, because its file was removed to make room on disk
                if rating.candidate.freed_bytes and owner not in self._superseded:
                    self._shelf.floor = max(self._shelf.floor, place[2])
                return self._shelf.owned[owner]

    def foresee(self, wanted_bytes: int, wanted_count: int) -> Toll:
        """What would be evicted to free so many bytes and conversations. Ignores that evictions change what others
        share, so it may name one too many, but never too few."""
        freed, going, most = 0, 0, float("-inf")
        heap = self._heap.copy()
        while heap and (freed < wanted_bytes or going < wanted_count):
            place, owner, _, rating = heapq.heappop(heap)
            if self._places.get(owner) != place:
                continue
            freed += rating.candidate.freed_bytes
            going += 1
            if rating.candidate.freed_bytes and owner not in self._superseded:
                most = max(most, place[2])
        return Toll(most, going)

    def _forget_changed(self) -> list[Entry]:
        """Drops the ratings of conversations whose shared blocks have changed, and returns these."""
        changed = [self._shelf.owned.get(owner) for owner in self._shelf.blocks.take_changed()]
        entries = [entry for entry in changed if entry is not None]
        for entry in entries:
            entry.rating = None
        return entries

    def _all_placed(self) -> list[tuple[Rank, Owner, int, Rating]]:
        """`_placed` of all candidates. There may be thousands, and most ratings are still valid: these are used
        inline."""
        special, now_s, places = {self._partner, *self._superseded}, self.now_s, self._places
        heap = []
        for owner, entry in self._shelf.owned.items():
            if entry.leases or entry.is_pinned or entry.awaited_by or not entry.is_published:
                continue
            rating = entry.rating
            if rating is None or rating.until_s < now_s or owner in special:
                heap.append(self._placed(entry))
            else:
                places[owner] = rating.place
                heap.append((rating.place, owner, 0, rating))
        return heap

    def _placed(self, entry: Entry) -> tuple[Rank, Owner, int, Rating]:
        """The heap entry of a candidate. The number tells equal ratings of one conversation apart."""
        rating, owner = entry.rating, entry.owner
        if rating is None or rating.until_s < self.now_s:
            rating = self._shelf.rated(entry, self._policy, self._costs, self.now_s)
        place = rating.place
        if owner == self._partner or owner in self._superseded:
            is_superseded, is_partner = owner in self._superseded, owner == self._partner
            place = rank(rating.candidate, rating.score, is_superseded=is_superseded, is_partner=is_partner)
        self._places[owner] = place
        return place, owner, next(self._numbers), rating
