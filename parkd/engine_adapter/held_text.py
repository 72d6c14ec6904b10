"""Holds back text that may be the beginning of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from parkd.engine_adapter.base import TextPiece


class HeldText:
    """Releases text as soon as no stop string can begin in it."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = [text for text in stop if text]
        self._held = ""

    def release(self, fresh: str, *, final: bool) -> TextPiece:
        """The text that can be released now; with `final`, all of it. It ends before the first stop string."""
        text = self._held + fresh
        met = [(text.find(stop), stop) for stop in self._stop if stop in text]
        if met:
            at, stop = min(met)
            self._held = ""
            return TextPiece(text[:at], stop)
        keep = 0
        if not final:
            heads = (size for stop in self._stop for size in range(1, len(stop)) if text.endswith(stop[:size]))
            keep = max(heads, default=0)
        self._held = text[len(text) - keep :]
        return TextPiece(text[: len(text) - keep])
