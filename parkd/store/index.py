"""From a prompt's key and prefix hashes to the conversations that may share its head.

A conversation's path is its key digest (the hash of the empty prefix) and one hash a full block. Hashes find,
comparison of units decides: under colliding hashes an answer may name too many, never too few.
"""

from __future__ import annotations

from parkd.store.records import ConversationId

Ids = dict[ConversationId, None]
"""An ordered set: the latest is last."""


class _KeyIndex:
    def __init__(self) -> None:
        self.holders: dict[bytes, Ids] = {}
        """Hash -> who has it anywhere in the path."""
        self.enders: dict[bytes, Ids] = {}
        """Hash -> whose path ends with it."""


class PrefixIndex:
    """Exact on paths; says nothing about units."""

    def __init__(self) -> None:
        self._keys: dict[bytes, _KeyIndex] = {}

    def add(self, conversation_id: ConversationId, key_digest: bytes, hashes: tuple[bytes, ...]) -> None:
        index = self._keys.setdefault(key_digest, _KeyIndex())
        path = (key_digest, *hashes)
        holders = index.holders
        for prefix_hash in path:
            ids = holders.get(prefix_hash)
            if ids is None:
                holders[prefix_hash] = {conversation_id: None}
            else:
                ids[conversation_id] = None
        index.enders.setdefault(path[-1], {})[conversation_id] = None

    def remove(self, conversation_id: ConversationId, key_digest: bytes, hashes: tuple[bytes, ...]) -> None:
        index = self._keys[key_digest]
        path = (key_digest, *hashes)
        holders = index.holders
        for prefix_hash in set(path):
            ids = holders[prefix_hash]
            if len(ids) == 1:
                del holders[prefix_hash]
            else:
                del ids[conversation_id]
        last = index.enders[path[-1]]
        del last[conversation_id]
        if not last:
            del index.enders[path[-1]]
        if not holders:
            del self._keys[key_digest]

    def find(self, key_digest: bytes, hashes: tuple[bytes, ...], limit: int) -> list[tuple[ConversationId, int]]:
        """Up to `limit` conversations of the key and how many of the prompt's full blocks each shares; deepest first,
        the latest added first among equals, those that share none last."""
        found: dict[ConversationId, int] = {}
        index = self._keys.get(key_digest)
        if index is None:
            return []
        path = (key_digest, *hashes)
        for shared in range(len(hashes), -1, -1):
            holders = index.holders.get(path[shared])
            if holders is None or holders.keys() <= found.keys():
                continue
            for conversation_id in reversed(holders):
                if conversation_id not in found:
                    found[conversation_id] = shared
                    if len(found) == limit:
                        return list(found.items())
        return list(found.items())

    def ending_within(self, key_digest: bytes, hashes: tuple[bytes, ...]) -> list[ConversationId]:
        """All conversations of the key whose full blocks are the first of this path: every ancestor is among them."""
        index = self._keys.get(key_digest)
        if index is None:
            return []
        enders = index.enders
        ends = [end for end in (key_digest, *hashes) if end in enders]
        return list(dict.fromkeys(conversation_id for end in ends for conversation_id in enders[end]))
