"""Why tokens of a prompt were read, and how many of them were known before: one rule, over plain values.

now      |== reused ==|~ differs ~|== known, read again ==|-- new --|
earlier  |============|~~~~~~~~~~~|=======================|

Whatever was known whole and is gone is told by the reason of the start. Otherwise the prompt is compared with what the
same key sent before, part by part: parts that come back unchanged behind a difference need not have been read again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from parkd.identity.matcher import common_prefix
from parkd.lane.reports.explain import Explained, PromptParts, lasting_tokens
from parkd.lane.reports.volatile import Volatile, volatile_of
from parkd.lane.start import CHEAPER, NO_STATE, NOT_ASKED, OWN_GONE
from parkd.types import CacheOutcome, CacheReport, Cause, PromptIdentity, SegmentSpan, Units

LEAST_KNOWN = 32
"""With fewer tokens in common behind a difference, two prompts are not the same one changed."""
ENOUGH_SHARE = 0.9
"""If so much of what was read was known to one earlier request, older ones are not looked at."""
ELSEWHERE_GRAIN = 256
"""Servers keep state in blocks. With fewer tokens that were not reused, nothing was lost."""
AROUND_TOKENS = 64
"""Tokens before and behind a difference that are looked at as text."""
REORDERED_SHARE = 0.02
"""Tools are in another order, and not others, if at most this share of the tokens is not the same."""
_GONE = (
    ("not parked", Cause.REFUSED),
    ("evicted", Cause.EVICTED),
    (OWN_GONE, Cause.EVICTED),
    ("dropped", Cause.DAMAGE),
)
_SYSTEM = ("system", "(developer)")
UNUSED = "it was not used"
FORGOTTEN = "it was forgotten"


@dataclass(frozen=True, slots=True, eq=False)
class Earlier:
    """What a key sent before, and got."""

    prompt: PromptIdentity
    said: Units
    parts: PromptParts | None

    @classmethod
    def of(cls, explained: Explained) -> Earlier:
        return cls(explained.prompt, explained.said, explained.parts)


@dataclass(frozen=True, slots=True)
class Judgement:
    cause: Cause
    needless_tokens: int = 0
    place: int | None = None
    """The first token that differs from the earlier prompt."""
    segment: str = ""
    text: str = ""
    known_text: str = ""
    """What is around that place in both."""
    volatile: Volatile | None = None


def cause_of(
    prompt: PromptIdentity,
    parts: PromptParts | None,
    report: CacheReport,
    earlier: Sequence[Earlier],
    decode: Callable[[Units], str],
) -> Judgement:
    """`earlier` are requests of the same key, the newest first. `decode` turns units into text; images in them may
    become anything."""
    end, reused = len(prompt) - 1, report.reused_tokens
    if reused >= end:
        return Judgement(Cause.NONE)
    if report.why == NOT_ASKED:
        return Judgement(Cause.NOT_ASKED)
    if report.why.startswith(CHEAPER):
        return Judgement(Cause.CHEAPER)
    if reused > prompt.template_tokens and not report.why and report.divergence is None:
        return Judgement(Cause.NONE)  # it goes on where something known ended
    same = [each for each in earlier if each.prompt.key == prompt.key]
    gone = Cause.NO_CHECKPOINT if report.why.startswith(NO_STATE) else _gone(report)
    if gone is not None:
        exact = max((common_prefix(each.said, prompt.units) for each in same), default=0)
        return Judgement(gone, max(0, min(exact, end) - reused))
    if report.outcome is CacheOutcome.UPSTREAM:
        kept = max((common_prefix(each.said, prompt.units) for each in same), default=0)
        lost = min(kept, end) - reused
        if report.is_known and lost >= ELSEWHERE_GRAIN:
            return Judgement(Cause.EVICTED, lost)
        reused = max(reused, kept)  # what it does not say is not held against it
    best: _Comparison | None = None
    for each in same:
        found = _compared(prompt, reused, each)
        if best is None or found.common + found.known_tokens > best.common + best.known_tokens:
            best = found
        if best.known_tokens >= ENOUGH_SHARE * (end - reused):
            break
    if best is not None and best.known_tokens >= LEAST_KNOWN:
        return _changed(prompt, parts, best, decode)
    others = (common_prefix(each.said, prompt.units) for each in earlier if each.prompt.key != prompt.key)
    elsewhere = max(others, default=0)
    if elsewhere > reused + LEAST_KNOWN:
        return Judgement(Cause.KEY, min(elsewhere, end) - reused)
    return Judgement(Cause.NONE if reused > prompt.template_tokens else Cause.FIRST_TIME)


def _gone(report: CacheReport) -> Cause | None:
    if report.is_damaged:
        return Cause.DAMAGE
    cause = next((cause for words, cause in _GONE if report.why.startswith(words)), None)
    if cause is Cause.DAMAGE:
        return Cause.EVICTED if UNUSED in report.why else Cause.FORGOTTEN if FORGOTTEN in report.why else cause
    return cause


@dataclass(frozen=True, slots=True, eq=False)
class _Comparison:
    earlier: Earlier
    common: int
    known_tokens: int
    """Of the tokens that were read, those that the earlier request had too, behind the difference."""
    is_in_answer: bool
    """The difference is in what the model itself said."""


def _compared(prompt: PromptIdentity, reused: int, earlier: Earlier) -> _Comparison:
    common, end = common_prefix(earlier.said, prompt.units), len(prompt) - 1
    asked = lasting_tokens(earlier.prompt)
    if common in (len(earlier.said), len(prompt)):  # it goes on where the other ended: nothing differs
        return _Comparison(earlier, common, 0, is_in_answer=False)
    span_now = _at(prompt, common)
    if asked <= common:
        if span_now is None or "(assistant)" not in span_now.label:  # another question in place of the answer
            return _Comparison(earlier, common, 0, is_in_answer=False)
        known = max(0, min(len(earlier.said), end) - max(common, reused))
        return _Comparison(earlier, common, known, is_in_answer=True)
    there = Counter(_content(earlier.said, span) for span in earlier.prompt.segments if span.stop <= asked)
    known = 0
    for span in prompt.segments:
        if span.stop <= max(common, reused):
            continue
        content = _content(prompt.units, span)
        if there[content] > 0:
            there[content] -= 1
            known += span.stop - max(span.start, reused)
        elif span.start <= common < span.stop:
            other = _at(earlier.prompt, common)
            known += max(0, common - max(span.start, reused))
            if other is not None:
                here = prompt.units[max(common, reused) : span.stop]
                known += _common_suffix(here, earlier.said[common : other.stop])
    return _Comparison(earlier, common, min(known, end - reused), is_in_answer=False)


def _changed(
    prompt: PromptIdentity, parts: PromptParts | None, found: _Comparison, decode: Callable[[Units], str]
) -> Judgement:
    place, earlier = found.common, found.earlier
    text = decode(_around(prompt.units, place))
    known_text = decode(_around(earlier.said, place))
    span, volatile = _at(prompt, place), volatile_of(text, known_text)
    label = span.label if span is not None else ""
    cause = _cause(prompt, parts, found, label, is_volatile=volatile is not None)
    kept = volatile if cause is Cause.CLOCK else None
    return Judgement(cause, found.known_tokens, place, label, text, known_text, kept)


def _cause(
    prompt: PromptIdentity, parts: PromptParts | None, found: _Comparison, label: str, *, is_volatile: bool
) -> Cause:
    earlier = found.earlier
    if found.is_in_answer:
        return Cause.TEMPLATE
    is_head, is_system = found.common < _head_stop(prompt), any(word in label for word in _SYSTEM)
    if is_volatile:
        return Cause.CLOCK
    if _system_places(prompt) != _system_places(earlier.prompt):
        return Cause.SYSTEM_MOVED
    if not is_head:
        return Cause.SYSTEM if is_system else Cause.HISTORY_EDITED
    tools_differ, system_differs, model_differs = _differ(parts, earlier.parts, label)
    if tools_differ:
        return Cause.TOOLS_REORDERED if _is_reordered(prompt, earlier.prompt) else Cause.TOOLS
    if system_differs:
        return Cause.SYSTEM
    return Cause.MODEL if model_differs else Cause.HISTORY_EDITED


def _differ(parts: PromptParts | None, other: PromptParts | None, label: str) -> tuple[bool, bool, bool]:
    """Whether tools, system and model differ; by the name of the part if nothing else is known."""
    if parts is None or other is None:
        return "tools" in label, "system" in label, False
    return parts.tools != other.tools, parts.system != other.system, parts.model != other.model


def _is_reordered(prompt: PromptIdentity, earlier: PromptIdentity) -> bool:
    """Whether the heads of both have the same tokens, in whatever order."""
    one, other = prompt.units[: _head_stop(prompt)], earlier.units[: _head_stop(earlier)]
    counts = Counter(one.tolist())
    counts.subtract(Counter(other.tolist()))
    return sum(map(abs, counts.values())) <= REORDERED_SHARE * (len(one) + len(other))


def _head_stop(prompt: PromptIdentity) -> int:
    """The end of what stands before the first message that is no system message."""
    return prompt.segments[0].stop if prompt.segments else 0


def _system_places(prompt: PromptIdentity) -> list[str]:
    return [span.label for span in prompt.segments if any(word in span.label for word in _SYSTEM)]


def _at(prompt: PromptIdentity, place: int) -> SegmentSpan | None:
    return next((span for span in prompt.segments if span.start <= place < span.stop), None)


def _content(units: Units, span: SegmentSpan) -> bytes:
    return units[span.start : span.stop].tobytes()


def _common_suffix(one: Units, other: Units) -> int:
    return common_prefix(np.ascontiguousarray(one[::-1]), np.ascontiguousarray(other[::-1]))


def _around(units: Units, place: int) -> Units:
    return units[max(0, place - AROUND_TOKENS) : place + AROUND_TOKENS]
