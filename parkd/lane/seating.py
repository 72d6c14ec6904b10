"""Which live conversations a turn costs: pure decisions over what the seats hold.

Seats have their rows together (`EngineInfo.row_tokens`): conversations stay live side by side as long as all their rows
fit. Where they do not, those used longest ago make way, after they were parked. Seats are always given in the order of
their use, the least recently used first.
"""

from __future__ import annotations

from collections.abc import Sequence

from parkd.state import BLOCK_TOKENS

ANSWER_TOKENS = 1024
"""Tokens of an answer for which room is made before the turn; if it gets longer, the engine makes more. Clients often
allow many more tokens than they get."""


AHEAD_TOKENS = 16
"""Rows that a step may write beyond the last token: guesses of a draft head."""


def most_rows(prompt_tokens: int, limit: int | None, context_tokens: int) -> int:
    """The most rows that a turn can come to have, with an answer of at most `limit` tokens (None: no limit)."""
    if limit is None:
        return context_tokens
    return min(context_tokens, prompt_tokens + limit + AHEAD_TOKENS)


def first_rows(prompt_tokens: int, limit: int | None, context_tokens: int) -> int:
    """The rows that a turn has for sure when it begins. An answer that grows beyond waits until it can have more."""
    return most_rows(prompt_tokens, ANSWER_TOKENS if limit is None else min(limit, ANSWER_TOKENS), context_tokens)


def is_safe(row_tokens: int, turns: Sequence[tuple[int, int]], block_tokens: int = BLOCK_TOKENS) -> bool:
    """Whether turns can be under way at once, each with (the rows that it has, the most that it can come to have): all
    fit now, and there is an order in which each can end, with the rows that those before it give back. So whoever
    waits for more rows gets them in the end (the banker's algorithm)."""
    left = rows_left(row_tokens, [rows for rows, _ in turns], block_tokens)
    needs = sorted(
        (rows_taken(most, block_tokens) - rows_taken(rows, block_tokens), rows_taken(rows, block_tokens))
        for rows, most in turns
    )
    for need, held in needs:  # whoever needs least goes first: if it cannot end, nobody can
        if left < max(0, need):
            return False
        left += held
    return True


def rows_left(row_tokens: int, under_way: Sequence[int], block_tokens: int = BLOCK_TOKENS) -> int:
    """Rows of `row_tokens` that turns under way, which may come to have `under_way` rows each, leave to others."""
    return row_tokens - sum(rows_taken(rows, block_tokens) for rows in under_way)


def rows_taken(tokens: int, block_tokens: int = BLOCK_TOKENS) -> int:
    """Rows that a conversation takes of those that all have together: whole blocks."""
    return -(-tokens // block_tokens) * block_tokens


def displaced(
    positions: Sequence[int], seat: int, tokens: int, row_tokens: int, block_tokens: int = BLOCK_TOKENS
) -> tuple[int, ...]:
    """The seats to be emptied so that `seat` can have `tokens` rows: as few as are enough, in the order of `positions`,
    the rows that each seat holds. None if `row_tokens`, all rows together, is 0: each seat has a context of its own."""
    if not row_tokens:
        return ()
    others = [each for each, held in enumerate(positions) if held and each != seat]
    left = (
        row_tokens
        - rows_taken(tokens, block_tokens)
        - sum(rows_taken(positions[each], block_tokens) for each in others)
    )
    gone = []
    for each in others:
        if left >= 0:
            break
        left += rows_taken(positions[each], block_tokens)
        gone.append(each)
    return tuple(gone)


def harm(lost: Sequence[int]) -> tuple[int, ...]:
    """Compares what is lost with several seats, the least harm first: nothing, then what was used longest ago."""
    return tuple(sorted(lost, reverse=True))
