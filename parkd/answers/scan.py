"""Finds markers in text that arrives in pieces."""

from __future__ import annotations


def held_tail(text: str, markers: tuple[str, ...]) -> int:
    """Length of the longest suffix of `text` that may be the beginning of a marker."""
    longest = min(len(text), max((len(marker) for marker in markers), default=0) - 1)
    for length in range(longest, 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0


def first_marker(text: str, markers: tuple[str, ...]) -> tuple[int, str] | None:
    """(position, marker) of the first marker in `text`; None without one."""
    found = [(place, marker) for marker in markers if (place := text.find(marker)) >= 0]
    return min(found, default=None)
