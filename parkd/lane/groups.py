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
HASHES_LIMIT = 64 * 1024
"""Prefix hashes over all members of all groups: of long conversations, fewer groups are remembered."""
HASH_BYTES = 72
"""Bytes of a hash and of its place in a tuple."""


class Groups:
    """Used only by the lane, like the store. A member is identified by the hashes of its full blocks."""

    def __init__(self, store: ConversationStore) -> None:
        self._store = store
        self._groups: OrderedDict[tuple[bytes, str], OrderedDict[tuple[bytes, ...], None]] = OrderedDict()
        self._hashes = 0
        """Over all members."""

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the remembered hashes: at most those of HASHES_LIMIT, or of one conversation that has more."""
        return self._hashes * HASH_BYTES

    def used(self, group: str, prompt: PromptIdentity) -> None:
        """Notes that a turn of the group ran. Call it before the turn is parked, so that its own conversation is the
        most recently used."""
        key_digest, hashes = prompt.key.digest, prompt.prefix_hashes
        if not hashes:
            return
        members = self._groups.pop((key_digest, group), OrderedDict())
        self._hashes -= sum(map(len, members))
        for earlier in [member for member in members if member == hashes[: len(member)]]:
            del members[earlier]  # an earlier turn of this conversation, or a prefix that it continues
        for member in members:
            self._touch(key_digest, member)
        members[hashes] = None
        while len(members) > 1 and (len(members) > MEMBERS_LIMIT or sum(map(len, members)) > HASHES_LIMIT):
            members.popitem(last=False)
        self._groups[key_digest, group] = members
        self._hashes += sum(map(len, members))
        while len(self._groups) > 1 and (len(self._groups) > GROUPS_LIMIT or self._hashes > HASHES_LIMIT):
            _, gone = self._groups.popitem(last=False)
            self._hashes -= sum(map(len, gone))

    def _touch(self, key_digest: bytes, hashes: tuple[bytes, ...]) -> None:
        for parked, shared in self._store.candidates(key_digest, hashes):
            if shared == len(hashes):
                try:
                    self._store.touch(parked.id)
                except ConversationGone:
                    continue
