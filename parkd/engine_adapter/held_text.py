"""Text that may turn out to be the head of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from parkd.engine_adapter.base import TextPiece


class HeldText:
    """Gives text out as soon as no stop string can begin in it."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = [text for text in stop if text]
        self._held = ""

    def release(self, fresh: str, *, final: bool) -> TextPiece:
        """What can be given out now; with `final`, all that is left. Ends before the first stop string that is met."""
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
