"""Stop strings, which count in the text of the answer alone: not in its thinking, not in its calls.

thinking | text text STOP| ...          the text before the stop string is the last that is sent
thinking | text ST | call | OP          a call ends a run of text: nothing is searched for across it
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from parkd.answers.base import OutputEvent
from parkd.types import TextDelta


class StopStrings:
    """Finds the first stop string in the events of one answer, and holds back text that may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [_StopMatcher(text) for text in stops if text]
        self._withheld = ""
        self.met: str | None = None
        """The stop string that ended the answer."""

    def over(self, events: Iterable[OutputEvent]) -> Iterator[OutputEvent]:
        """The events that can be sent now; nothing after a stop string."""
        for event in events:
            if self.met is not None:
                return
            if isinstance(event, TextDelta):
                yield from _text(self._search(event.text))
            else:
                yield from self.flush()
                yield event

    def flush(self) -> Iterator[OutputEvent]:
        """The text that is held back, at the end of a run of text."""
        rest, self._withheld = self._withheld, ""
        for stop in self._stops:
            stop.matched = 0
        yield from _text(rest)

    def _search(self, text: str) -> str:
        pending = self._withheld + text
        if not self._stops:
            return pending
        seen = len(self._withheld)
        for place, character in enumerate(text, seen + 1):
            # The stop string that ends first wins, however the text is split into tokens. Of two that end together, the
            # longer wins.
            met = [stop.text for stop in self._stops if stop.feed(character)]
            if met:
                self.met = max(met, key=len)
                self._withheld = ""
                return pending[: place - len(self.met)]
        keep = max(stop.matched for stop in self._stops)
        self._withheld = pending[len(pending) - keep :]
        return pending[: len(pending) - keep]


def _text(text: str) -> Iterator[TextDelta]:
    if text:
        yield TextDelta(text)


class _StopMatcher:
    """Finds one string in a stream of characters (Knuth, Morris and Pratt 1977)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        """Length of the longest prefix of the string with which the stream ends."""
        self._borders = _borders(text)

    def feed(self, character: str) -> bool:
        """Processes one character. Returns True if the string is complete; the matcher must not be used afterwards."""
        while self.matched and self.text[self.matched] != character:
            self.matched = self._borders[self.matched - 1]
        if self.text[self.matched] == character:
            self.matched += 1
        return self.matched == len(self.text)


def _borders(text: str) -> list[int]:
    """The KMP failure function: for each prefix of the text, the length of its longest proper prefix that is also its
    suffix."""
    borders = [0] * len(text)
    length = 0
    for place in range(1, len(text)):
        while length and text[place] != text[length]:
            length = borders[length - 1]
        if text[place] == text[length]:
            length += 1
        borders[place] = length
    return borders
