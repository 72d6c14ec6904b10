"""How long an answer is while it comes, in tokens. Pure.

by ids              exact: the server returns them
by the server       exact: each event says what is counted so far
by events           nearly exact: one is a token or more, and the fewest hold several
by characters       an estimate: the server may cut its text anywhere
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from parkd.engine_adapter.remote.bodies import LEAST_OUTPUT
from parkd.engine_adapter.remote.events import Piece

MOST_CHARACTERS_A_TOKEN = 128
"""No vocabulary has longer tokens, but for marks that are no text."""


@dataclass(frozen=True, slots=True)
class _Seen:
    ids: int = 0
    events: int = 0
    characters: int = 0
    told: int | None = None
    """As the server counted in the last event; None: it did not."""

    def then(self, piece: Piece) -> _Seen:
        size = len(piece.thinking) + len(piece.text) + sum(len(each.name + each.arguments) for each in piece.calls)
        return _Seen(
            self.ids + len(piece.token_ids or ()),
            self.events + (size > 0),
            self.characters + size,
            (piece.usage.output_tokens or None) if piece.usage is not None else None,
        )


class AnswerLength:
    """Of one answer."""

    def __init__(self, limit: int | None, tokens_in: Callable[[int], int], *, token_events: bool) -> None:
        """`limit` is the most tokens that were asked for. `tokens_in` estimates the tokens of so many characters.
        `token_events`: an event with text is a token or more."""
        self._limit = None if limit is None else max(limit, LEAST_OUTPUT)
        self._tokens_in = tokens_in
        self._token_events = token_events
        self._seen = _Seen()

    def passes_limit(self, piece: Piece) -> bool:
        """Whether the answer is longer than was asked for with this piece, which does not count then. One that ends the
        answer does not pass the limit: the server has judged that itself."""
        seen = self._seen.then(piece)
        if self._limit is not None and piece.finish is None and self._is_beyond(self._limit, seen):
            return True
        self._seen = seen
        return False

    def _is_beyond(self, limit: int, seen: _Seen) -> bool:
        known = seen.ids or seen.told
        if known:
            return known > limit
        is_long = seen.events > limit and (self._token_events or self._tokens_in(seen.characters) > limit)
        return is_long or seen.characters > limit * MOST_CHARACTERS_A_TOKEN

    @property
    def tokens(self) -> int:
        """So far."""
        seen = self._seen
        estimate = seen.events if self._token_events else self._tokens_in(seen.characters)
        return seen.ids or seen.told or estimate
