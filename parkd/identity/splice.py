"""Puts the tokens of remembered answers into the prompts that repeat them.

The hash that finds an answer covers all ids before it. So that the next prompt of the conversation need not hash them
again, a trail of one step per answer is kept, and continued where it is still valid:

    then    |.....|step|.....|step|.....|step|
    now     |.....|step|.....|step|.....|step|.....| new: hashed and looked up
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from parkd.identity.canonical import CanonicalMessage
from parkd.identity.output_memory import OutputMemory, RememberedAnswer, Said, int32, json_key
from parkd.identity.tokens import MARK_CHARS, TokenisedText, common_chars
from parkd.types import HASH_BYTES
from parkd.types.identical import identical

Hasher = Any
"""The type of `hashlib.blake2b` objects, which has no public name."""


@dataclass(frozen=True, slots=True)
class Step:
    """What was found at the beginning of one assistant turn."""

    turn: int
    message: Mapping[str, Any]
    first: int
    """Index of the cut at which the turn begins."""
    reach: int
    """Index of the last cut that was looked at."""
    prefix: bytes
    answers: tuple[RememberedAnswer, ...]
    """The answers that were known then. The step is valid as long as exactly these are known."""
    answer: RememberedAnswer | None
    """The answer that replaces the pieces `[first, reach)`, if any."""
    hasher: Hasher
    """Its state after this step."""
    done: int
    """Index of the cut up to which ids are hashed."""


@dataclass(frozen=True, slots=True)
class Trail:
    cuts: Sequence[int]
    positions: Sequence[int]
    """With those of images, so not always as in the text that is remembered."""
    key_digest: bytes
    steps: tuple[Step, ...]


Trails = WeakKeyDictionary[TokenisedText, Trail]
"""Those of one namespace of keys, by the text as it is remembered; each as long as that."""


class Splicer:
    """Thread-safe: trails are immutable, and losing one only costs some hashing."""

    def __init__(self, memory: OutputMemory) -> None:
        self._memory = memory

    def splice(
        self,
        trails: Trails,
        turns: Sequence[CanonicalMessage],
        starts: Mapping[int, int],
        tokenised: TokenisedText,
        plain: str,
        key_digest: bytes,
        remembered: TokenisedText | None = None,
        base: TokenisedText | None = None,
    ) -> TokenisedText:
        """The same text with the ids of remembered answers. `plain` is the text without stand-ins; `starts` maps turns
        to the characters at which they begin. The trail is kept with the text as it is `remembered` (None: not kept);
        that of `base`, a text whose beginning this one has, is followed.

        A trail is made even if nothing is remembered yet: then its cost falls on the first prompt, which takes a
        hundred times as long to tokenise, and not on the next turn.
        """
        places = self._places(turns, starts, tokenised)
        held = self._held(trails, turns, places, tokenised, key_digest, base)
        steps = list(held)
        hasher = steps[-1].hasher.copy() if steps else blake2b(key=key_digest, digest_size=HASH_BYTES)
        done = steps[-1].done if steps else 0
        bounds = {index: starts[following] for index, following in pairwise(sorted(starts))}
        for index, first in places[len(steps) :]:
            bound = bounds.get(index, len(tokenised.text))
            step = self._step(turns[index], index, first, bound, done, tokenised, plain, hasher)
            done = step.done
            steps.append(step)
        if remembered is not None:
            trails[remembered] = Trail(tokenised.cuts, tokenised.positions, key_digest, tuple(steps))
        replaced = [(step.first, step.reach, step.answer.ids) for step in steps if step.answer is not None]
        if not replaced:
            return tokenised
        self._memory.spliced += len(replaced)
        return _with(tokenised, replaced)

    def _places(
        self, turns: Sequence[CanonicalMessage], starts: Mapping[int, int], tokenised: TokenisedText
    ) -> list[tuple[int, int]]:
        """`(turn, cut)` of each assistant turn that begins at a cut."""
        cuts = tokenised.cuts
        found = [
            (index, bisect_left(cuts, starts[index])) for index in sorted(starts) if turns[index].role == "assistant"
        ]
        return [(index, first) for index, first in found if cuts[first] == starts[index]]

    def _step(
        self,
        turn: CanonicalMessage,
        index: int,
        first: int,
        bound: int,
        done: int,
        tokenised: TokenisedText,
        plain: str,
        hasher: Hasher,
    ) -> Step:
        """Looks up one turn, behind which the next begins at the character `bound`; `hasher` goes on with it."""
        cuts, positions = tokenised.cuts, tokenised.positions
        hasher.update(int32(tokenised.ids[positions[done] : positions[max(done, first)]]).data)
        prefix, answer, end = hasher.digest(), None, first
        answers = self._memory.found(prefix) if first >= done else ()
        done = max(done, first)
        if answers:
            end = self._end(tokenised, first, bound)
            rendered = plain[cuts[first] : cuts[end]]
            if end > first:
                answer = next((one for one in reversed(answers) if _is_said(turn.message, rendered, one.said)), None)
        if answer is not None:
            hasher.update(int32(answer.ids).data)
            done = end
        return Step(index, turn.message, first, end, prefix, answers, answer, hasher.copy(), done)

    def _end(self, tokenised: TokenisedText, first: int, bound: int) -> int:
        """The cut at which the turn that begins at `first` ends as an answer does; `first` if it ends in another way.

        A template may end a turn without an end token. Then the next one found is another turn's, and whatever lies
        between must stay in the prompt.
        """
        for place in range(first + 1, len(tokenised.cuts) - 1):
            char, roles = tokenised.cuts[place], tokenised.marks[place]
            if char <= bound and self._memory.ends(tokenised.text, char):
                return place
            if char >= bound or (roles and "assistant" not in roles):
                break
        return first

    def _held(
        self,
        trails: Trails,
        turns: Sequence[CanonicalMessage],
        places: Sequence[tuple[int, int]],
        tokenised: TokenisedText,
        key_digest: bytes,
        base: TokenisedText | None,
    ) -> Sequence[Step]:
        """The steps of the base's trail that hold in this prompt."""
        trail = None if base is None else trails.get(base)
        if base is None or trail is None or trail.key_digest != key_digest:
            return ()
        same_chars = common_chars(base.text, tokenised.text) - MARK_CHARS
        return trail.steps[: self._holding(trail, turns, places, same_chars, tokenised)]

    def _holding(
        self,
        known: Trail,
        turns: Sequence[CanonicalMessage],
        places: Sequence[tuple[int, int]],
        same_chars: int,
        tokenised: TokenisedText,
    ) -> int:
        """How many leading steps are still valid: texts, cuts and messages are equal, and so are the remembered
        answers."""
        shared = bisect_left(known.cuts, same_chars)
        if known.cuts[:shared] != tokenised.cuts[:shared] or known.positions[:shared] != tokenised.positions[:shared]:
            return 0  # the same text may contain images of other sizes
        for count, step in enumerate(known.steps):
            holds = (
                count < len(places)
                and places[count] == (step.turn, step.first)
                and step.reach < shared
                and identical(turns[step.turn].message, step.message)
                and self._memory.found(step.prefix) is step.answers
            )
            if not holds:
                return count
        return len(known.steps)


