"""Pins what clients asked to keep, until a deadline and within a share of the budget.

A `cache_control` with a ttl asks for a minimum life. It is a hint: pins take at most PINNED_SHARE of the budget, the
newest requests of each key first, so that no client keeps others from being parked. A conversation can also be kept by
its name: such pins take from the same share, before the hints, and one that finds no room is refused. Of several keys
one keeps so at most half of what all may.

Keys that share a namespace wish for themselves: none ends or replaces what another asked for, and what several keep is
kept for the longest.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from parkd.errors import Conflict
from parkd.store.budget import mib
from parkd.store.records import ConversationGone, ConversationId, Name, Parked
from parkd.store.store import ConversationStore
from parkd.types import PromptIdentity

PINNED_SHARE = 0.5
WISHES_LIMIT = 32
"""Most wishes of one key that are remembered; each holds the hashes of a prompt."""
KEPT_LIMIT = 256
"""Most conversations that are kept by name."""
OWNER_SHARE = 0.5
"""Of these limits, what one of several keys may take."""


@dataclass(frozen=True, slots=True)
class _Wish:
    """A request to keep the conversations that share a prompt's full blocks."""

    owner: str
    key_digest: bytes
    hashes: tuple[bytes, ...]
    until_s: float


class Retention:
    """Pins conversations by wishes. Used only by the lane, like the store. A conversation that grows stays pinned,
    since a wish names its beginning."""

    def __init__(self, store: ConversationStore, *, owners: int = 1) -> None:
        """If there are several `owners`, one of them keeps by name at most half of what all may keep."""
        self._store = store
        self._owner_share = 1.0 if owners <= 1 else OWNER_SHARE
        self._wishes: list[_Wish] = []
        """The oldest first; of each key at most WISHES_LIMIT."""
        self._pinned: set[ConversationId] = set()
        self._kept: dict[Name, dict[str, float]] = {}
        """Until when each is kept, by the key that asked for it, the oldest wish first; infinite: until it is
        unpinned."""

    @property
    def pinned(self) -> frozenset[ConversationId]:
        return frozenset(self._pinned)

    def wish(self, prompt: PromptIdentity, keep_s: float, now_s: float, owner: str = "") -> None:
        """Requests for a key that what is parked of this prompt, now or later, is kept for `keep_s`. Ignored for a
        prompt shorter than one block."""
        key_digest, hashes = prompt.key.digest, prompt.prefix_hashes
        if not hashes:
            return
        until_s = now_s + keep_s
        own = [wish for wish in self._wishes if wish.owner == owner]
        for earlier in [wish for wish in own if wish.key_digest == key_digest]:
            if earlier.hashes[-1] in hashes:  # the same conversation, an earlier turn
                self._wishes.remove(earlier)
                until_s = max(until_s, earlier.until_s)
                own.remove(earlier)
        if len(own) >= WISHES_LIMIT:
            self._wishes.remove(own[0])
        self._wishes.append(_Wish(owner, key_digest, hashes, until_s))

    def keep(self, name: Name, until_s: float, now_s: float, owner: str = "") -> None:
        """Keeps a conversation by its name for a key, and whatever it grows to, while there is room for it. Raises
        Conflict if there is none, and ConversationGone."""
        rows = self._store.named(name)
        if not rows:
            raise ConversationGone(name)
        self._end(now_s)
        others = [other for other in self._kept if other != name]
        own = [other for other in others if owner in self._kept[other]]
        self._check_room(own, rows, self._owner_share, " for one key")
        self._check_room(others, rows, 1.0, "")
        wishes = self._kept.pop(name, {})
        self._kept[name] = {**wishes, owner: until_s}
        self.apply(now_s)

    def _check_room(self, others: Sequence[Name], rows: Sequence[Parked], share: float, for_whom: str) -> None:
        """Raises Conflict if these cannot be kept beside `others`, with `share` of what all may keep."""
        part, most = PINNED_SHARE * share, int(KEPT_LIMIT * share)
        for_whom = "" if share == 1 else for_whom
        limit = self._store.config.budget_bytes * part
        taken = sum(self._bytes(self._store.named(other)) for other in others)
        if taken + self._bytes(rows) > limit:
            raise Conflict(
                f"Kept conversations may take {mib(int(limit))}{for_whom}, {part:.0%} of the memory for parked ones. "
                f"{mib(taken)} are taken and this one needs {mib(self._bytes(rows))}. Unpin another, or start parkd "
                "with a larger --conversation-cache-mib."
            )
        if len(others) >= most:
            raise Conflict(f"{most} conversations are kept, which is the most{for_whom}. Unpin another.")

    def let_go(self, name: Name, now_s: float, owner: str | None = None) -> None:
        """Ends a key's wishes to keep a conversation, those of its requests too; None: those of all keys."""
        kept = self._kept.get(name, {})
        for one in list(kept) if owner is None else [owner]:
            kept.pop(one, None)
        if not kept:
            self._kept.pop(name, None)
        ids = {parked.id for parked in self._store.named(name)}
        for wish in list(self._wishes):
            if owner in (None, wish.owner) and self._is_for(wish, ids):
                self._wishes.remove(wish)
        self.apply(now_s)
        for conversation_id in ids - self._pinned:
            self._store.unpin(conversation_id)

    def kept_until_s(self, name: Name, owner: str | None = None) -> float | None:
        """Until when a conversation is kept by name for a key; infinite if nothing ends it, None if it is not. Without
        an owner: for any."""
        kept = self._kept.get(name, {})
        return max((until_s for one, until_s in kept.items() if owner in (None, one)), default=None)

    def is_wanted_by(self, name: Name, owner: str) -> bool:
        """Whether a key asked to keep a conversation, by its name or in a request."""
        ids = {parked.id for parked in self._store.named(name)}
        wishes = (wish for wish in self._wishes if wish.owner == owner)
        return owner in self._kept.get(name, {}) or any(self._is_for(wish, ids) for wish in wishes)

    def apply(self, now_s: float) -> None:
        """Pins parked conversations that wishes ask for, and unpins those whose wishes have expired."""
        if not self._wishes and not self._pinned and not self._kept:
            return
        room = self._store.config.budget_bytes * PINNED_SHARE
        own_room = room * self._owner_share
        shares: dict[str, float] = defaultdict(lambda: own_room)
        wanted: set[ConversationId] = set()
        ended: set[ConversationId] = self._end(now_s)
        for name, kept in self._kept.items():
            rows = self._store.named(name)
            size = self._bytes(rows)
            if size > room or all(size > shares[owner] for owner in kept):
                ended.update(parked.id for parked in rows)  # It has grown too long: later ones may fit.
                continue
            wanted.update(parked.id for parked in rows)
            room -= size
            for owner in kept:
                shares[owner] -= size
        for wish in self._in_turn():
            found = [parked for parked, shared in self._named(wish) if shared == len(wish.hashes)]
            if wish.until_s <= now_s:
                self._wishes.remove(wish)
                ended.update(parked.id for parked in found)
                continue
            longest = max(found, key=lambda parked: parked.position, default=None)
            if longest is None or longest.id in wanted:
                continue
            room -= self._bytes([longest])
            if room < 0:
                ended.add(longest.id)  # It may be pinned from when there was room, or in place of an ancestor.
            else:
                wanted.add(longest.id)
        for conversation_id in (self._pinned | ended) - wanted:
            try:
                self._store.unpin(conversation_id)
            except ConversationGone:
                continue
        for conversation_id in wanted:
            self._store.pin(conversation_id)
        self._pinned = wanted

    def _end(self, now_s: float) -> set[ConversationId]:
        """Ends what was kept until now, or is no longer parked. Returns the ids."""
        ended: set[ConversationId] = set()
        for name, kept in list(self._kept.items()):
            rows = self._store.named(name)
            for owner in [owner for owner, until_s in kept.items() if until_s <= now_s or not rows]:
                del kept[owner]
            if not kept:
                ended.update(parked.id for parked in rows)
                del self._kept[name]
        return ended

    def _in_turn(self) -> list[_Wish]:
        """The newest wish of each key, then the second newest of each, and so on."""
        before: Counter[str] = Counter()
        turns = []
        for at, wish in enumerate(reversed(self._wishes)):
            turns.append((before[wish.owner], at, wish))
            before[wish.owner] += 1
        return [wish for _, _, wish in sorted(turns, key=lambda turn: turn[:2])]

    def _is_for(self, wish: _Wish, ids: set[ConversationId]) -> bool:
        """Whether a wish keeps one of these conversations."""
        return any(parked.id in ids and shared == len(wish.hashes) for parked, shared in self._named(wish))

    def _bytes(self, rows: Sequence[Parked]) -> int:
        """Of the longest: the others are its beginnings."""
        return max((parked.position for parked in rows), default=0) * self._store.layout.row_bytes

    def _named(self, wish: _Wish) -> list[tuple[Parked, int]]:
        return self._store.candidates(wish.key_digest, wish.hashes)
