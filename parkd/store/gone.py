"""Remembers conversations that are no longer parked, so that a cold read can be explained."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

GONE_LIMIT = 128
"""Conversations remembered."""
GONE_HASHES = 16
"""Prefix hashes remembered of each: evenly spaced, always including the last. Under 200 KiB in all, outside the
budget."""


@dataclass(frozen=True, slots=True)
class _Gone:
    key_digest: bytes
    hashes: tuple[bytes, ...]
    verb: str
    reason: str
    at_s: float


class GoneMemory:
    """Bounded; the oldest entry makes room."""

    def __init__(self) -> None:
        self._gone: deque[_Gone] = deque(maxlen=GONE_LIMIT)

    def remember(self, key_digest: bytes, hashes: tuple[bytes, ...], verb: str, reason: str, at_s: float) -> None:
        """`verb` is what happened (`evicted`), `reason` why. Ignores conversations shorter than a block."""
        if hashes:
            step = -(-len(hashes) // GONE_HASHES)
            self._gone.append(_Gone(key_digest, hashes[::-1][::step], verb, reason, at_s))

    def why(self, key_digest: bytes, hashes: tuple[bytes, ...], now_s: float) -> str:
        """`evicted 12 s ago: ...` for the conversation that shared most with this prompt, the latest among equals; else
        empty."""
        depth = {prefix_hash: index for index, prefix_hash in enumerate(hashes)}
        best, deepest = None, -1
        for gone in reversed(self._gone):
            if gone.key_digest != key_digest:
                continue
            reach = max((depth.get(prefix_hash, -1) for prefix_hash in gone.hashes), default=-1)
            if reach > deepest:
                best, deepest = gone, reach
        if best is None:
            return ""
        return f"{best.verb} {max(0.0, now_s - best.at_s):.0f} s ago: {best.reason}"
