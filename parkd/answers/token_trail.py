"""Which tokens of an answer its visible text comes from.

    tokens      [Hel][lo][ wor][ld][</think>][\\n\\n][H][i]
    raw text     Hello world </think>\\n\\nHi        a character belongs to one token, or to several if they share it
    parsed       (thinking: left out)        Hi   -> the tokens [H] and [i]

The parser is fed one character at a time, so that what it has not given out yet is either held back or a mark that it
took away: text that it gives out then continues what came before, or ends with the newest character.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from parkd.answers.base import OutputEvent
from parkd.types import ReasoningDelta, TextDelta

Place = tuple[int, int] | None
"""The first and the last token of a character; None for a character that no token wrote."""


class TokenTrail:
    """Follows the text of one answer from its tokens through the parser to the client."""

    def __init__(self) -> None:
        self._raw = ""
        """What was fed to the parser and not seen again."""
        self._raw_places: deque[Place] = deque()
        self._parsed: deque[Place] = deque()
        """Characters of the answer's text that the parser gave out and that are not sent yet."""
        self._unfinished: int | None = None
        """The token in which a character began that is not whole."""
        self._newest = 0
        self._reasoning = False
        self._next = 0
        """Tokens before it were told, or wrote nothing that is sent."""

    def wrote(self, token: int, text: str, *, mid_character: bool) -> None:
        """`token`, the number of a token in the answer, made `text` whole, and may have begun another character."""
        self._newest = token
        first = token if self._unfinished is None else self._unfinished
        self._raw_places.extend((first if place == 0 else token, token) for place in range(len(text)))
        self._raw += text
        if not mid_character:
            self._unfinished = None
        elif text or self._unfinished is None:
            self._unfinished = token

    def ended(self, text: str) -> None:
        """After the last token: `text` stands for a character that was begun and never made whole."""
        self.wrote(self._newest, text, mid_character=False)

    def parsed(self, events: Iterable[OutputEvent], *, in_reasoning: bool, fed: int) -> None:
        """The parser gave `events` for the raw text up to `fed` characters before its end."""
        for event in events:
            if isinstance(event, TextDelta):
                self._parsed.extend(self._found(event.text, fed))
            elif isinstance(event, ReasoningDelta):
                self._found(event.text, fed)
            else:
                self._drop(len(self._raw) - fed)
        if in_reasoning is not self._reasoning:
            self._reasoning = in_reasoning
            self._drop(len(self._raw) - fed)

    def sent(self, text: str) -> Sequence[int]:
        """The numbers of the tokens, ascending, that write this text, the next that is sent, and were not told yet."""
        told: list[int] = []
        for _ in text:
            place = self._parsed.popleft() if self._parsed else None
            if place is not None:
                told.extend(range(max(place[0], self._next), place[1] + 1))
                self._next = max(self._next, place[1] + 1)
        return told

    def _found(self, text: str, fed: int) -> list[Place]:
        """Where this text is in the raw text, which is then dropped up to its end."""
        seen = self._raw[: len(self._raw) - fed]
        start = 0 if seen.startswith(text) else seen.rfind(text)
        if start < 0:  # The parser wrote it itself.
            return [None] * len(text)
        self._drop(start)
        places = [self._raw_places.popleft() for _ in text]
        self._raw = self._raw[len(text) :]
        return places

    def _drop(self, count: int) -> None:
        self._raw = self._raw[count:]
        for _ in range(count):
            self._raw_places.popleft()
