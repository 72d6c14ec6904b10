"""Pins what clients asked to keep, until a deadline and within a share of the budget.

A `cache_control` with a ttl asks for a minimum life. It is a hint: pins take at most PINNED_SHARE of the budget, the
newest requests first, so that no client keeps others from being parked.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from parkd.store.records import ConversationGone, ConversationId, Parked
from parkd.store.store import ConversationStore
from parkd.types import PromptIdentity

PINNED_SHARE = 0.5
WISHES_LIMIT = 32
"""Most wishes that are remembered; each holds the hashes of a prompt."""


@dataclass(frozen=True, slots=True)
class _Wish:
    """A request to keep the conversations that share a prompt's full blocks."""

    key_digest: bytes
    hashes: tuple[bytes, ...]
    until_s: float


class Retention:
    """Pins conversations by wishes. Used only by the lane, like the store. A conversation that grows stays pinned,
    since a wish names its beginning."""

    def __init__(self, store: ConversationStore) -> None:
        self._store = store
        self._wishes: deque[_Wish] = deque(maxlen=WISHES_LIMIT)
        self._pinned: set[ConversationId] = set()

    @property
    def pinned(self) -> frozenset[ConversationId]:
        return frozenset(self._pinned)

    def wish(self, prompt: PromptIdentity, keep_s: float, now_s: float) -> None:
        """Requests that what is parked of this prompt, now or later, is kept for `keep_s`. Ignored for a prompt shorter
        than one block."""
        key_digest, hashes = prompt.key.digest, prompt.prefix_hashes
        if not hashes:
            return
        until_s = now_s + keep_s
        for earlier in [wish for wish in self._wishes if wish.key_digest == key_digest]:
            if earlier.hashes[-1] in hashes:  # the same conversation, an earlier turn
                self._wishes.remove(earlier)
                until_s = max(until_s, earlier.until_s)
        self._wishes.append(_Wish(key_digest, hashes, until_s))

    def apply(self, now_s: float) -> None:
        """Pins parked conversations that wishes ask for, and unpins those whose wishes have expired."""
        if not self._wishes and not self._pinned:
            return
        room = self._store.config.budget_bytes * PINNED_SHARE
        wanted: set[ConversationId] = set()
        ended: set[ConversationId] = set()
        for wish in reversed(list(self._wishes)):
            found = [parked for parked, shared in self._named(wish) if shared == len(wish.hashes)]
            if wish.until_s <= now_s:
                self._wishes.remove(wish)
                ended.update(parked.id for parked in found)
                continue
            longest = max(found, key=lambda parked: parked.position, default=None)
            if longest is None or longest.id in wanted:
                continue
            room -= longest.position * self._store.layout.row_bytes
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

    def _named(self, wish: _Wish) -> list[tuple[Parked, int]]:
        return self._store.candidates(wish.key_digest, wish.hashes)
