"""Finds the conversations that may share a prefix with a prompt, by key and prefix hashes.

The path of a conversation is one hash per full block. Under each key the paths form a radix tree: paths that begin
alike share a run of hashes, so that an operation compares a few whole runs, however long the paths are:

    key ── h0 h1 h2 ──┬── h3 h4         one conversation ends here
                      └── g3 ... g90 ── ...

Hashes find, comparison of units decides: under colliding hashes an answer may name too many, never too few.
"""

from __future__ import annotations

from collections.abc import Container

from parkd.store.records import ConversationId

Ids = dict[ConversationId, None]
"""An ordered set, the latest last."""
Path = tuple[bytes, ...]


class _Run:
    """A node of the tree: hashes that all of `ids` have after those of the runs above."""

    __slots__ = ("children", "enders", "hashes", "ids")

    def __init__(self, hashes: Path, ids: Ids, children: dict[bytes, _Run]) -> None:
        self.hashes = hashes
        self.ids = ids
        self.enders: Ids = {}
        """Conversations whose path ends with this run."""
        self.children = children
        """By their first hash."""

    def split(self, length: int) -> _Run:
        """Moves the first `length` hashes into a new run above this one. Returns the new run."""
        upper = _Run(self.hashes[:length], dict(self.ids), {self.hashes[length]: self})
        self.hashes = self.hashes[length:]
        return upper

    def join_only_child(self) -> None:
        """Merges with the run below if there is exactly one and no path ends between them."""
        if self.enders or len(self.children) != 1:
            return
        [child] = self.children.values()
        self.hashes += child.hashes
        self.enders, self.children = child.enders, child.children


class PrefixIndex:
    """A radix tree over paths of hashes. Exact for hashes; says nothing about units."""

    def __init__(self) -> None:
        self._keys: dict[bytes, _Run] = {}

    def add(self, conversation_id: ConversationId, key_digest: bytes, hashes: Path) -> None:
        run = self._keys.setdefault(key_digest, _Run((), {}, {}))
        run.ids[conversation_id] = None
        at = 0
        while at < len(hashes):
            child = run.children.get(hashes[at])
            if child is None:
                child = run.children[hashes[at]] = _Run(hashes[at:], {}, {})
            shared = _shared(child.hashes, hashes, at)
            if shared < len(child.hashes):
                child = run.children[hashes[at]] = child.split(shared)
            child.ids[conversation_id] = None
            run, at = child, at + shared
        run.enders[conversation_id] = None

    def remove(self, conversation_id: ConversationId, key_digest: bytes, hashes: Path) -> None:
        above, run = None, self._keys[key_digest]
        del run.ids[conversation_id]
        at = 0
        while at < len(hashes) and run.ids:
            above, run = run, run.children[hashes[at]]
            del run.ids[conversation_id]
            at += len(run.hashes)
        if run.ids:
            del run.enders[conversation_id]
            if above is not None:
                run.join_only_child()
        elif above is None:
            del self._keys[key_digest]
        else:
            del above.children[run.hashes[0]]
            if above.hashes:
                above.join_only_child()

    def find(
        self, key_digest: bytes, hashes: Path, limit: int, among: Container[ConversationId] | None = None
    ) -> list[tuple[ConversationId, int]]:
        """Up to `limit` conversations of the key, and how many of the prompt's full blocks each shares. Most shared
        first; among equals, the latest added first. Only those in `among`, if it is given."""
        found: dict[ConversationId, int] = {}
        for run, shared in reversed(self._met(key_digest, hashes)):
            if len(run.ids) == len(found):
                continue  # what was found is of runs below, so it is all there is
            for conversation_id in reversed(run.ids):
                if conversation_id not in found and (among is None or conversation_id in among):
                    found[conversation_id] = shared
                    if len(found) == limit:
                        return list(found.items())
        return list(found.items())

    def ending_within(self, key_digest: bytes, hashes: Path) -> list[ConversationId]:
        """All conversations of the key whose path is a prefix of this one. Every ancestor is among them."""
        found: list[ConversationId] = []
        at = 0
        for run, shared in self._met(key_digest, hashes):
            at += len(run.hashes)
            if shared == at:
                found += run.enders
        return found

    def _met(self, key_digest: bytes, hashes: Path) -> list[tuple[_Run, int]]:
        """The runs along a path, each with the index up to which the path agrees; the last perhaps only in part."""
        run = self._keys.get(key_digest)
        if run is None:
            return []
        met, at = [(run, 0)], 0
        while at < len(hashes) and (run := run.children.get(hashes[at])) is not None:
            shared = _shared(run.hashes, hashes, at)
            met.append((run, at + shared))
            if shared < len(run.hashes):
                break
            at += shared
        return met


def _shared(run: Path, hashes: Path, at: int) -> int:
    """How many leading hashes of the run the path has from index `at` on. Halves the range, comparing slices."""
    differ_by = min(len(run), len(hashes) - at)
    rest = hashes[at : at + differ_by]
    if run[:differ_by] == rest:
        return differ_by
    alike = 0
    while differ_by - alike > 1:
        middle = (alike + differ_by) // 2
        if run[alike:middle] == rest[alike:middle]:
            alike = middle
        else:
            differ_by = middle
    return alike
