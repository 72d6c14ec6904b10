"""Where the fixed state is kept while a prompt is read: the places a later prompt is likely to go on from. Pure.

|== system, tools ==|== turn ==|== turn ==|== last user message ==|= generation prompt =|x|
                    ^ root     ^          ^ edited message         ^ its tail may change ^ n-1: the same again
"""

from __future__ import annotations

from collections.abc import Iterable

from parkd.types import PromptIdentity

CHECKPOINT_STEP_TOKENS = 8192
"""No more than so many tokens are read between two checkpoints, as long as the limit allows."""


def checkpoints_to_take(prompt: PromptIdentity, start: int, fork: int, limit: int) -> tuple[int, ...]:
    """Positions in `(start, n - 1]`, ascending, at most `limit`: the most likely ones first.

    `fork` is where this prompt left what was known: others may leave it there too. 0: nowhere.
    """
    last = len(prompt) - 1
    inner = [place for place in prompt.boundaries if start < place < last]
    steps = range(-(-(start + 1) // CHECKPOINT_STEP_TOKENS) * CHECKPOINT_STEP_TOKENS, last, CHECKPOINT_STEP_TOKENS)
    ranked = [last, *inner[-2:], fork, *inner[:1], *reversed(inner[1:-2]), *reversed(steps)]
    return tuple(sorted(_first(limit, (place for place in ranked if start < place <= last))))


def _first(limit: int, places: Iterable[int]) -> list[int]:
    chosen: list[int] = []
    for place in places:
        if place not in chosen and len(chosen) < limit:
            chosen.append(place)
    return chosen
