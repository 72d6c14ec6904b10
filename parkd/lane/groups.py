"""Groups of conversations that clients declare with `prompt_cache_key`: use of one counts as use of all, so that an
agent's main conversation is not evicted while its sub-agents work.

A hint: it changes what is evicted first, never what may be reused. Groups are separate for each key, so no client's
hint reaches another's conversations.
"""

from __future__ import annotations

from collections import OrderedDict

from parkd.store.records import ConversationGone
from parkd.store.store import ConversationStore
from parkd.types import PromptIdentity

GROUPS_LIMIT = 64
MEMBERS_LIMIT = 16
"""Conversations in one group; the least recently used leave it."""


class Groups:
    """Used only by the lane, like the store. A member is identified by the hashes of its full blocks."""

    def __init__(self, store: ConversationStore) -> None:
        self._store = store
        self._groups: OrderedDict[tuple[bytes, str], OrderedDict[tuple[bytes, ...], None]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._groups)

    def used(self, group: str, prompt: PromptIdentity) -> None:
        """Notes that a turn of the group ran. Call it before the turn is parked, so that its own conversation is the
        most recently used."""
        key_digest, hashes = prompt.key.digest, prompt.prefix_hashes
        if not hashes:
            return
        members = self._groups.pop((key_digest, group), OrderedDict())
        for earlier in [member for member in members if member == hashes[: len(member)]]:
            del members[earlier]  # an earlier turn of this conversation, or a prefix that it continues
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