def _is_said(message: Mapping[str, Any], rendered: str, said: Said) -> bool:
    """Whether a message is this answer, and the template shows all of it.

    A template that drops earlier thinking must not get it back: then the answer is rendered.
    """
    content = message.get("content") or ""
    if content not in ("".join(said.runs), "\n".join(said.runs)):
        return False
    calls = message.get("tool_calls") or ()
    if len(calls) != len(said.calls) or any(map(_differs, calls, said.calls)):
        return False
    thought = message.get("reasoning_content") or ""
    if thought and thought != said.reasoning:
        return False
    shown = (*said.runs, said.reasoning, *(name for name, _ in said.calls))
    return all(part.strip() in rendered for part in shown)


def _differs(call: Any, said: tuple[str, str]) -> bool:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or function.get("name") != said[0]:
        return True
    arguments = function.get("arguments")
    try:
        return json_key(json.loads(arguments) if isinstance(arguments, str) else arguments) != said[1]
    except (ValueError, TypeError, RecursionError):
        return True


def _with(tokenised: TokenisedText, replaced: Sequence[tuple[int, int, npt.NDArray[np.int32]]]) -> TokenisedText:
    """Pieces `[first, end)` become one piece with other ids, for each of `replaced`."""
    cuts: list[int] = []
    positions: list[int] = []
    marks: list[frozenset[str]] = []
    parts: list[npt.NDArray[Any]] = []
    place = shift = 0
    for first, end, ids in (*replaced, (len(tokenised.cuts) - 1, None, None)):
        parts.append(tokenised.ids[tokenised.positions[place] : tokenised.positions[first]])
        cuts += tokenised.cuts[place : first + 1]
        marks += tokenised.marks[place : first + 1]
        positions += [position + shift for position in tokenised.positions[place : first + 1]]
        if end is not None and ids is not None:
            parts.append(ids)
            shift += len(ids) - (tokenised.positions[end] - tokenised.positions[first])
            place = end
    whole = np.concatenate(parts, dtype=np.int64)
    whole.flags.writeable = False
    return TokenisedText(tokenised.text, whole, cuts, positions, marks)
