"""Chooses where to take checkpoints while a prompt is read: where a later prompt is likely to continue. Pure.

|== system, tools ==|== turn ==|== turn ==|== last user message ==|= generation prompt =|x|
                    ^ root     ^          ^ edited message         ^ its tail may change ^ n-1: the same again

Each checkpoint inside the prompt ends a chunk early, and even a short chunk reads all weights. So a place is left out
if another serves as well: the start of the generation prompt if later prompts contain all of it, and starts of earlier
turns that closely follow another place.
"""

from __future__ import annotations

from parkd.types import PromptIdentity

CHECKPOINT_STEP_TOKENS = 8192
"""Most tokens between two checkpoints, as far as their limit allows."""
WORTH_A_CUT_TOKENS = 512
"""The start of an earlier turn gets a checkpoint if that would save a later prompt this many tokens. Few prompts fork
there, and one more chunk costs about as much as reading 30 tokens."""


def checkpoints_to_take(prompt: PromptIdentity, start: int, fork: int, limit: int) -> tuple[int, ...]:
    """At most `limit` positions in `(start, n - 1]`, ascending; if there are more, the most useful are taken.

    `fork` is where this prompt left what was known, since others may fork there too; 0: nowhere.
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
