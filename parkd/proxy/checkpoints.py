"""Where the fixed state is kept while a prompt is read: the places a later prompt is likely to go on from. Pure.

|== system, tools ==|== turn ==|== turn ==|== last user message ==|= generation prompt =|x|
                    ^ root     ^          ^ edited message         ^ its tail may change ^ n-1: the same again

Every place inside the prompt ends a chunk early, and a chunk reads all weights however short it is. So a place is left
out where another serves: the generation prompt's start where later prompts have all of it, and earlier turns' starts
close behind another place.
"""

from __future__ import annotations

from parkd.types import PromptIdentity

CHECKPOINT_STEP_TOKENS = 8192
"""No more than so many tokens are read between two checkpoints, as long as the limit allows."""
WORTH_A_CUT_TOKENS = 512
"""An earlier turn's start is kept if that would save a later prompt so many tokens: few ever fork there, and one more
chunk costs about as much as reading 30."""


def checkpoints_to_take(prompt: PromptIdentity, start: int, fork: int, limit: int) -> tuple[int, ...]:
    """Positions in `(start, n - 1]`, ascending, at most `limit`: the most likely ones first.

    `fork` is where this prompt left what was known: others may leave it there too. 0: nowhere.
    """
    last = len(prompt) - 1
    boundaries = prompt.boundaries[:-1] if prompt.generation_stays else prompt.boundaries
    inner = [place for place in boundaries if start < place < last]
    # The last user message, and the generation prompt if it may change.
    recent = 1 if prompt.generation_stays else 2
    chosen: list[int] = []
    for place in (last, *inner[-recent:], fork, *inner[:1]):
        if start < place <= last and place not in chosen:
            chosen.append(place)
    behind = last + WORTH_A_CUT_TOKENS
    for place in reversed(inner[1:-recent]):
        before = max((other for other in chosen if other <= place), default=start)
        if min(place - before, behind - place) >= WORTH_A_CUT_TOKENS:
            chosen.append(place)
            behind = place
    # Where chunks end anyway.
    first_step = (start // CHECKPOINT_STEP_TOKENS + 1) * CHECKPOINT_STEP_TOKENS
    chosen += [place for place in reversed(range(first_step, last, CHECKPOINT_STEP_TOKENS)) if place not in chosen]
    return tuple(sorted(chosen[:limit]))
