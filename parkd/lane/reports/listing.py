"""What is told of conversations, parked and live: pure, from values to documents.

Conversations that share a prefix form a tree: the parent of one is the older one that shares most with it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from parkd.identity.matcher import common_prefix
from parkd.lane.reports.roster import Counts
from parkd.store.listing import Listed
from parkd.store.records import Name
from parkd.types import Units

HOLDERS_LIMIT = 8
"""Conversations that are compared unit by unit, of those that share equally many blocks with another."""


@dataclass(frozen=True, slots=True, eq=False)
class Shown:
    """A conversation as one caller sees it."""

    name: Name
    rows: tuple[Listed, ...]
    """What is parked of it, the longest first; empty: it is live alone."""
    units: Units
    prefix_hashes: tuple[bytes, ...]
    namespace: str
    key_digest: bytes
    is_live: bool
    counts: Counts
    """Of the turns that the caller may know of."""
    age_s: float
    idle_s: float
    kept_until_s: float | None = None
    """Unix time; None: it is not kept by name, or without an end."""
    shows_words: bool = False
    hides_sharing: bool = False
    """Other keys share this namespace: what this conversation's eviction would free, and what that would cost, would
    tell the caller how much of it they have sent."""
    is_pinned: bool = False
    """Where `hides_sharing`: at the caller's own wish."""


def as_alone(shown: Sequence[Shown], seats: int) -> list[Shown]:
    """The conversations of a caller who may not know when others run: as many are live as there are seats, those that
    are, and then those used last of which memory has the state. So they would be if nobody else ran."""
    are = [each.name for each in shown if each.is_live]
    rest = [
        each for each in shown if not each.is_live and each.counts.turns and any(row.ram_bytes for row in each.rows)
    ]
    rest.sort(key=lambda each: -each.counts.last_s)
    live = {*are, *(each.name for each in rest[: max(0, seats - len(are))])}
    return [replace(each, is_live=each.name in live) for each in shown]


def parents(conversations: Sequence[Shown]) -> Mapping[Name, tuple[Name, int]]:
    """By name, the parent of each conversation and how many tokens it shares with it. One that shares no full block
    with an older one has none.

    Hashes are chained, so the blocks that a conversation shares with others are its first ones.
    """
    holders: dict[bytes, list[Shown]] = {}
    found: dict[Name, tuple[Name, int]] = {}
    for each in sorted(conversations, key=lambda one: (-one.age_s, one.name)):
        hashes = each.prefix_hashes
        shared = bisect_left(range(len(hashes)), True, key=lambda at: hashes[at] not in holders)
        if shared:
            lengths = [(common_prefix(each.units, one.units), one.name) for one in holders[hashes[shared - 1]]]
            tokens, name = max(lengths, key=lambda pair: pair[0])
            found[each.name] = name, tokens
        for one in hashes:
            known = holders.setdefault(one, [])
            if len(known) < HOLDERS_LIMIT:
                known.append(each)
    return found


def document(shown: Shown, parent: tuple[Name, int] | None) -> Mapping[str, Any]:
    """One conversation in `/parkd/conversations`. Sizes in tokens and bytes, times in seconds."""
    longest = shown.rows[0] if shown.rows else None
    in_ram = [] if shown.hides_sharing else [row for row in shown.rows if row.value is not None]
    own_bytes = None if shown.hides_sharing else max((row.own_bytes for row in shown.rows), default=0)
    counts, words = shown.counts, shown.counts.words
    return {
        "id": shown.name,
        "live": shown.is_live,
        "parked": longest is not None,
        "usable": longest is None or not longest.is_foreign,
        "parent": None if parent is None else parent[0],
        "shared_tokens": 0 if parent is None else parent[1],
        "tokens": len(shown.units),
        "bytes": {
            "ram": max((row.ram_bytes for row in shown.rows), default=0),
            "disk": max((row.disk_bytes for row in shown.rows), default=0),
            "own": own_bytes,
        },
        "checkpoints": 0 if longest is None else len(longest.parked.checkpoints),
        "age_s": round(shown.age_s, 1),
        "idle_s": round(shown.idle_s, 1),
        "turns": counts.turns,
        "hits": counts.hits,
        "value": in_ram[0].value if in_ram else None,
        "saves_s": in_ram[0].saves_s if in_ram else None,
        "pinned": shown.is_pinned,
        "kept_until_s": shown.kept_until_s,
        **({"first_words": _words(words)} if shown.shows_words else {}),
    }


def _words(words: Any) -> Mapping[str, str] | None:
    return None if words is None else {"system": words.system, "user": words.user}
