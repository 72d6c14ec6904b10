"""Conversations that belong together by their clients' word (`prompt_cache_key`): while one of them is used, the others
count as used too, so that an agent's main conversation is not evicted while its sub-agents work.

A hint: it moves who goes first when room is short, and never what may be reused. A group is known under the key of its
members alone, so nobody's hint reaches another's conversations.
"""

from __future__ import annotations

from collections import OrderedDict

from parkd.store.records import ConversationGone
from parkd.store.store import ConversationStore
from parkd.types import PromptIdentity

GROUPS_LIMIT = 64
MEMBERS_LIMIT = 16
"""Of one group; those used longest ago leave it."""


class Groups:
    """Owned by the lane's turn, like the store. A member is known by the hashes of its full blocks."""

    def __init__(self, store: ConversationStore) -> None:
        self._store = store
        self._groups: OrderedDict[tuple[bytes, str], OrderedDict[tuple[bytes, ...], None]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._groups)

    def used(self, group: str, prompt: PromptIdentity) -> None:
        """A turn of the group ran. To be called before its conversation is parked, which then is the latest used."""
        key_digest, hashes = prompt.key.digest, prompt.prefix_hashes
        if not hashes:
            return
        members = self._groups.pop((key_digest, group), OrderedDict())
        for earlier in [member for member in members if member == hashes[: len(member)]]:
            del members[earlier]  # an earlier turn of this conversation, or a head that it goes on from
        for member in members:
            self._touch(key_digest, member)
        members[hashes] = None
        while len(members) > MEMBERS_LIMIT:
            members.popitem(last=False)
        self._groups[key_digest, group] = members
        while len(self._groups) > GROUPS_LIMIT:
            self._groups.popitem(last=False)

    def _touch(self, key_digest: bytes, hashes: tuple[bytes, ...]) -> None:
        for parked, shared in self._store.candidates(key_digest, hashes):
            if shared == len(hashes):
                try:
                    self._store.touch(parked.id)
                except ConversationGone:
                    continue
