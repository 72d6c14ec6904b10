"""How far a prompt is read, as a reasoning summary of the Responses API: the one place where its clients show words
before the answer. They send such an item back with the history, where it is recognised and left out of the prompt.
"""

from __future__ import annotations

import re

from parkd.types import Progress

STEP_S = 2.0
"""Time between two of them."""
MOST = 100
"""Most of them in one answer."""
_WORDS = re.compile(r"\*\*Reading the prompt: [0-9,]+ of [0-9,]+ tokens(?:, [0-9,]+ s left)?\*\*")


class ProgressSummaries:
    """Chooses the events that are told, of one answer."""

    def __init__(self) -> None:
        self._due_s = 0.0
        self._told = 0

    def words(self, progress: Progress) -> str | None:
        """The summary for an event, as a heading, since clients show headings in their status line. None: it is not
        told. Prompts that are read at once have none."""
        is_over = progress.read_tokens >= progress.total_tokens
        if progress.elapsed_s < self._due_s + STEP_S or is_over or self._told == MOST:
            return None
        self._due_s, self._told = progress.elapsed_s, self._told + 1
        shown, left_s = progress.shown, progress.left_s
        left = "" if left_s is None else f", {left_s:,.0f} s left"
        return f"**Reading the prompt: {shown['processed']:,} of {shown['total']:,} tokens{left}**"


def is_progress(text: str) -> bool:
    """Whether a summary that a client sends back is one of these."""
    return _WORDS.fullmatch(text) is not None
