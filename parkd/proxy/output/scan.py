"""Finds markers in text that comes in pieces."""

from __future__ import annotations


def held_tail(text: str, markers: tuple[str, ...]) -> int:
    """Length of the longest tail of `text` that may be the head of a marker."""
    longest = min(len(text), max((len(marker) for marker in markers), default=0) - 1)
    for length in range(longest, 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0


def first_marker(text: str, markers: tuple[str, ...]) -> tuple[int, str] | None:
    """The earliest marker in `text` and where it starts."""
    found = [(place, marker) for marker in markers if (place := text.find(marker)) >= 0]
    return min(found, default=None)
