"""Turns that would read what another turn reads just now: they wait until it has, and go on from its state.

    one that has begun   |== read ==|~~~~~~~~~~~~|          `live_tokens` are read
    one that waits       |=================|.....|          begins once that is read, and reads the rest
                                        joint position

So several answers to one prompt, and sub-agents that send the same history at once, read it once. Pure decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from parkd.identity.matcher import common_prefix, resumable_position
from parkd.state import StateLayout
from parkd.types import PromptIdentity

LEAST_TOKENS = 256
"""Fewer are read sooner than they are parked and restored."""


@dataclass(frozen=True, slots=True)
class Joint:
    """Where a prompt can go on from the state of a turn that has begun."""

    now: int
    """From what that one has read already; 0: nowhere."""
    later: int
    """Once it has read its prompt."""
    goes_on: bool = True
    """It will, as far as can be told: what waits for it may rely on that."""


def common_tokens(prompt: PromptIdentity, other: PromptIdentity) -> int:
    """How many tokens both prompts begin with, as far as the state of `other` is of use to another: without its last
    token, which the first step of its answer reads. 0 if they are too few to ask."""
    if other.key != prompt.key or not prompt.prefix_hashes or prompt.prefix_hashes[:1] != other.prefix_hashes[:1]:
        return 0
    return min(common_prefix(other.units, prompt.units), len(other) - 1)


def joint(
    prompt: PromptIdentity,
    common: int,
    live_tokens: int,
    places: Sequence[int],
    layout: StateLayout,
    *,
    goes_on: bool = True,
) -> Joint:
    """`common` tokens are the same, and of these `live_tokens` are read so far. Where the layout has fixed state, the
    other one takes checkpoints at `places`."""

    def position(read_tokens: int) -> int:
        most = min(common, read_tokens)
        return resumable_position(most, len(prompt), layout.resume.floor, places, prompt.images)

    return Joint(position(live_tokens), position(common), goes_on)


def is_worth_waiting(
    joints: Iterable[Joint], own_position: int, saves: Callable[[int, int], bool] = lambda _start, _stop: True
) -> bool:
    """Whether a turn that could start from `own_position` by itself had better wait for one of those that have
    begun. `saves(start, stop)`: it takes less time to restore `stop` tokens than to read `[start, stop)`."""
    joints = list(joints)
    awaited = max((each for each in joints if each.goes_on), key=lambda each: each.later, default=None)
    if awaited is None or awaited.now == awaited.later:
        return False
    # What the awaited one has read so far does not count: the rest of it takes less time than to read that again.
    have = max(own_position, *(each.now for each in joints if each is not awaited), 0)
    return awaited.later - have >= LEAST_TOKENS and saves(have, awaited.later)
